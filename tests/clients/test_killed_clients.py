"""A client's process that is killed at any point leaves nothing behind at the server.

The clients are processes of their own with `titopool.Client`, ended by SIGKILL. The engine is a
stub; the two front ends and the sockets are real.
"""

import json
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from app.http.answer_store import FILE
from app.http.idempotency import REPEAT_WITHIN_S
from harness.servers import REPOSITORY, Server, environment, forked_server, stub_worker, wait_until
from harness.stub_worker import Fault
from titopool.wire.run_dir import ANSWERS

# The stub generates so many completions at once; further jobs wait in the front ends.
NUM_SLOTS = 8
HANGING = [Fault.HANG, 1, 2]
# More than both front ends send ahead of free slots.
NUM_CALLS = 40
MIB = 2**20
UPLOADED_BYTES = MIB // 2
# Calls `Client.generate` with each list of arguments at once.
GENERATES = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from titopool import Client

url, calls = sys.argv[1], json.loads(sys.stdin.read())
with ThreadPoolExecutor(len(calls)) as threads, Client(url, timeout_s=300) as client:
    for result in [threads.submit(client.generate, **fields) for fields in calls]:
        result.result()
"""
# Reads streams, which `Client` does not have; says so at each event.
STREAMS = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
import requests

def read(body):
    with requests.post(sys.argv[1] + "/inference/v1/generate", json=body, stream=True) as answer:
        for _ in answer.iter_lines():
            os.write(1, b"event\\n")

bodies = json.loads(sys.stdin.read())
with ThreadPoolExecutor(len(bodies)) as threads:
    list(threads.map(read, bodies))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("killed")
    endpoint, run_dir = f"ipc://{folder}/worker-0", folder / "run"
    run_dir.mkdir()
    words = (
        "--delay-s", "0.05", "--max-num-seqs", str(NUM_SLOTS), "--max-model-len", "100000",
    )  # fmt: skip
    quick = {"TITOPOOL_HEARTBEAT_INTERVAL_S": "0.1"}
    with stub_worker(endpoint, *words, **quick), forked_server(
        "--endpoints", endpoint, "--num-front-ends", "2", "--run-dir", str(run_dir),
        log=folder / "log", **quick,
    ) as running:  # fmt: skip
        yield running


def left_behind(server: Server) -> dict[str, float]:
    """Completions in the engine, waiting prompts, and memory of all front ends."""
    text = server.get("/metrics").text
    found = {
        name: re.findall(rf"^titopool_{name}(?:{{.*}})? (\S+)$", text, re.M)
        for name in ("worker_sequences", "waiting_prompts", "memory_taken_bytes")
    }
    return {name: float(value) for name, (value,) in found.items()}


def has_nothing(server: Server) -> bool:
    return not any(left_behind(server).values())


def num_open(server: Server) -> float:
    """Prompts in the engine, and prompts that wait."""
    now = left_behind(server)
    return now["worker_sequences"] + now["waiting_prompts"]


def in_store(server: Server, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Runs a statement in the front ends' store of answers."""
    path = server.log_file.with_name("run") / ANSWERS / FILE
    if not path.exists():
        return []
    with closing(sqlite3.connect(path, timeout=30)) as store, store:
        return store.execute(statement, values).fetchall()


def kept_keys(server: Server) -> list[float]:
    """Since when the request of each key waits for a repeat, in seconds; none before there is a store."""
    with suppress(sqlite3.OperationalError):
        return [time.time() - at_s for (at_s,) in in_store(server, "SELECT at_s FROM names")]
    return []


def awaited_since(server: Server, *, seconds: float) -> None:
    """Sets the time since which a repeat may come, so that no test waits for it."""
    in_store(server, "UPDATE names SET at_s = ?", time.time() - seconds)


