"""Clients that generate all the time, and judge what comes of each request."""

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import aiohttp

from tests.chaos.cluster import Cluster

NUM_CLIENTS = 64
# Longer than the server's own deadline of a request.
ANSWER_TIMEOUT_S = 45.0
# What a request may end with while parts of the pool are hurt.
HONEST = {
    (500, "generation_failed"), (503, "no_ready_worker"), (503, "weights_lost"),
    (503, "model_changed"), (504, "deadline_passed"), (429, "queue_full"),
}  # fmt: skip


class Versions:
    """Which versions of the weights an answer may name."""

    def __init__(self) -> None:
        # (when, the least version that requests may get which begin after).
        self._floors: list[tuple[float, int]] = [(0.0, 0)]
        self.latest = 0

    def begin(self) -> int:
        """A new version, which answers may name from now on."""
        self.latest += 1
        return self.latest

    def committed(self, version: int) -> None:
        """The trainer was told that these weights serve."""
        self._floors.append((time.monotonic(), version))

    def reset(self) -> None:
        """The pool may go back to the model's own weights."""
        self._floors.append((time.monotonic(), 0))

    def check(self, version: int, began: float) -> str:
        """What is wrong with an answer of `version` to a request that began then; "" if nothing."""
        floor = [least for when, least in self._floors if when <= began][-1]
        # One that ran while the pool went back may name what serves since.
        lowest = min([floor, *(least for when, least in self._floors if when > began)])
        if not lowest <= version <= self.latest:
            return f"version {version}, expected {lowest} to {self.latest}"
        return ""


class Clients:
    """Requests in flight, and the counts of their ends."""

    def __init__(self, cluster: Cluster, versions: Versions, seed: int):
        self._cluster, self._versions = cluster, versions
        self._chance = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_in_flight = self.most_in_flight = 0
        # Set by the harness when a front end is killed: connections may break.
        self.may_break = False
        self._running = False
        self._leave = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._running = True
        self._leave.clear()
        self._tasks = [asyncio.create_task(self._client(index)) for index in range(NUM_CLIENTS)]

    async def stop(self) -> None:
        """Lets each client end its request, and begin no other."""
        self._running = False
        await asyncio.gather(*self._tasks)

    def leave(self) -> None:
        """Half of the clients hang up."""
        self._leave.set()
        self._leave = asyncio.Event()

    async def _client(self, index: int) -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=index % 2 == 0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while self._running:
                ask = (self._whole, self._batch, self._stream)[self._chance.randrange(3)]
                asking = asyncio.create_task(self._judged(ask, session))
                leaving = asyncio.create_task(self._leave.wait())
                leaves = index < NUM_CLIENTS // 2
                await asyncio.wait(
                    [asking, leaving] if leaves else [asking],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                leaving.cancel()
                if not asking.done():
                    asking.cancel()
                    self.ends["left"] += 1
                await asyncio.gather(asking, return_exceptions=True)
                await asyncio.sleep(self._chance.random() * 0.3)

    async def _judged(self, ask: Any, session: aiohttp.ClientSession) -> None:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        began = time.monotonic()
        try:
            self.ends[await ask(session)] += 1
        except TimeoutError:
            self._complain(f"lost: no end within {ANSWER_TIMEOUT_S:g} s")
        except (aiohttp.ClientError, OSError) as error:
            if self.may_break:
                self.ends["connection broken"] += 1
            else:
                self._complain(f"lost: {error!r} after {time.monotonic() - began:.2f} s")
        finally:
            self.num_in_flight -= 1

    def _complain(self, text: str) -> None:
        self.ends["wrong"] += 1
        self.wrong.append(text)

    def _prompt(self) -> list[int]:
        return [self._chance.randrange(1, 40_000) for _ in range(self._chance.randrange(2, 7))]

    async def _whole(self, session: aiohttp.ClientSession) -> str:
        return await self._generate(session, [self._prompt()], 1)

    async def _batch(self, session: aiohttp.ClientSession) -> str:
        return await self._generate(session, [self._prompt() for _ in range(4)], 2)

    async def _generate(
        self, session: aiohttp.ClientSession, prompts: list[list[int]], n: int
    ) -> str:
        began = time.monotonic()
        body = {"prompts": prompts, "n": n}
        async with session.post(self._cluster.url + "/generate/", json=body) as answer:
            reply = await answer.json()
            if answer.status != 200:
                return self._refused(answer.status, reply)
        wanted = [prompt[::-1] for prompt in prompts for _ in range(n)]
        if reply["completion_ids"] != wanted:
            self._complain(f"expected {wanted}, got {reply['completion_ids']}")
        for spans in reply["weight_versions"]:
            for version, _ in spans:
                if odd := self._versions.check(version, began):
                    self._complain(odd)
        return "answered"

    async def _stream(self, session: aiohttp.ClientSession) -> str:
        prompt = self._prompt()
        body = {"prompt": prompt, "stream": True, "return_token_ids": True, "max_tokens": 20}
        seen: list[int] = []
        has_ended = False
        async with session.post(self._cluster.url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                return self._refused(answer.status, await answer.json())
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    has_ended = True
                elif line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        # What it has said cannot be taken back: no other worker goes on with it.
                        return "stream: " + self._refused(500, chunk)
                    for choice in chunk["choices"]:
                        seen += choice["token_ids"]
        if not has_ended and self.may_break:
            return "connection broken"
        if not has_ended or seen != prompt[::-1]:
            self._complain(f"stream: expected {prompt[::-1]}, got {seen}, ended: {has_ended}")
        return "streamed"

    def _refused(self, status: int, reply: dict[str, Any]) -> str:
        code = reply["error"]["code"]
        if (status, code) not in HONEST:
            self._complain(f"{status} {reply['error']}")
        return str(code)
