"""`AsyncClient.weights`: the event loop goes on, and a cancel leaves the server usable."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from harness.servers import Server
from tests.kit.models.weights import states
from tests.kit.peers.fake_server import FakeServer, reply
from tests.kit.trainers.trainer import DEVICE
from titopool import AsyncClient
from titopool.client.async_weights import AsyncWeightsClient
from titopool.client.weights_client import WeightsError

Tensors = list[tuple[str, Any]]
GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
TIMEOUT_S = 60.0


async def sampled(client: AsyncClient) -> tuple[list[int], int]:
    """Ids that the weights give, and their version."""
    ((done,),) = (one.completions for one in await client.generate([42, 1393, 14], **GREEDY))
    return done.ids.tolist(), done.weight_versions[-1][0]


class Stops:
    """A trainer's tensors, of which the second pass stops before the fifth until `go`."""

    def __init__(self, tensors: Tensors):
        self.tensors = tensors
        self.has_stopped, self.go = threading.Event(), threading.Event()
        self.num_passes = 0

    def __call__(self) -> Iterator[tuple[str, Any]]:
        self.num_passes += 1
        yield from self.tensors[:4]
        if self.num_passes == 2:
            self.has_stopped.set()
            assert self.go.wait(TIMEOUT_S)
        yield from self.tensors[4:]

    async def stopped(self) -> None:
        assert await asyncio.to_thread(self.has_stopped.wait, TIMEOUT_S)


def test_requests_run_while_weights_are_sent(weights_server: Server, own: Tensors, other: Tensors):
    async def run() -> None:
        stops = Stops(other)
        async with AsyncClient(weights_server.url) as client:
            before, version = await sampled(client)
            async with client.weights(device=DEVICE, chunk_bytes=0) as weights:
                update = asyncio.create_task(weights.update(stops, policy="keep"))
                # Calls of one sender wait for one another.
                back = asyncio.create_task(weights.update(own, policy="keep"))
                await stops.stopped()
                assert await sampled(client) == (before, version)
                stops.go.set()
                assert (await update)["version"] == version + 1
                assert (await back)["version"] == version + 2
            assert await sampled(client) == (before, version + 2)

    asyncio.run(run())


async def cancelled_update(weights: AsyncWeightsClient, stops: Stops) -> None:
    """A timeout in the block while one update sends and another one waits for it."""
    async with asyncio.timeout(None) as timeout, weights:
        await weights.pause("keep", lease_s=600)
        update = asyncio.create_task(weights.update(stops, policy="keep"))
        waiting = asyncio.create_task(weights.update(stops.tensors, policy="keep"))
        await stops.stopped()
        waiting.cancel()
        timeout.reschedule(0)
        try:
            await update
        finally:
            stops.go.set()


def test_a_cancelled_update_leaves_the_old_weights_in_service(
    weights_server: Server, own: Tensors, other: Tensors
):
    async def run() -> None:
        stops = Stops(other)
        async with AsyncClient(weights_server.url) as client:
            before, version = await sampled(client)
            weights = client.weights(device=DEVICE, chunk_bytes=0)
            with pytest.raises(TimeoutError):
                await cancelled_update(weights, stops)
            assert not weights.sender.is_open
            # Also resumed: a paused server would not answer.
            assert await sampled(client) == (before, version)
            assert set(states(weights_server)) == {"closed"}
            async with weights:
                assert (await weights.update(own, policy="keep"))["version"] == version + 1

    asyncio.run(run())


def test_errors_are_those_of_the_sender(weights_server: Server, own: Tensors):
    async def run() -> None:
        async with AsyncClient(weights_server.url) as client, client.weights(device=DEVICE) as one:
            with pytest.raises(WeightsError, match=r"missing|expected"):
                await one.update(own[:2], policy="keep")
            _, version = await sampled(client)
            assert (await one.update(own, policy="keep"))["version"] == version + 1

    asyncio.run(run())


def test_a_cancel_ends_the_forming_of_a_group():
    """The server forms no group: it answers when the trainer's port has closed."""
    forming, has_ended = threading.Event(), threading.Event()

    def answer(path: str, body: dict[str, Any]) -> bytes:
        if path == "/get_world_size":
            return reply({"world_size": 1})
        forming.set()
        has_ended.wait(TIMEOUT_S)
        return reply({"error": {"message": "no group", "code": "conflict"}}, "409 Conflict")

    async def run(url: str) -> None:
        weights = AsyncClient(url).weights(device="cpu")
        async with asyncio.timeout(TIMEOUT_S), weights:
            opening = asyncio.create_task(weights.open())
            assert await asyncio.to_thread(forming.wait, TIMEOUT_S)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        assert not weights.sender.is_open

    server = FakeServer(answer)
    try:
        asyncio.run(run(server.url))
    finally:
        has_ended.set()
        server.close()
