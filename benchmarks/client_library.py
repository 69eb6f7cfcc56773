"""CPU time of HTTP libraries with 4,096 requests open at once: which one `titopool.Client` uses.

    python -m benchmarks.client_library [--requests 4096] [--rounds 3] [LIBRARY …]

A server in a process of its own answers all requests of a round at once, with the bytes of 256
tokens and their log-probabilities, when all of them are open. The first round makes connections and
is not counted. Figures are CPU time of the client's process (user and system), for each request.
"""

import argparse
import asyncio
import importlib.metadata
import multiprocessing
import multiprocessing.connection
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

BODY = b'{"prompts": [[' + b", ".join(b"%d" % (1000 + index) for index in range(256)) + b"]]}"
ANSWER = bytes(256 * 8 + 200)
TIMEOUT_S = 600.0


def raise_limit() -> None:
    """Allows as many open sockets as the machine does."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve(num_requests: int, ready: multiprocessing.connection.Connection) -> None:
    waiting: list[asyncio.StreamWriter] = []
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nContent-Length: {len(ANSWER)}"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(BODY))
                waiting.append(writer)
                if len(waiting) == num_requests:
                    for one in waiting:
                        one.write(head.encode() + b"\r\n\r\n" + ANSWER)
                    waiting.clear()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=8192)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def server_process(num_requests: int, ready: multiprocessing.connection.Connection) -> None:
    raise_limit()
    asyncio.run(serve(num_requests, ready))


Rounds = Callable[[str, int, int], list[float]]


async def timed(round_once: Callable[[], object], num_rounds: int) -> list[float]:
    taken = []
    for _ in range(num_rounds + 1):
        began = time.process_time()
        await asyncio.wait_for(round_once(), TIMEOUT_S)  # type: ignore[arg-type]
        taken.append(time.process_time() - began)
    return taken[1:]


def run_aiohttp(url: str, num_requests: int, num_rounds: int) -> list[float]:
    import aiohttp

    async def main() -> list[float]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

            async def one() -> None:
                async with session.post(url, data=BODY) as response:
                    assert await response.read() == ANSWER

            return await timed(lambda: asyncio.gather(*(one() for _ in range(num_requests))),
                               num_rounds)  # fmt: skip

    return asyncio.run(main())


def run_httpx(url: str, num_requests: int, num_rounds: int) -> list[float]:
    import httpx

    async def main() -> list[float]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S) as client:

            async def one() -> None:
                assert (await client.post(url, content=BODY)).content == ANSWER

            return await timed(lambda: asyncio.gather(*(one() for _ in range(num_requests))),
                               num_rounds)  # fmt: skip

    return asyncio.run(main())


def in_threads(post: Callable[[], bytes], num_requests: int, num_rounds: int) -> list[float]:
    threading.stack_size(256 * 1024)
    taken = []
    with ThreadPoolExecutor(num_requests) as threads:
        for _ in range(num_rounds + 1):
            began = time.process_time()
            futures = [threads.submit(post) for _ in range(num_requests)]
            for future in futures:
                assert future.result(TIMEOUT_S) == ANSWER
            taken.append(time.process_time() - began)
    return taken[1:]


def run_urllib3(url: str, num_requests: int, num_rounds: int) -> list[float]:
    import urllib3

    pool = urllib3.PoolManager(maxsize=num_requests, timeout=TIMEOUT_S, retries=False)
    return in_threads(lambda: pool.request("POST", url, body=BODY).data, num_requests, num_rounds)


def run_httpx_threads(url: str, num_requests: int, num_rounds: int) -> list[float]:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with httpx.Client(limits=limits, timeout=TIMEOUT_S) as client:
        return in_threads(lambda: client.post(url, content=BODY).content, num_requests, num_rounds)


LIBRARIES: dict[str, Rounds] = {
    "aiohttp": run_aiohttp,
    "httpx": run_httpx,
    "urllib3": run_urllib3,
    "httpx-threads": run_httpx_threads,
}


def measure(name: str, num_requests: int, num_rounds: int) -> None:
    """Prints one library's figures; runs in a process of its own."""
    raise_limit()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=server_process, args=(num_requests, theirs))
    server.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}/"
        taken = sorted(LIBRARIES[name](url, num_requests, num_rounds))
        version = importlib.metadata.version(name.partition("-")[0])
        low, high = (1e3 * value / num_requests for value in (taken[0], taken[-1]))
        print(f"{name} {version}: {low:.2f} to {high:.2f} ms of CPU a request", flush=True)
    finally:
        server.terminate()
        server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", default=list(LIBRARIES))
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for name in arguments.libraries:
        child = multiprocessing.Process(
            target=measure, args=(name, arguments.requests, arguments.rounds)
        )
        child.start()
        child.join()


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
