"""The command `titopool`: it refuses bad settings at once and survives a closed pipe."""

import os
import resource
import subprocess
import sys

import pytest

from harness.servers import REPOSITORY, TITOPOOL, environment


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TITOPOOL, *words],
        env=environment(**variables), cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    "words, variables, part",
    [
        pytest.param(["--nam-workers", "2"], {}, "--num-workers?", id="our-option"),
        pytest.param(["--max-modle-len", "2"], {}, "--max-model-len?", id="vllms-option"),
        pytest.param([], {"TITOPOOL_PROT": "1"}, "TITOPOOL_PORT?", id="variable"),
        pytest.param(["/no/such/model"], {}, "got /no/such/model; a name of the hub is OWNER/NAME", id="path"),
    ],
)  # fmt: skip
def test_a_wrong_setting_stops_the_start_at_once(words, variables, part):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run("serve", *words, **variables)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 2
    assert part in result.stderr
    assert len(result.stderr.splitlines()) == 1
    # CPU seconds: unlike wall time, they do not depend on the load of the machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_help_ends_quietly_on_a_closed_pipe():
    read, write = os.pipe()
    with subprocess.Popen(
        [TITOPOOL, "--help"], env=environment(), stdout=write, stderr=subprocess.PIPE
    ) as process:
        os.close(write)
        os.close(read)
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    "variables, start",
    [
        ({"TITOPOOL_ENGINE_ARGS": "--max-modle-len 5"}, "--max-modle-len: "),
        (
            {"TITOPOOL_MODEL": "/no/such/model"},
            "model: expected a folder that exists, got /no/such",
        ),
    ],
)
def test_gunicorn_alone_refuses_a_wrong_setting(variables, start):
    result = subprocess.run(
        [sys.executable, "-m", "gunicorn", "app:create_app()"],
        env=environment(**variables),
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith(f"titopool: {start}")
    assert len(result.stderr.splitlines()) == 1
