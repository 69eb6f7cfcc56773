"""`run_rollouts_async`: rollouts beside a running event loop, coroutines as tools, a cancel."""

import asyncio
import threading
from typing import Any

import pytest

from harness.servers import Server, wait_until
from tests.kit.peers.fake_server import FakeServer
from titopool import AsyncClient, Client, Rollout, run_rollouts, run_rollouts_async
from titopool.rollouts import async_runner

QUESTION = [{"role": "user", "content": "What is 6 times 7?"}]
CALL = (
    r'<tool_call>\n\{"name": "multiply", "arguments": '
    r'\{"a": [1-9][0-9]?, "b": [1-9][0-9]?\}\}\n</tool_call>'
)
SAMPLING: dict[str, Any] = {
    "n": 3, "max_turns": 2, "max_tokens": 64, "seed": 11, "structured_outputs": {"regex": CALL},
}  # fmt: skip
TIMEOUT_S = 60.0


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def ids(rollouts: list[Rollout]) -> list[list[int]]:
    assert [one.error for one in rollouts] == [None] * len(rollouts)
    return [one.ids.tolist() for one in rollouts]


def test_the_rollouts_are_those_of_the_client_that_blocks(single_server: Server):
    """A coroutine function is a tool as any other one."""
    threads = set()

    async def multiply_later(a: int, b: int) -> int:
        threads.add(threading.current_thread())
        await asyncio.sleep(0)
        return a * b

    multiply_later.__name__, multiply_later.__doc__ = "multiply", multiply.__doc__

    async def run(*tools: Any) -> list[list[int]]:
        async with AsyncClient(single_server.url) as client:
            playing = asyncio.create_task(
                run_rollouts_async(client, [QUESTION, QUESTION[:1]], tools=tools, **SAMPLING)
            )
            await client.info()
            assert not playing.done()
            rollouts = await playing
        assert any(one["role"] == "tool" for one in rollouts[0].messages)
        return ids(rollouts)

    with Client(single_server.url) as client:
        expected = ids(run_rollouts(client, [QUESTION] * 2, tools=[multiply], **SAMPLING))
    assert asyncio.run(run(multiply)) == expected
    assert not threads
    assert asyncio.run(run(multiply_later)) == expected
    assert threads == {threading.main_thread()}


def playing_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("rollout")]


def test_a_cancel_ends_the_requests_in_flight_and_sends_no_more():
    arrived, release = threading.Semaphore(0), threading.Event()
    paths = []

    def answer(path: str, body: dict[str, Any]) -> bytes:
        paths.append(path)
        arrived.release()
        release.wait(TIMEOUT_S)
        return b""

    async def run(url: str) -> None:
        async with AsyncClient(url) as client:
            playing = asyncio.create_task(
                run_rollouts_async(client, [[1, 2, 3]] * 100, concurrency=4)
            )
            for _ in range(4):
                assert await asyncio.to_thread(arrived.acquire, timeout=TIMEOUT_S)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing

    server = FakeServer(answer)
    try:
        asyncio.run(run(server.url))
        wait_until(lambda: not playing_threads(), TIMEOUT_S)
    finally:
        release.set()
        server.close()
    assert paths == ["/generate/"] * 4


def test_a_cancel_ends_coroutines(single_server: Server):
    began: list[Rollout] = []
    ended: list[Rollout] = []

    async def never(rollout: Rollout) -> None:
        began.append(rollout)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(rollout)

    async def run() -> None:
        async with AsyncClient(single_server.url) as client, asyncio.timeout(TIMEOUT_S):
            playing = asyncio.create_task(
                run_rollouts_async(client, [[1, 2, 3]] * 3, environment=never, max_tokens=2)
            )
            while len(began) < 3:
                await client.info()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            # Not only when the event loop ends.
            while len(ended) < 3:
                await client.info()

    asyncio.run(run())
    wait_until(lambda: not playing_threads(), TIMEOUT_S)


def test_a_coroutine_s_own_cancel_ends_only_its_rollout(single_server: Server):
    async def environment(rollout: Rollout) -> None:
        if rollout.ids[0] == 2:
            raise asyncio.CancelledError

    async def run() -> list[Rollout]:
        async with AsyncClient(single_server.url) as client:
            return await run_rollouts_async(
                client, [[1], [2], [3]], environment=environment, max_tokens=2
            )

    reasons = [one.stop_reason for one in asyncio.run(run())]
    assert reasons == ["environment", "error", "environment"]


def test_a_run_does_not_go_on_after_an_abort_of_its_caller_s_client():
    client = AsyncClient("http://127.0.0.1:9")
    blocking = async_runner._Blocking(client)
    assert blocking.num_aborts == 0
    client.num_aborts += 1
    assert blocking.num_aborts == 1
