"""Clients that generate continuously, and check the outcome of each request."""

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import aiohttp
import orjson

from tests.all.chaos.cluster import NUM_SLOTS, Cluster

NUM_CLIENTS = 64
# Seconds; longer than the server's request timeout.
ANSWER_TIMEOUT_S = 45.0
# An answer larger than what sockets hold: prompts, tokens of each, and log-probabilities of each token.
NUM_LONG_PROMPTS, NUM_LONG_IDS, NUM_LONG_TOP = 4, 3000, 20
# Errors that requests may get during faults.
ALLOWED_ERRORS = {
    (500, "generation_failed"), (503, "no_ready_worker"), (503, "weights_lost"),
    (503, "model_changed"), (504, "deadline_passed"), (429, "queue_full"),
}  # fmt: skip
# In place of a status, of an error that ends a stream.
IN_STREAM = 0
# Sends a request, and returns its outcome.
Send = Callable[[aiohttp.ClientSession], Awaitable[str]]


class Versions:
    """The versions of the weights that a response may report."""

    def __init__(self) -> None:
        # (time, lowest version that a request may get if it begins after that time).
        self._floors: list[tuple[float, int]] = [(0.0, 0)]
        self.latest = 0

    def begin(self) -> int:
        """A new version, which responses may report from now on."""
        self.latest += 1
        return self.latest

    def committed(self, version: int) -> None:
        """The trainer has got the response that these weights serve."""
        self._floors.append((time.monotonic(), version))

    def reset(self) -> None:
        """The pool may go back to the initial weights."""
        self._floors.append((time.monotonic(), 0))

    def check(self, version: int, began: float) -> str:
        """The error of a response of `version` to a request that began at `began`; "" if none."""
        floor = [least for when, least in self._floors if when <= began][-1]
        # A request in flight when the pool went back may report the version that serves since.
        lowest = min([floor, *(least for when, least in self._floors if when > began)])
        if not lowest <= version <= self.latest:
            return f"version {version}, expected {lowest} to {self.latest}"
        return ""


