"""Helper processes: calls of any size, and what ends a helper ends no later call."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.servers import REPOSITORY, wait_until
from titopool.helpers.fork_server import Answer, ForkServer, Limits
from titopool.helpers.helper import Helper
from titopool.helpers.spawned import SpawnedForkServer

LIMIT_S = 0.2
# More than a socket holds.
LARGE = bytes(range(256)) * 2**14


def work(request: bytes) -> Answer:
    match request:
        case b"sleep":
            time.sleep(60)
        case b"loop":
            while True:
                pass
        case b"memory":
            bytearray(2**30)
        case b"descriptor":
            read, write = os.pipe()
            os.write(write, b"by a descriptor")
            os.close(write)
            return read
    return request[::-1]


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer("titopool::test", lambda: work, Limits(LIMIT_S, 2**28))
    yield made
    made.close()


def call_async(helper: Helper, request: bytes, timeout_s: float) -> Answer:
    return asyncio.run(helper.call_async(request, timeout_s))


def num_pidfds() -> int:
    links = (os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink())
    return sum("pidfd" in one for one in links)


CALLS = pytest.mark.parametrize("call", [Helper.call, call_async])


@CALLS
def test_a_call_is_answered_whatever_its_size(server: ForkServer, call: Callable[..., Answer]):
    helper = Helper(server)
    for request in (b"", b"abc", LARGE, b"abc"):
        assert call(helper, request, 10) == request[::-1]
    descriptor = call(helper, b"descriptor", 10)
    assert isinstance(descriptor, int)
    assert os.read(descriptor, 100) == b"by a descriptor"
    os.close(descriptor)


@CALLS
@pytest.mark.parametrize(
    ("request_", "error"),
    [(b"sleep", TimeoutError), (b"loop", ConnectionError), (b"memory", ConnectionError)],
)
def test_a_helper_that_exceeds_a_limit_is_replaced(
    server: ForkServer, call: Callable[..., Answer], request_: bytes, error: type[Exception]
):
    helper, other = Helper(server), Helper(server)
    helper.start()
    other.start()
    first, neighbour = helper.pid, other.pid
    # A loop's limit is in CPU time.
    with pytest.raises(error):
        call(helper, request_, 1 if error is TimeoutError else 30)
    wait_until(lambda: not psutil.pid_exists(first), 10)
    assert call(helper, b"abc", 10) == b"cba"
    assert call(other, b"abc", 10) == b"cba"
    assert other.pid == neighbour


def test_a_cancelled_call_ends_its_helper(server: ForkServer):
    helper = Helper(server)
    helper.start()
    first = helper.pid

    async def run() -> Answer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await helper.call_async(b"sleep", 60)
        # Else its answer would be taken for that of the next call.
        return await helper.call_async(b"abc", 10)

    assert asyncio.run(run()) == b"cba"
    assert not psutil.pid_exists(first) or helper.pid != first


def test_a_fork_server_that_has_ended_is_started_again(server: ForkServer):
    helper = Helper(server)
    helper.start()
    first = helper.pid
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(first), 10)
    with pytest.raises(ConnectionError):
        helper.call(b"abc", 10)
    assert helper.call(b"abc", 10) == b"cba"


def test_after_the_end_nothing_starts(server: ForkServer):
    helper = Helper(server)
    server.close()
    with pytest.raises(ConnectionError, match="closed"):
        helper.call(b"abc", 10)


def test_a_server_that_has_ended_is_not_signalled_again(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
):
    """Its number may be that of another process, whose group would end."""
    signalled, killpg = [], os.killpg
    monkeypatch.setattr(
        os, "killpg", lambda pid, number: (signalled.append(pid), killpg(pid, number))
    )
    first = server.pid
    server.kill()
    server.kill()
    server.close()
    assert signalled == [first]


def test_a_helper_that_has_ended_leaves_no_descriptor(server: ForkServer):
    before = num_pidfds()
    helper = Helper(server)
    for _ in range(3):
        assert helper.call(b"abc", 10) == b"cba"
        assert num_pidfds() == before + 1
        helper.end()
    assert num_pidfds() == before


def test_a_fork_that_fails_leaves_no_descriptor(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
):
    def fails() -> int:
        raise BlockingIOError("no more processes")

    server.kill()
    before = num_pidfds()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", fails)
        with pytest.raises(BlockingIOError):
            Helper(server).start()
    assert num_pidfds() == before
    assert Helper(server).call(b"abc", 10) == b"cba"


def test_a_fork_server_in_an_interpreter_of_its_own_is_started_again_too():
    code = """if True:
        from tests.project.test_helpers import LIMIT_S, work
        from titopool.helpers.fork_server import Limits
        from titopool.helpers.spawned import serve

        serve("titopool::test", lambda: work, Limits(LIMIT_S, 2**28))
    """
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    server = SpawnedForkServer("titopool::test", ["-c", code], environ)
    helper = Helper(server)
    for _ in range(2):
        assert helper.call(b"abc", 10) == b"cba"
        with pytest.raises(ConnectionError):
            helper.call(b"loop", 30)
        assert helper.call(b"abc", 10) == b"cba"
        first, pid = helper.pid, server.pid
        server.kill()
        wait_until(lambda first=first: not psutil.pid_exists(first), 10)
        with pytest.raises(ConnectionError):
            helper.call(b"abc", 10)
    server.close()
    assert not psutil.pid_exists(pid)
