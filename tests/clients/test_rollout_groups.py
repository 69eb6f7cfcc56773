"""`num_needed`: the first groups to end are returned, and the others leave nothing behind."""

import asyncio
import logging
import threading
import time
from typing import Any

import numpy as np
import pytest

from harness.servers import Server, wait_until
from tests.kit.peers.rollout_client import Answer, Written
from titopool import AsyncClient, Client, PromptResult, Rollout, run_rollouts, run_rollouts_async
from titopool.rollouts import groups
from titopool.rollouts.async_runner import _Loop

TIMEOUT_S = 60.0
# A prompt that begins with this id has a long completion.
LONG = 9
PROMPTS = [[LONG, 5], [1, 5], [2, 5], [LONG, 6], [3, 5]]
# On the tiny model seconds and milliseconds.
LONG_LEN, SHORT_LEN = 1000, 4


class LongTailed(Client):
    """titopool's client; the prompt says how long a completion is. Keeps the finish reasons.

    Short completions wait for `num_long` long ones to begin.
    """

    def __init__(self, url: str, num_long: int):
        super().__init__(url)
        self.long_begun = threading.Barrier(num_long, lambda: self.may_end.set())
        self.may_end = threading.Event()
        self.finish_reasons: list[str] = []

    def generate(self, prompts: Any, **options: Any) -> list[PromptResult]:
        if prompts[0][0] == LONG:
            self.long_begun.wait(TIMEOUT_S)
        assert self.may_end.wait(TIMEOUT_S)
        options["max_tokens"] = LONG_LEN if prompts[0][0] == LONG else SHORT_LEN
        results = super().generate(prompts, ignore_eos=True, **options)
        self.finish_reasons.append(results[0].completions[0].finish_reason)
        return results


def playing_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("rollout")]


def places(rollouts: list[Rollout]) -> list[int | None]:
    return [one.prompt_index for one in rollouts]


# With a key, a request whose connection is closed goes on for 30 s.
@pytest.mark.parametrize("idempotent", [False, True])
def test_the_first_groups_are_returned_and_the_server_has_no_others(
    single_server: Server, idempotent: bool
):
    answered: list[Rollout] = []
    with LongTailed(single_server.url, num_long=4) as client:
        rollouts = run_rollouts(
            client, PROMPTS, n=2, num_needed=3, environment=answered.append, seed=3,
            idempotent=idempotent,
        )  # fmt: skip
        assert single_server.get("/requests").json()["requests"] == []
        assert sorted(client.finish_reasons) == ["abort"] * 4 + ["length"] * 6
        assert {one.client for one in rollouts} == {client}
    assert places(rollouts) == [1, 1, 2, 2, 4, 4]
    assert [one.error for one in rollouts] == [None] * 6
    assert [one.arrays().loss_mask.sum() for one in rollouts] == [SHORT_LEN] * 6
    assert [one.ids[0] for one in rollouts] == [1, 1, 2, 2, 3, 3]
    # The environment gets no completion that was cut.
    assert {id(one) for one in answered} == {id(one) for one in rollouts}
    wait_until(lambda: sum(single_server.metrics("sequences").values()) == 0, 10)
    wait_until(lambda: not playing_threads(), TIMEOUT_S)


def test_all_groups_are_those_of_the_plain_call(single_server: Server):
    options: dict[str, Any] = {"n": 2, "seed": 5, "max_tokens": 6}
    with Client(single_server.url) as client:
        plain = run_rollouts(client, PROMPTS, **options)
        needed = run_rollouts(client, PROMPTS, num_needed=len(PROMPTS), **options)
    assert places(plain) == places(needed) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [one.ids.tolist() for one in plain] == [one.ids.tolist() for one in needed]


def test_coroutines_of_the_others_are_cancelled(
    single_server: Server, caplog: pytest.LogCaptureFixture
):
    began, ended = [], []

    async def environment(rollout: Rollout) -> None:
        if rollout.ids[0] != LONG:
            # Both begin before the needed ones end.
            while len(began) < 2:
                await asyncio.sleep(0)
            return
        began.append(rollout)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(rollout)

    async def run() -> list[Rollout]:
        async with AsyncClient(single_server.url) as client, asyncio.timeout(TIMEOUT_S):
            rollouts = await run_rollouts_async(
                client, PROMPTS, num_needed=3, environment=environment, max_tokens=2
            )
            while len(ended) < 2:
                await client.info()
            # Their calls of the server still work.
            await asyncio.to_thread(rollouts[0].generate, max_tokens=1)
            return rollouts

    rollouts = asyncio.run(run())
    assert places(rollouts) == [1, 2, 4]
    wait_until(lambda: not playing_threads(), TIMEOUT_S)
    assert [one for one in caplog.records if one.name.startswith("titopool.rollouts")] == []