class Clients:
    """Requests in flight, and the counts of their outcomes."""

    def __init__(
        self, cluster: Cluster, versions: Versions, seed: int, num_clients: int = NUM_CLIENTS
    ):
        self._cluster, self._versions, self._num_clients = cluster, versions, num_clients
        self._chance = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_in_flight = self.most_in_flight = 0
        # Set by the harness when a front end is killed: connections may break.
        self.may_break = False
        self.is_running = False
        self._disconnect = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, others: Iterable[Coroutine[Any, Any, None]] = ()) -> None:
        """`others`: what else runs until `is_running` is false."""
        self.is_running = True
        self._disconnect.clear()
        clients = [self._client(index) for index in range(self._num_clients)]
        self._tasks = [asyncio.create_task(one) for one in (*clients, *others)]

    async def stop(self) -> None:
        """Waits for the requests in flight; the clients begin no other."""
        self.is_running = False
        await asyncio.gather(*self._tasks)

    def disconnect(self) -> None:
        """Half of the clients disconnect."""
        self._disconnect.set()
        self._disconnect = asyncio.Event()

    async def _client(self, index: int) -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=index % 2 == 0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while self.is_running:
                sends = (self._single, self._batch, self._stream) * 5 + (self._wide,)
                send = self._chance.choice(sends)
                await self.request(send, session, may_leave=index < self._num_clients // 2)
                await asyncio.sleep(self._chance.random() * 0.3)

    async def request(self, send: Send, session: aiohttp.ClientSession, *, may_leave: bool) -> None:
        """Counts the outcome of `send`, which `disconnect` may cancel."""
        request = asyncio.create_task(self._run_request(send, session))
        disconnecting = asyncio.create_task(self._disconnect.wait())
        await asyncio.wait(
            [request, disconnecting] if may_leave else [request],
            return_when=asyncio.FIRST_COMPLETED,
        )
        disconnecting.cancel()
        if not request.done():
            request.cancel()
            self.outcomes["left"] += 1
        (error,) = await asyncio.gather(request, return_exceptions=True)
        if isinstance(error, Exception):
            self.add_error(f"not what a server answers: {error!r}")

    async def _run_request(self, send: Send, session: aiohttp.ClientSession) -> None:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        began = time.monotonic()
        try:
            self.outcomes[await send(session)] += 1
        except TimeoutError:
            self.add_error(f"lost: no end within {ANSWER_TIMEOUT_S:g} s")
        except (aiohttp.ClientError, OSError) as error:
            if self.may_break:
                self.outcomes["connection broken"] += 1
            else:
                self.add_error(f"lost: {error!r} after {time.monotonic() - began:.2f} s")
        finally:
            self.num_in_flight -= 1

    def add_error(self, text: str) -> None:
        self.outcomes["wrong"] += 1
        self.wrong.append(text)

    def _prompt(self) -> list[int]:
        return [self._chance.randrange(1, 40_000) for _ in range(self._chance.randrange(2, 7))]

    async def _single(self, session: aiohttp.ClientSession) -> str:
        return await self._generate(session, [self._prompt()], 1)

    async def _batch(self, session: aiohttp.ClientSession) -> str:
        return await self._generate(session, [self._prompt() for _ in range(4)], 2)

    async def _wide(self, session: aiohttp.ClientSession) -> str:
        """More completions of a prompt than a worker has slots."""
        return await self._generate(session, [self._prompt()], 2 * NUM_SLOTS)

    async def _generate(
        self, session: aiohttp.ClientSession, prompts: list[list[int]], n: int
    ) -> str:
        began = time.monotonic()
        body = {"prompts": prompts, "n": n}
        async with session.post(self._cluster.url + "/generate/", json=body) as answer:
            reply = await answer.json()
            if answer.status != 200:
                return self.check_error(answer.status, reply)
        expected = [prompt[::-1] for prompt in prompts for _ in range(n)]
        if reply["completion_ids"] != expected:
            self.add_error(f"expected {expected}, got {reply['completion_ids']}")
        for spans in reply["weight_versions"]:
            for version, _ in spans:
                if error := self._versions.check(version, began):
                    self.add_error(error)
        return "answered"

    async def _stream(self, session: aiohttp.ClientSession) -> str:
        prompt = self._prompt()
        body = {"prompt": prompt, "stream": True, "return_token_ids": True, "max_tokens": 20}
        seen: list[int] = []
        has_ended = False
        async with session.post(self._cluster.url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                # Also of a stream whose first chunk the client does not have yet.
                return "stream: " + self.check_error(answer.status, await answer.json())
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    has_ended = True
                elif line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        # Sent chunks cannot be taken back, so the job is not requeued.
                        return "stream: " + self.check_error(IN_STREAM, chunk)
                    for choice in chunk["choices"]:
                        seen += choice["token_ids"]
        if not has_ended and self.may_break:
            return "connection broken"
        if not has_ended or seen != prompt[::-1]:
            self.add_error(f"stream: expected {prompt[::-1]}, got {seen}, ended: {has_ended}")
        return "streamed"

    async def leave_unread(self, seconds: float, *, reads_then: bool) -> None:
        """Asks for a large answer, reads nothing of it for some time, then the rest or nothing.

        A front end cuts a connection whose client does not read while others wait for memory.
        """
        receiving = socket.socket()
        receiving.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        receiving.setblocking(False)
        loop = asyncio.get_running_loop()
        prompt = list(range(1, NUM_LONG_IDS + 1))
        body = json.dumps({
            "input_ids": [prompt] * NUM_LONG_PROMPTS, "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": NUM_LONG_TOP,
        }).encode()  # fmt: skip
        head = f"POST /generate HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with receiving:
            try:
                await loop.sock_connect(receiving, ("127.0.0.1", self._cluster.port))
                await loop.sock_sendall(receiving, head + body)
                await asyncio.sleep(seconds)
                if not reads_then:
                    self.outcomes["unread"] += 1
                    return
                parts = []
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    while part := await loop.sock_recv(receiving, 2**20):
                        parts.append(part)
            except TimeoutError:
                self.add_error(f"unread: no end within {ANSWER_TIMEOUT_S:g} s")
                return
            except OSError:
                self.outcomes["unread: cut"] += 1
                return
        self.outcomes["unread: " + self._check_late(b"".join(parts))] += 1

    def _check_late(self, answer: bytes) -> str:
        head, _, text = answer.partition(b"\r\n\r\n")
        try:
            # It takes 7 MiB, and the workers' proxies wait meanwhile.
            reply = orjson.loads(text)
        except ValueError:
            return "cut"
        status = int(head.split()[1])
        if status != 200:
            return self.check_error(status, reply)
        ends = [one["meta_info"]["output_token_logprobs"][0][1] for one in reply]
        if ends != [NUM_LONG_IDS] * NUM_LONG_PROMPTS:
            self.add_error(f"unread: expected {NUM_LONG_PROMPTS} times {NUM_LONG_IDS}, got {ends}")
        return "read late"

    def check_error(self, status: int, reply: dict[str, Any]) -> str:
        code = reply["error"]["code"]
        is_allowed = any(
            code == one and status in (allowed, IN_STREAM) for allowed, one in ALLOWED_ERRORS
        )
        if not is_allowed:
            self.add_error(f"{status} {reply['error']}")
        return str(code)
