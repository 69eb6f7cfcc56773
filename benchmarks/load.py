"""The load generator: several client processes send encoded bodies and decode nothing.

A Python client is slower than the servers under test unless it does very little between the first
byte sent and the last byte received.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIMEOUT_S = 900.0
# Concurrent requests that one client process can handle.
CALLS_PER_PROCESS = 128


@dataclass
class Sent:
    """The responses, in the order of the bodies."""

    # Wall-clock seconds from the first request to the end of the last response.
    elapsed_s: float
    latencies_s: list[float]
    # HTTP status; 0 if the connection failed.
    statuses: list[int]
    answers: list[bytes] = field(repr=False)


def send(
    url: str,
    bodies: Sequence[bytes],
    *,
    concurrency: int,
    headers: Mapping[str, str],
    num_processes: int = 0,
) -> Sent:
    """POSTs every body to `url`, `concurrency` at once, and waits for all responses.

    Args:
        num_processes: client processes; 0: enough for `concurrency`.
    """
    num_processes = num_processes or min(8, 1 + (concurrency - 1) // CALLS_PER_PROCESS)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(num_processes)
    pipes, processes = [], []
    for index in range(num_processes):
        mine = bodies[index::num_processes]
        share = len(range(index, concurrency, num_processes))
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_client, args=(url, mine, max(1, share), headers, barrier, sender), daemon=True
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    parts = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return _merge(parts, len(bodies))


def _client(
    url: str,
    bodies: Sequence[bytes],
    share: int,
    headers: Mapping[str, str],
    barrier: Any,
    pipe: Any,
) -> None:
    pipe.send(asyncio.run(_send_all(url, bodies, share, headers, barrier)))


async def _send_all(
    url: str, bodies: Sequence[bytes], share: int, headers: Mapping[str, str], barrier: Any
) -> list[tuple[float, float, int, bytes]]:
    """(begin, end, status, response) of each body; times in monotonic seconds."""
    results: list[tuple[float, float, int, bytes]] = [(0.0, 0.0, 0, b"")] * len(bodies)
    rest = iter(enumerate(bodies))

    async def one_after_the_other(session: aiohttp.ClientSession) -> None:
        for index, body in rest:
            begin = time.monotonic()
            try:
                async with session.post(url, data=body, headers=headers) as response:
                    answer, status = await response.read(), response.status
            except (aiohttp.ClientError, TimeoutError) as error:
                answer, status = repr(error).encode(), 0
            results[index] = (begin, time.monotonic(), status, answer)

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        barrier.wait(60)
        await asyncio.gather(*(one_after_the_other(session) for _ in range(share)))
    return results


def _merge(parts: list[list[tuple[float, float, int, bytes]]], count: int) -> Sent:
    ordered = [parts[index % len(parts)][index // len(parts)] for index in range(count)]
    return Sent(
        elapsed_s=max(one[1] for one in ordered) - min(one[0] for one in ordered),
        latencies_s=[end - begin for begin, end, _, _ in ordered],
        statuses=[one[2] for one in ordered],
        answers=[one[3] for one in ordered],
    )
