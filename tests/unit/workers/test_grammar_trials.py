"""The process that tries grammars: its limits, its cache and its end, with a stub of vLLM."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from harness.servers import REPOSITORY, wait_until
from titopool.errors import InvalidRequest
from workers.engine.grammars import process
from workers.engine.grammars.process import Passed
from workers.engine.grammars.trials import MAX_CACHED_BYTES, GrammarTrials

LIMIT_S = 0.3


@dataclass
class Structured:
    """Stands for vLLM's StructuredOutputsParams."""

    regex: str
    _backend: str | None = None


def params_of(regex: str) -> SimpleNamespace:
    return SimpleNamespace(structured_outputs=Structured(regex))


def outcome(fields, manager, log: Path) -> Passed:
    """A trial: the grammar is what it does."""
    with log.open("a") as file:
        file.write(fields["regex"][:20] + "\n")
    match fields["regex"]:
        case "loop":
            while True:
                pass
        case "hangs-once" if log.read_text().count("hangs-once") == 1:
            time.sleep(60)
        case "memory":
            bytearray(2 * process.MAX_MEMORY_BYTES)
        case "abort":
            os.abort()
    return Passed({**fields, "regex": fields["regex"].upper(), "_backend": "stub"})


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(process, "_manager", lambda config: object())
    monkeypatch.setattr(process, "_outcome", outcome)
    made = GrammarTrials(tmp_path / "log", LIMIT_S)
    yield made
    made.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


async def checked(trials: GrammarTrials, regex: str) -> str:
    """What a job gets: its grammar after the trial, or the refusal."""
    params = params_of(regex)
    try:
        await trials.check(params)
        # A job that shares the parameters tries nothing.
        await trials.check(params)
    except InvalidRequest as error:
        return f"{error.param}: {error.message}"
    return params.structured_outputs.regex


def test_a_grammar_is_tried_once(trials, log):
    async def run() -> list[str]:
        found = await asyncio.gather(*(checked(trials, "a") for _ in range(5)))
        return [*found, await checked(trials, "a")]

    assert asyncio.run(run()) == ["A"] * 6
    assert log.read_text().split() == ["a"]


@pytest.mark.parametrize("kind", ["loop", "memory", "abort"])
def test_a_trial_beyond_its_limits_is_a_refusal(trials, kind):
    async def run() -> tuple[str, str, float]:
        longest_s, began_s = 0.0, asyncio.get_running_loop().time()
        hostile = asyncio.create_task(checked(trials, kind))
        while not hostile.done():
            await asyncio.sleep(0.01)
            now_s = asyncio.get_running_loop().time()
            longest_s, began_s = max(longest_s, now_s - began_s), now_s
        return hostile.result(), await checked(trials, "a"), longest_s

    message, honest, longest_s = asyncio.run(run())
    assert f"within {LIMIT_S:g} s of CPU time (grammar_timeout_s) and 2 GiB of memory" in message
    assert honest == "A"
    # The worker's loop goes on, and with it heartbeats.
    assert longest_s < 5


def test_a_cancelled_job_does_not_end_the_trial_of_another(trials, log):
    async def run() -> str:
        first = asyncio.create_task(checked(trials, "a"))
        second = asyncio.create_task(checked(trials, "a"))
        await asyncio.sleep(0)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        return await second

    assert asyncio.run(run()) == "A"
    assert log.read_text().split() == ["a"]


def test_a_process_that_has_ended_is_started_again(trials):
    os.kill(trials._server.pid, signal.SIGKILL)
    wait_until(lambda: psutil.Process(trials._server.pid).status() == psutil.STATUS_ZOMBIE, 10)
    assert asyncio.run(checked(trials, "a")) == "A"


def test_a_trial_that_its_process_lost_is_no_refusal(trials, log):
    # No limit ends the first trial.
    trials.close()
    trials = GrammarTrials(log, 60)

    async def run() -> str:
        checking = asyncio.create_task(checked(trials, "hangs-once"))
        await asyncio.to_thread(
            wait_until, lambda: log.exists() and "hangs-once" in log.read_text(), 10
        )
        first = trials._server.pid
        os.killpg(first, signal.SIGKILL)
        outcome = await checking
        assert trials._server.pid != first
        return outcome

    try:
        assert asyncio.run(run()) == "HANGS-ONCE"
    finally:
        trials.close()


def test_outcomes_are_bounded_in_bytes(trials):
    size = MAX_CACHED_BYTES // 20

    async def run() -> None:
        for number in range(25):
            assert await checked(trials, f"{number}-" + "a" * size)

    asyncio.run(run())
    sizes = trials._trials._sizes.values()
    assert sum(sizes) <= MAX_CACHED_BYTES
    assert len(sizes) > 10


def test_no_grammars(trials):
    off = GrammarTrials(None, 0)
    assert "takes no grammars (grammar_timeout_s is 0)" in asyncio.run(checked(off, "a"))
    off.close()


def test_the_process_ends_with_its_worker():
    code = (
        "import time; from workers.engine.grammars.trials import GrammarTrials;"
        "trials = GrammarTrials(None, 1.0); print(trials._server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as worker:
        pid = int(worker.stdout.readline())
        # Whoever looks for workers by their command line must not find it.
        wait_until(lambda: psutil.Process(pid).cmdline()[0].startswith("titopool::grammars"), 10)
        worker.kill()
    wait_until(lambda: not psutil.pid_exists(pid), 10)


def test_outcomes_travel():
    passed = Passed({"regex": "a", "_backend": "xgrammar", "json_object": None})
    assert process.decode_outcome(msgspec.msgpack.encode(passed)) == passed
