"""What an engine counts while a server runs it: vLLM's metrics, read from /metrics while others run."""

import multiprocessing
import re
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

# The watcher starts before this process has threads.
FORK = multiprocessing.get_context("fork")
EVERY_S = 0.25
# This server's workers send their engine's metrics every 2 s.
SETTLED_WITHIN_S = 10.0
# Of the tokens of a run; the rest has ever fewer sequences.
COUNTED_PART = 0.8
NAMES = ("num_requests_running", "generation_tokens_total", "iteration_tokens_total_count")


class Counts(NamedTuple):
    """Sequences that run, and all tokens and engine steps so far."""

    num_running: float
    num_tokens: float
    num_steps: float


def read_counts(url: str) -> Counts:
    """The counts of all engines of a server together.

    Raises:
        ValueError: a metric is missing.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    found = [re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.M) for name in NAMES]
    if not all(found):
        raise ValueError(f"/metrics: expected vLLM's {NAMES}, got {found}")
    return Counts(*(sum(map(float, one)) for one in found))


@contextmanager
def watched(url: str) -> Iterator[Callable[[int], list[Counts]]]:
    """Reads the counts `EVERY_S` in a process of its own. What it yields takes the tokens of the run,
    waits until the engine has counted them, and returns all readings."""
    own, other = FORK.Pipe()
    process = FORK.Process(target=_watch, args=(url, other), daemon=True)
    process.start()
    # The first reading is there.
    own.recv()

    def end(num_tokens: int) -> list[Counts]:
        own.send(num_tokens)
        readings: list[Counts] = own.recv()
        return readings

    try:
        yield end
    finally:
        process.kill()
        process.join()


def _watch(url: str, pipe: Connection) -> None:
    readings = [_settled(url)]
    pipe.send(None)
    while not pipe.poll(EVERY_S):
        readings.append(read_counts(url))
    num_tokens = pipe.recv()
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while readings[-1].num_tokens - readings[0].num_tokens < num_tokens:
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected {num_tokens} more tokens in /metrics, got {readings[-1]}")
        time.sleep(EVERY_S)
        readings.append(read_counts(url))
    pipe.send(readings)


def _settled(url: str) -> Counts:
    """The counts once the engine runs nothing, which says that they are of after its last run."""
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while (found := read_counts(url)).num_running:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url}: expected an idle engine, got {found}")
        time.sleep(EVERY_S)
    return found


def mean_counts(readings: Sequence[Counts]) -> dict[str, float | None]:
    """Running sequences, averaged over the readings with work until `COUNTED_PART` of the tokens,
    and tokens for each engine step of all of it. None: no reading came in that part."""
    first, last = readings[0], readings[-1]
    until = first.num_tokens + COUNTED_PART * (last.num_tokens - first.num_tokens)
    running = [one.num_running for one in readings if first.num_tokens < one.num_tokens <= until]
    return {
        "running": statistics.mean(running) if running else None,
        "tokens_per_step": (last.num_tokens - first.num_tokens)
        / (last.num_steps - first.num_steps),
    }
