"""Two front ends learn of each other's jobs and route by them: two links to stub workers."""

import time
from collections.abc import Callable

import gevent
import numpy as np
import pytest

from app.call.jobs import Prompt, make_jobs
from app.pool.link import Link
from app.pool.prefix_index import as_integers
from app.pool.request import Request
from harness.servers import START_TIMEOUT_S, wait_until
from titopool.settings.config import ServerConfig
from titopool.settings.sampling import SamplingOptions
from titopool.wire.prefixes import BLOCK_TOKENS, prompt_hashes

# Seconds.
SLOW = {"heartbeat_interval_s": 20.0, "heartbeat_timeout_s": 120.0}


def let_links_work_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Waits with gevent, because the links run in this thread."""
    with gevent.Timeout(timeout_s):
        while not condition():
            gevent.sleep(0.02)


class FrontEnd:
    """A link without HTTP."""

    def __init__(self, endpoints: tuple[str, ...], placement: str, **settings: float):
        self.link = Link(ServerConfig(placement=placement, **settings), endpoints)
        self.link.start()
        let_links_work_until(self._is_ready, START_TIMEOUT_S)

    def _is_ready(self) -> bool:
        beats = [view.heartbeat for view in self.link.workers]
        return bool(beats) and all(one is not None and one.phase == "ready" for one in beats)

    def generate(self, *prompts: bytes) -> list[bytes]:
        options = SamplingOptions(max_tokens=3 * BLOCK_TOKENS)
        jobs = make_jobs(
            [Prompt(np.frombuffer(one, dtype=np.int32), "prompts") for one in prompts],
            options, self.link.facts,
            with_prefixes=self.link.needs_prefixes,
        )  # fmt: skip
        request = Request(jobs)
        self.link.submit(request)
        assert request.wait(10)
        self.last_workers = request.workers
        return [one.completions[0].token_ids for one in request.take_results()]

    @property
    def loads(self) -> list[int]:
        """Tokens of other front ends in flight at each worker."""
        return [one.load_of_others.other_tokens for one in self.link._pool.workers.values()]

    def knows(self, prompt: bytes) -> bool:
        """Whether a worker is known to hold all whole blocks of `prompt`."""
        digests = as_integers(prompt_hashes(prompt, None))
        workers = self.link._pool.workers.values()
        return max(one.prefixes.num_found(digests) for one in workers) == len(digests)


@pytest.fixture
def front_ends(start_stub, tmp_path):
    """`front_ends(placement, "--delay-s", …)`: two links to two workers, with rare heartbeats."""
    started = []

    def start(placement: str, *arguments: str) -> list[FrontEnd]:
        variables = {f"TITOPOOL_{name.upper()}": str(value) for name, value in SLOW.items()}
        ready = [tmp_path / f"ready-{index}" for index in range(2)]
        for index, file in enumerate(ready):
            start_stub(index, *arguments, "--ready-file", str(file), **variables)
        # A link that comes earlier learns that they are ready from the second heartbeat.
        wait_until(lambda: all(file.exists() for file in ready), START_TIMEOUT_S)
        endpoints = tuple(f"ipc://{tmp_path}/worker-{index}" for index in range(2))
        started.extend(FrontEnd(endpoints, placement, **SLOW) for _ in range(2))
        return started

    yield start
    for one in started:
        one.link.close()


@pytest.mark.parametrize("placement, expected", [("prefix", "1"), ("least_loaded", "0")])
def test_another_front_end_routes_the_next_turn_before_a_heartbeat(front_ends, placement, expected):
    first, second = front_ends(placement)
    prompts = [np.arange(n, n + 4 * BLOCK_TOKENS, dtype=np.int32).tobytes() for n in (1, 500)]
    begin = time.monotonic()
    completions = first.generate(*prompts)
    turn = prompts[1] + completions[1]
    if placement == "prefix":
        let_links_work_until(lambda: second.knows(turn), 9)
    second.generate(turn + prompts[0])
    assert second.last_workers == {expected}
    assert time.monotonic() - begin < SLOW["heartbeat_interval_s"]


def test_another_front_end_knows_a_prompt_that_still_runs(front_ends):
    first, second = front_ends("prefix", "--delay-s", "5")
    prompt = np.arange(4 * BLOCK_TOKENS, dtype=np.int32).tobytes()
    running = gevent.spawn(first.generate, prompt)
    let_links_work_until(lambda: second.knows(prompt), 9)
    assert not running.ready()
    running.get(timeout=20)


def test_loads_are_reported_long_before_the_next_heartbeat(front_ends):
    first, second = front_ends("least_loaded", "--delay-s", "0.5")
    prompts = [np.arange(n, n + 64, dtype=np.int32).tobytes() for n in range(1, 9)]
    begin = time.monotonic()
    batch = gevent.spawn(first.generate, *prompts)
    let_links_work_until(lambda: min(second.loads) > 0 and second.loads[0] == second.loads[1], 9)
    batch.get(timeout=20)
    let_links_work_until(lambda: second.loads == [0, 0], 9)
    assert time.monotonic() - begin < 18


def test_no_digests_are_needed_for_a_single_worker(start_stub, tmp_path):
    start_stub(0)
    alone = FrontEnd((f"ipc://{tmp_path}/worker-0",), "prefix")
    assert not alone.link.needs_prefixes
    alone.link.close()
