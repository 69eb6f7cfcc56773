"""How far a small request goes in a front end: what enters one more module says why, or goes elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

from harness.servers import REPOSITORY, environment
from tests.conftest import StartStub

# Of `POST /generate/` with one prompt of three ids (`tests/kit/walk.py`). They fall, and do not rise: 219 hops
# on two quiet cores, up to 233 beside other work.
MODULES, HOPS = 42, 235


def test_a_small_request_enters_no_more_modules(start_stub: StartStub, tmp_path: Path):
    start_stub(0)
    ended = subprocess.run(
        [sys.executable, "-m", "gevent.monkey", "--module", "tests.kit.walk", f"ipc://{tmp_path}/worker-0"],
        env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout)
    assert found["modules"] <= MODULES, found
    assert found["hops"] <= HOPS, found
