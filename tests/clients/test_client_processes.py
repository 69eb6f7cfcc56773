"""The client in forked children, in several threads and loops, in pickles, and at a process's end."""

import asyncio
import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from harness.servers import environment, wait_until
from titopool import AsyncClient, Client, Rollout
from titopool.release import RELEASE, VERSION_HEADER
from titopool.rollouts.groups import StoppableClient

# A client's timeout; a call that hangs runs into it.
TIMEOUT_S = 20
# Texts to tokenize: the server answers to all others at once.
SLOW, NEVER = "slow", "never"


class KeptServer(ThreadingHTTPServer):
    """Answers each request with three tokens and keeps its connections."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.num_connections = 0
        # Of requests that are not answered: whether they have come, and whether their client has gone.
        self.has_come, self.has_gone = threading.Event(), threading.Event()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.num_connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: KeptServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if NEVER in body:
            self.server.has_come.set()
            assert self.rfile.read(1) == b""
            self.server.has_gone.set()
            return
        if SLOW in body:
            self.server.has_come.set()
            threading.Event().wait(1)
        answer = b'{"count": 3, "max_model_len": 64, "tokens": [1, 2, 3], "token_strs": null}'
        self.send_response(200)
        self.send_header(VERSION_HEADER, RELEASE)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def kept() -> Iterator[KeptServer]:
    with KeptServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(program: str, url: str) -> tuple[int, str, str]:
    """The exit status and the output of a program that has the server's URL in `url`."""
    before = (
        "import asyncio, gc, os, sys, threading\n"
        "from titopool import AsyncClient, Client\n"
        f"url, TIMEOUT_S = sys.argv[1], {TIMEOUT_S}\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", before + program, url],
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


# ---- forks ---------------------------------------------------------------------------

FORKS = {
    "idle": """
client = Client(url, timeout_s=TIMEOUT_S)
client.tokenize("a")
if not (pid := os.fork()):
    with client:
        client.tokenize("a")
    gc.collect()
    sys.exit()
os.waitpid(pid, 0)
client.tokenize("a")

async def main():
    client = AsyncClient(url, timeout_s=TIMEOUT_S)
    await client.tokenize("a")
    if not (pid := os.fork()):
        asyncio.events._set_running_loop(None)
        asyncio.run(client.tokenize("a"))
        del client
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    await client.tokenize("a")
asyncio.run(main())
""",
    "in-flight": """
client = Client(url, timeout_s=TIMEOUT_S)
found = []
thread = threading.Thread(target=lambda: found.append(client.tokenize("slow")))
thread.start()
while client._thread is None:
    pass
client.tokenize("a")
if not (pid := os.fork()):
    client.tokenize("a")
    del client, thread
    gc.collect()
    sys.exit()
os.waitpid(pid, 0)
thread.join()
assert len(found) == 1
""",
}


@pytest.mark.parametrize("name", FORKS)
def test_a_forked_child_leaves_the_parent_s_connections_alone(kept: KeptServer, name: str):
    assert run(FORKS[name] + 'print("done")', kept.url) == (0, "done\n", "")


def test_a_forked_child_does_not_hide_that_the_parent_has_gone(kept: KeptServer):
    program = """
import asyncio, os, sys
from titopool import AsyncClient

async def main():
    call = asyncio.create_task(AsyncClient(sys.argv[1]).tokenize("never"))
    await asyncio.to_thread(sys.stdin.readline)
    child_ends, end_child = os.pipe()
    if not (pid := os.fork()):
        os.close(end_child)
        os.read(child_ends, 1)
        os._exit(0)
    call.cancel()
    await asyncio.to_thread(sys.stdin.readline)
    os.close(end_child)
    os.waitpid(pid, 0)
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, kept.url], env=environment(), stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert kept.has_come.wait(20)
        process.stdin.write(b"\n")
        process.stdin.flush()
        # The child still lives, with copies of the parent's descriptors.
        assert kept.has_gone.wait(20)
        process.communicate(timeout=20)


# ---- the end of a process ------------------------------------------------------------

ENDS = {
    "idle": """