@contextmanager
def client_process(code: str, url: str, calls: list[dict[str, Any]]) -> Iterator[Any]:
    """A process that sends `calls`; killed at the end, and it must not have ended before."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), cwd=REPOSITORY,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(calls).encode())
        process.stdin.close()
        yield process
        assert process.poll() is None, "the client's call must be open until the kill"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class SlowRelay:
    """Passes the first bytes of a connection to the server, and after the kill its end."""

    def __init__(self, server: Server, limit: int):
        host, port = server.url.removeprefix("http://").split(":")
        self._target, self._limit = (host, int(port)), limit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        # Set after the kill; then the relay comes to the end of the process's connection.
        self.is_killed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        left = self._limit
        with client, socket.create_connection(self._target, 60) as target, suppress(OSError):
            while left and (piece := client.recv(min(left, 65536))):
                target.sendall(piece)
                left -= len(piece)
            # Until then the process cannot send the rest.
            self.is_killed.wait(60)
            while client.recv(65536):
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def wait_and_check(server: Server, condition: Callable[[dict[str, float]], bool]) -> None:
    wait_until(lambda: condition(left_behind(server)), 20, lambda: str(left_behind(server)))


def assert_nothing_left(server: Server) -> None:
    wait_until(lambda: has_nothing(server), 10, lambda: str(left_behind(server)))
    # The slots are free.
    answer = server.generate([[5, 6, 7]] * NUM_SLOTS, max_tokens=3)
    assert answer["completion_ids"] == [[7, 6, 5]] * NUM_SLOTS


def test_while_uploading(server: Server):
    relay = SlowRelay(server, UPLOADED_BYTES + 2000)
    prompts = [[1, 2, 3, 4] * 20_000] * 20
    try:
        with client_process(GENERATES, relay.url, [{"prompts": prompts}] * 2):
            # All that comes of both.
            wait_and_check(server, lambda now: now["memory_taken_bytes"] >= 2 * UPLOADED_BYTES)
            assert left_behind(server)["worker_sequences"] == 0
        relay.is_killed.set()
        assert_nothing_left(server)
    finally:
        relay.close()


def test_while_generating_and_queued(server: Server):
    calls = [{"prompts": [HANGING]}] * NUM_CALLS
    with client_process(GENERATES, server.url, calls):
        wait_until(lambda: num_open(server) == NUM_CALLS, 20)
        now = left_behind(server)
        assert now["worker_sequences"] >= NUM_SLOTS
        assert now["waiting_prompts"] > 0
        assert now["memory_taken_bytes"] > 0
    assert_nothing_left(server)


def test_while_a_batch_with_progress_is_queued(server: Server):
    """The batch is several requests, which one process sends at once."""
    with client_process(GENERATES, server.url, [{"prompts": [HANGING] * 40, "progress": True}]):
        wait_until(lambda: num_open(server) == 40, 20)
    assert_nothing_left(server)


def test_while_answers_are_on_their_way(server: Server):
    """The answer is larger than what sockets hold, and the process reads nothing of it."""
    long = [1, *range(2, 30_000)]
    call = {"prompts": [long] * 4, "n": 32, "max_tokens": len(long)}
    with client_process(GENERATES, server.url, [call]) as process:
        # A pause, so that no answer comes before the process is stopped.
        assert server.post("/pause?mode=keep", None).status_code == 200
        wait_and_check(server, lambda now: now["worker_sequences"] > 0)
        process.send_signal(signal.SIGSTOP)
        assert server.post("/resume", None).status_code == 200
        wait_and_check(server, lambda now: now["worker_sequences"] == 0)
        time.sleep(0.5)
        assert left_behind(server)["memory_taken_bytes"] > MIB
    assert_nothing_left(server)


def test_while_streams_are_read(server: Server):
    body = {
        "token_ids": list(range(1, 5000)),
        "sampling_params": {"max_tokens": 4999},
        "stream": True,
    }
    with client_process(STREAMS, server.url, [body] * NUM_CALLS) as process:
        for _ in range(20):
            assert process.stdout.readline() == b"event\n"
        # The report of its load may come after the first tokens.
        wait_until(lambda: left_behind(server)["worker_sequences"] > 0, 20)
    assert_nothing_left(server)


@pytest.mark.parametrize("num_calls", [4, NUM_CALLS], ids=["generating", "queued"])
def test_with_a_key_the_request_goes_on_for_a_repeat_and_then_ends(server: Server, num_calls: int):
    calls = [{"prompts": [HANGING], "idempotent": True}] * num_calls
    with client_process(GENERATES, server.url, calls):
        # Before the figures: a front end's may be those of the test before until the next report.
        wait_until(lambda: len(kept_keys(server)) == num_calls, 20)
        wait_until(lambda: num_open(server) == num_calls, 20)
        # A prompt waits for its turn between the request's beginning and its sending.
        is_queued = num_calls > NUM_SLOTS
        wait_until(lambda: (left_behind(server)["waiting_prompts"] > 0) == is_queued, 20)
        awaited_since(server, seconds=10)
    # The end of the connection begins the time anew.
    wait_until(lambda: min(kept_keys(server)) < 5, 10)
    wait_until(lambda: max(kept_keys(server)) < 5, 10)
    assert (num_open(server), len(kept_keys(server))) == (num_calls, num_calls)
    awaited_since(server, seconds=REPEAT_WITHIN_S)
    assert_nothing_left(server)
    assert kept_keys(server) == []


def test_killed_repeats_do_not_keep_the_request(server: Server):
    """Processes wait for the request of another one; all are killed."""
    call = {"prompts": [HANGING], "idempotent": "same"}
    with client_process(GENERATES, server.url, [call]):
        wait_until(lambda: num_open(server) == 1, 20)
        wait_until(lambda: bool(kept_keys(server)), 20)
        with client_process(GENERATES, server.url, [call] * 4):
            awaited_since(server, seconds=10)
            # Whoever waits begins the time anew.
            wait_until(lambda: min(kept_keys(server)) < 5, 20)
    wait_until(lambda: min(kept_keys(server)) > 1, 20)
    assert num_open(server) == 1
    awaited_since(server, seconds=REPEAT_WITHIN_S)
    assert_nothing_left(server)
    assert kept_keys(server) == []


def test_while_uploading_with_a_key(server: Server):
    relay = SlowRelay(server, UPLOADED_BYTES + 2000)
    call = {"prompts": [[1, 2, 3, 4] * 20_000] * 10, "idempotent": True}
    try:
        with client_process(GENERATES, relay.url, [call]):
            wait_and_check(server, lambda now: now["memory_taken_bytes"] >= UPLOADED_BYTES)
            assert kept_keys(server) == []
        relay.is_killed.set()
        assert_nothing_left(server)
        assert kept_keys(server) == []
    finally:
        relay.close()
