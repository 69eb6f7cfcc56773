"""Two trainers call in any order: no server error, consistent state, nothing leaked."""

import concurrent.futures
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from harness.servers import wait_until
from tests.all.fuzz.calls import KINDS, NEXT, Call, HttpCall, Trainer, calls, make_folders
from tests.all.fuzz.exploring import TIMEOUT_S, ServerGone, explore
from tests.all.fuzz.stub_pool import StubPool, stub_pool

pytestmark = pytest.mark.timeout(TIMEOUT_S)

STEP_S, REQUEST_S = 0.5, 3.0
# A call has up to three steps, each with the full timeout; the rest is for a busy machine.
LIMIT_S = 3 * STEP_S + 2
SETTINGS = {
    "weight_update_timeout_s": str(STEP_S), "request_timeout_s": str(REQUEST_S),
    "heartbeat_interval_s": "0.1", "heartbeat_timeout_s": "20",
}  # fmt: skip
# Workers that need no further call agree within two checks of deadlines.
AGREE_S = 2 * STEP_S + 2
# 504: a tensor that never comes ends the call that waits for it.
STATUSES = {200, 400, 404, 409, 504}
NUM_WORKERS = 2


class Pools:
    """The pool that receives the calls; replaced after a call or an order that has broken it."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.root = folder / "root"
        make_folders(self.root)
        self._stack = ExitStack()
        self.is_broken = False
        self._start()

    def _start(self) -> None:
        settings = {"weights_root": str(self.root), **SETTINGS}
        context = stub_pool(self._folder, num_workers=NUM_WORKERS, **settings)
        self.pool = self._stack.enter_context(context)

    def healthy(self) -> StubPool:
        """A pool in good order."""
        if self.is_broken:
            self.close()
            self._start()
            self.is_broken = False
        return self.pool

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    Orders.pools = Pools(tmp_path)
    try:
        yield Orders.pools
    finally:
        Orders.pools.close()


class Orders(RuleBasedStateMachine):
    """Calls in sequence, or two at once, through either front end."""

    pools: ClassVar[Pools]
    num_calls: ClassVar[int] = 0
    num_checks: ClassVar[int] = 0
    statuses: ClassVar[dict[tuple[str, int], int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.root = self.pools.healthy(), self.pools.root
        self.trainers = [Trainer("first"), Trainer("second")]
        # Each call and its outcome.
        self.history: list[str] = []
        self.threads = concurrent.futures.ThreadPoolExecutor(2)

    # ---- what is done ----------------------------------------------------------------

    @rule(call=calls, front_end=st.integers(0, 1))
    def one(self, call: Call, front_end: int) -> None:
        self._call(call, front_end)
        self._check()

    @rule(first=calls, second=calls, front_ends=st.tuples(st.integers(0, 1), st.integers(0, 1)))
    def two_at_once(self, first: Call, second: Call, front_ends: tuple[int, int]) -> None:
        both = [
            self.threads.submit(self._call, call, front_end)
            for call, front_end in zip((first, second), front_ends, strict=True)
        ]
        for one in both:
            one.result()
        self._check()

    @rule(tenths=st.integers(1, 7))
    def time_passes(self, tenths: int) -> None:
        time.sleep(tenths / 10)
        self._check()

    @rule(trainer=st.integers(0, 1))
    def trainer_dies(self, trainer: int) -> None:
        self.trainers[trainer].listening.close()
        self.trainers[trainer] = Trainer(f"{self.trainers[trainer].session}+"[-20:])
        self._check()

    def _call(self, call: Call, front_end: int) -> None:
        trainer = self.trainers[call.trainer]
        if call.kind == NEXT:
            call = trainer.next_call(call.trainer, call.choices)
        http_call = KINDS[call.kind](trainer, call.choices, self.root)
        try:
            answer = self._ask(http_call, front_end)
        except (AssertionError, ServerGone) as error:
            self._fail(str(error))
        self.history.append(f"{http_call} at {front_end}: {answer.status_code} {answer.text[:200]}")
        if not answer.ok:
            trainer.plan.clear()
        if http_call.path == "/weights/begin" and answer.ok:
            trainer.update = answer.json()["update"]

    def _ask(self, http_call: HttpCall, front_end: int) -> Any:
        limit_s = REQUEST_S + 2 if http_call.path in ("/pause", "/generate") else LIMIT_S
        began = time.monotonic()
        one = self.pool.front_ends[front_end]
        answer = one.call(http_call.method, http_call.path, http_call.body, within_s=limit_s + 10)
        took_s = time.monotonic() - began
        Orders.num_calls += 1
        key = http_call.path, answer.status_code
        Orders.statuses[key] = Orders.statuses.get(key, 0) + 1
        assert answer.status_code in STATUSES, f"{http_call}: {answer.status_code} {answer.text}"
        assert took_s <= limit_s, f"{http_call}: took {took_s:.1f} s: {answer.text}"
        return answer

    # ---- what must hold ----------------------------------------------------------------

    def _check(self) -> None:
        try:
            self._check_pool()
        except (AssertionError, ServerGone) as error:
            self._fail(str(error))

    def _fail(self, what: str) -> NoReturn:
        self.pools.is_broken = True
        history = "\n".join(self.history)
        raise AssertionError(f"{what}\nCalls, and what came of them:\n{history}") from None

    def _check_pool(self) -> None:
        self.pool.check_processes()
        wait_until(
            lambda: not self._inconsistency(),
            AGREE_S,
            lambda: self._inconsistency() + self._description(),
        )
        Orders.num_checks += 1
        self._generate(Orders.num_checks % 2)

    def _generate(self, front_end: int) -> None:
        answer = self._ask(HttpCall("POST", "/generate", {"prompts": [[1, 2, 3]]}), front_end)
        assert answer.json()["completion_ids"] == [[3, 2, 1]], answer.text

    def _inconsistency(self) -> str:
        """Describes what is inconsistent; "" if nothing is."""
        before = self.pool.paused_engines()
        workers = self._get("/weights", 0)["workers"]
        paused = [self._get("/is_paused", front_end)["is_paused"] for front_end in (0, 1)]
        shown = self._get("/ready", 1)["workers"]
        models = self._get("/v1/models", 1)["data"][1:]
        versions = {(one["weight_version"], one["last_update"]) for one in workers}
        adapters = [one["adapters"] for one in workers]
        if len(versions) > 1:
            return "the workers have different weights"
        if {one["phase"] for one in shown} != {"ready"}:
            return "a worker serves nothing"
        if {*before, *paused, *self.pool.paused_engines()} not in ({True}, {False}):
            return "/is_paused is not the truth"
        if any(one != {two["id"]: two["version"] for two in models} for one in adapters):
            return "the workers have different adapters"
        return ""

    def _description(self) -> str:
        states = [self._get("/weights", front_end) for front_end in (0, 1)]
        return (
            f"{states}, engines stand: {self.pool.paused_engines()}\n{self.pool.server.log[-2000:]}"
        )

    def _get(self, path: str, front_end: int) -> Any:
        return self._ask(HttpCall("GET", path), front_end).json()

    def teardown(self) -> None:
        try:
            if not self.pools.is_broken:
                self._release_everything()
        finally:
            self.threads.shutdown()
            for trainer in self.trainers:
                trainer.listening.close()

    def _release_everything(self) -> None:
        """Every trainer leaves; afterwards no resources are held."""
        for kind in ("resume", "abort", "close", "trl_close", "stock_finish", "stock_close"):
            for trainer in (0, 1):
                self._call(Call(kind, trainer), trainer)
        for choice in (0, 1):
            self._call(Call("unload", 0, (choice, 0)), 0)
        try:
            wait_until(self._is_idle, AGREE_S, self._description)
        except (AssertionError, ServerGone) as error:
            self._fail(f"something is held: {error}")
        self._check()

    def _is_idle(self) -> bool:
        resources = [self._get("/fuzz/held", front_end) for front_end in (0, 1)]
        states = {one["state"] for one in self._get("/weights", 0)["workers"]}
        running = sum(self.pool.server.metrics("sequences").values())
        # The one open request is the call to /fuzz/held itself.
        return (
            all(one["commands"] == one["jobs"] == one["places"] == 0 for one in resources)
            and states <= {"closed", "open"} and running == 0 and not any(self.pool.paused_engines())
        )  # fmt: skip


def test_any_order_of_calls_keeps_the_pool_consistent(pools: Pools) -> None:
    def run() -> None:
        settings = hypothesis.settings(max_examples=3, stateful_step_count=25)
        run_state_machine_as_test(Orders, settings=settings)

    explore(run, Orders, name="orders", share=0.25)
    by_status: dict[int, int] = {}
    for (_, status), number in Orders.statuses.items():
        by_status[status] = by_status.get(status, 0) + number
    print(f"{Orders.num_calls} calls; by status: {dict(sorted(by_status.items()))}")
    print(sorted(Orders.statuses.items()))