def main():
    Client(url).tokenize("a")
main()
in_a_cycle = Client(url)
in_a_cycle.me = in_a_cycle
in_a_cycle.tokenize("a")
del in_a_cycle
gc.collect()

async def main():
    in_a_cycle = AsyncClient(url)
    in_a_cycle.me = in_a_cycle
    await in_a_cycle.tokenize("a")
    del in_a_cycle
    gc.collect()
    await AsyncClient(url).tokenize("a")
    await asyncio.sleep(0.1)
asyncio.run(main())
of_two_loops = AsyncClient(url)
asyncio.run(of_two_loops.tokenize("a"))
asyncio.run(of_two_loops.tokenize("a"))
open = Client(url)
open.tokenize("a")
""",
    "in-flight": """
client = Client(url)
threading.Thread(target=client.tokenize, args=("never",), daemon=True).start()
client.tokenize("a")
""",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_client_that_nobody_closes_ends_without_a_word(kept: KeptServer, name: str):
    assert run(ENDS[name], kept.url) == (0, "", "")


# ---- threads and loops ---------------------------------------------------------------


def in_threads(num: int, call: Callable[[], Any]) -> list[BaseException]:
    """What `num` calls at once raise."""
    errors: list[BaseException] = []

    def caught() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught) for _ in range(num)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
        assert not one.is_alive()
    return errors


def test_each_loop_keeps_its_connection(kept: KeptServer):
    client = AsyncClient(kept.url, timeout_s=TIMEOUT_S)

    async def use() -> None:
        for _ in range(20):
            await client.tokenize("a")
            await asyncio.sleep(0.001)

    assert in_threads(2, lambda: asyncio.run(use())) == []
    assert kept.num_connections == 2


def test_a_closed_loop_leaves_nothing_behind(kept: KeptServer):
    client = AsyncClient(kept.url, timeout_s=TIMEOUT_S)
    for _ in range(5):
        asyncio.run(client.tokenize("a"))
    assert len(client._sessions._open) == 1


def test_calls_while_others_close_have_an_answer_or_are_cancelled(kept: KeptServer):
    client = Client(kept.url, timeout_s=TIMEOUT_S)

    def use() -> None:
        for index in range(30):
            try:
                assert len(client.tokenize("a")) == 3
            except asyncio.CancelledError:
                pass
            if index % 3 == 0:
                client.close()

    assert in_threads(4, use) == []
    client.stop()
    with pytest.raises(asyncio.CancelledError):
        client.tokenize("a")
    ours = lambda: [one for one in threading.enumerate() if one.name == "titopool-client"]  # noqa: E731
    wait_until(lambda: not ours(), 5)


def test_a_client_without_a_holder_ends_its_thread(kept: KeptServer):
    before = threading.active_count()
    Client(kept.url).tokenize("a")
    wait_until(lambda: threading.active_count() <= before, 10)


# ---- copies --------------------------------------------------------------------------

COPIES = {
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("name", COPIES)
def test_clients_and_rollouts_can_be_copied(kept: KeptServer, name: str):
    with Client(kept.url, api_key="key", timeout_s=TIMEOUT_S) as client:
        client.tokenize("a")
        with COPIES[name](client) as other:
            other.tokenize("a")
            assert other._client.api_key == "key"
            rollout = COPIES[name](Rollout(client, messages=[{"role": "user", "content": "a"}]))
            assert rollout.ids.tolist() == [1, 2, 3]
        client.tokenize("a")
    # One that a run stops is copied as the client alone.
    assert isinstance(COPIES[name](StoppableClient(client)), Client)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_the_async_client_has_its_own_connections(kept: KeptServer, name: str):
    async def main() -> None:
        async with AsyncClient(kept.url, timeout_s=TIMEOUT_S) as client:
            await client.tokenize("a")
            async with COPIES[name](client) as other:
                await other.tokenize("a")
            await client.tokenize("a")

    asyncio.run(main())
    assert kept.num_connections == 2
