"""Two front ends learn of each other's jobs and route by them: two links to stub workers."""

import time
from collections.abc import Callable

import gevent
import numpy as np
import pytest

from app.generation import Prompt, make_jobs
from app.pool.link import Link
from app.pool.request import Request
from tests.servers import START_TIMEOUT_S
from titopool.settings.config import ServerConfig
from titopool.settings.sampling import SamplingOptions
from titopool.wire.prefixes import BLOCK_TOKENS


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
        return [one.completions[0].token_ids for one in request.take_results()]

    @property
    def loads(self) -> list[int]:
        """Tokens of other front ends in flight at each worker."""
        return [one.load_of_others.other_tokens for one in self.link._pool.workers.values()]

    @property
    def num_completed(self) -> list[int]:
        beats = [view.heartbeat for view in self.link.workers]
        return [one.counters.num_completed_jobs for one in beats if one is not None]


@pytest.fixture
def front_ends(start_stub, tmp_path):
    started = []

    def start(placement: str) -> list[FrontEnd]:
        for index in range(2):
            start_stub(index)
        endpoints = tuple(f"ipc://{tmp_path}/worker-{index}" for index in range(2))
        started.extend(FrontEnd(endpoints, placement) for _ in range(2))
        return started

    yield start
    for one in started:
        one.link.close()


@pytest.mark.parametrize(
    "placement, expected",
    [pytest.param("prefix", [1, 2], id="prefix"), pytest.param("least_loaded", [2, 1], id="load")],
)
def test_another_front_end_routes_the_next_turn_at_once(front_ends, placement, expected):
    first, second = front_ends(placement)
    prompts = [np.arange(n, n + 4 * BLOCK_TOKENS, dtype=np.int32).tobytes() for n in (1, 500)]
    completions = first.generate(*prompts)
    # Much less than the 2 s between heartbeats.
    gevent.sleep(0.1)
    second.generate(prompts[1] + completions[1] + prompts[0])
    let_links_work_until(lambda: sum(second.num_completed) == 3, 20)
    assert second.num_completed == expected


def test_loads_are_reported_long_before_the_next_heartbeat(start_stub, tmp_path):
    slow = {"heartbeat_interval_s": 20.0, "heartbeat_timeout_s": 120.0}
    variables = {f"TITOPOOL_{name.upper()}": str(value) for name, value in slow.items()}
    for index in range(2):
        start_stub(index, "--delay-s", "0.5", **variables)
    endpoints = tuple(f"ipc://{tmp_path}/worker-{index}" for index in range(2))
    first, second = (FrontEnd(endpoints, "least_loaded", **slow) for _ in range(2))
    prompts = [np.arange(n, n + 64, dtype=np.int32).tobytes() for n in range(1, 9)]
    begin = time.monotonic()
    batch = gevent.spawn(first.generate, *prompts)
    let_links_work_until(lambda: min(second.loads) > 0 and second.loads[0] == second.loads[1], 9)
    batch.get(timeout=20)
    let_links_work_until(lambda: second.loads == [0, 0], 9)
    assert time.monotonic() - begin < 18
    for one in (first, second):
        one.link.close()


def test_no_digests_are_needed_for_a_single_worker(start_stub, tmp_path):
    start_stub(0)
    alone = FrontEnd((f"ipc://{tmp_path}/worker-0",), "prefix")
    assert not alone.link.needs_prefixes
    alone.link.close()
