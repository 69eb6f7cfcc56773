"""`titopool demo` with real vLLM: its steps, and that it leaves no process."""

import re
import signal
import subprocess

import psutil
import pytest

from harness.servers import (
    REPOSITORY,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    TITOPOOL,
    alive,
    environment,
    wait_until,
    wait_until_ended,
)
from tests.kit.terminal import on_terminal


def test_the_demo_walks_through_a_real_server_until_ctrl_c():
    with on_terminal(
        [TITOPOOL, "demo", "--keep"], env=environment(TERM="xterm", TITOPOOL_PORT="1"),
        cwd=REPOSITORY,
    ) as terminal:  # fmt: skip
        terminal.wait_for("Ctrl-C ends it", START_TIMEOUT_S)
        children = psutil.Process(terminal.process.pid).children(recursive=True)
        assert len(children) >= 3
        terminal.type(b"\x03")
        assert terminal.wait(STOP_TIMEOUT_S) == 130
        wait_until_ended(children)
    seen = "\n".join(dict.fromkeys(terminal.seen))
    assert "[42, 1751, 14, 1080]" in seen
    assert len(re.findall(r"logprobs  \[-\d", seen)) == 1
    assert re.search(r"\d+ ids; # the model wrote", seen)
    before, now = (re.search(rf"{word}  +\[([\d, ]+)\]", seen)[1] for word in ("before", "now"))
    assert before != now
    assert "], version 1" in seen
    assert "titopool serve MODEL" in seen
    assert "Traceback" not in seen


# Ctrl-C ends the demo above, later.
@pytest.mark.parametrize("number", [pytest.param("INT", marks=pytest.mark.variant), "TERM", "KILL"])
def test_a_demo_that_is_ended_early_leaves_no_process(number):
    process = subprocess.Popen(
        [TITOPOOL, "demo"], env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    children: dict[int, psutil.Process] = {}

    def has_started() -> bool:
        children.update(
            {one.pid: one for one in psutil.Process(process.pid).children(recursive=True)}
        )
        return any("workers.supervisor" in one.cmdline() for one in alive(list(children.values())))

    try:
        wait_until(has_started, 60)
        process.send_signal(getattr(signal, f"SIG{number}"))
        output, _ = process.communicate(timeout=STOP_TIMEOUT_S + 30)
    finally:
        process.kill()
    assert process.returncode == {"INT": 130, "TERM": 143, "KILL": -9}[number]
    assert "Traceback" not in output
    wait_until_ended(list(children.values()))