class Staged:
    """A server whose long completions end by an abort.

    Args:
        num_missed: so many aborts come before the requests that they name.
        num_long: so many long completions begin before a short one ends.
        failing: prompts that fail, by their first id.
        error: of aborts.
    """

    def __init__(
        self,
        num_missed: int = 0,
        num_long: int = 0,
        failing: tuple[int, ...] = (),
        error: Exception | None = None,
    ):
        self.num_missed, self.failing, self.error = num_missed, failing, error
        self.num_long = num_long
        self.aborts: list[list[str]] = []
        # The first id of each request.
        self.requests: list[int] = []
        self.is_aborted = threading.Event()

    def generate(self, prompts: Any, **options: Any) -> list[Answer]:
        self.requests.append(prompts[0][0])
        if prompts[0][0] in self.failing:
            raise ConnectionError("gone")
        if prompts[0][0] == LONG:
            assert self.is_aborted.wait(TIMEOUT_S)
        wait_until(lambda: self.requests.count(LONG) >= self.num_long, TIMEOUT_S)
        return [Answer(np.asarray(prompts[0]), (Written(np.array([2], np.int32), "abort"),))]

    def abort(self, request_ids: Any) -> None:
        self.aborts.append(request_ids)
        if self.error is not None:
            raise self.error
        if len(self.aborts) > self.num_missed:
            self.is_aborted.set()


def play(client: Any, prompts: Any = PROMPTS, **options: Any) -> list[Rollout]:
    return run_rollouts(client, prompts, tokenizer=object(), **options)


def test_an_abort_that_came_before_its_request_is_repeated():
    client = Staged(num_missed=2, num_long=2)
    assert places(play(client, num_needed=3, num_resumes=0)) == [1, 2, 4]
    assert [len(set(one)) for one in client.aborts] == [2] * len(client.aborts)
    assert len(client.aborts) >= 3


def test_rollouts_that_have_not_begun_never_do():
    client = Staged()
    prompts = [[1], *[[LONG]] * 3]
    rollouts = play(client, prompts, n=2, num_needed=1, concurrency=1, num_resumes=0)
    assert places(rollouts) == [0, 0]
    wait_until(lambda: not playing_threads(), TIMEOUT_S)
    # The thread may have begun the next one.
    assert client.requests in ([1, 1], [1, 1, LONG])


def test_a_failed_group_is_returned_only_in_want_of_others():
    prompts = [[1], [LONG], [2], [3]]
    failing = play(Staged(failing=(1, LONG)), prompts, num_needed=2, num_resumes=0)
    assert [(one.prompt_index, one.error) for one in failing] == [(2, None), (3, None)]
    failing = play(Staged(failing=(1, LONG, 3)), prompts, num_needed=2, num_resumes=0)
    assert places(failing) == [0, 2]
    assert [type(one.error) for one in failing] == [ConnectionError, type(None)]


def test_an_abort_that_fails_costs_no_rollout(caplog: pytest.LogCaptureFixture):
    client = Staged(num_long=2, error=ConnectionError("gone"))
    with caplog.at_level(logging.WARNING):
        assert places(play(client, num_needed=3, num_resumes=0)) == [1, 2, 4]
    assert "2 requests of rollouts that are not needed go on to their end" in caplog.text
    client.is_aborted.set()
    wait_until(lambda: not playing_threads(), TIMEOUT_S)
    # They end with that.
    assert len(client.requests) == 5


def test_an_abort_that_hangs_holds_the_batch_no_longer_than_its_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(groups, "ABORT_TIMEOUT_S", 0.2)
    client, may_end = Staged(num_long=2), threading.Event()
    monkeypatch.setattr(client, "abort", lambda request_ids: may_end.wait(TIMEOUT_S))
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert places(play(client, num_needed=3, num_resumes=0)) == [1, 2, 4]
    assert time.monotonic() - begun < TIMEOUT_S / 2
    assert "they did not end within 0.2 s" in caplog.text
    may_end.set()
    client.is_aborted.set()
    wait_until(lambda: not playing_threads(), TIMEOUT_S)


def test_a_tool_that_outlives_the_event_loop_starts_no_coroutine():
    async def answer() -> None: ...

    async def run() -> Any:
        loop = _Loop()
        call = loop.blocking(answer)
        loop.cancel()
        return call

    call = asyncio.run(run())
    with pytest.raises(asyncio.CancelledError):
        call()


@pytest.mark.parametrize("num_needed", [0, -1, 6, 2.5, 2.0, True, "3"])
def test_a_wrong_number_is_refused_before_anything_runs(num_needed: Any):
    client = Staged()
    message = (
        f"num_needed: expected an integer from 1 to 5, the number of prompts, got {num_needed!r}"
    )
    with pytest.raises(ValueError, match=message):
        play(client, num_needed=num_needed)
    assert client.requests == []
