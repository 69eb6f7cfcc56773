"""A helper process as its callers see it: threads, greenlets, and tasks of asyncio."""

import asyncio
import os
import select
import signal
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress

from titopool.deadline import Deadline
from titopool.helpers.fork_server import LENGTH, Answer, ForkServer

# What the socket of a call must be ready for, again and again; then the answer.
Steps = Generator[int, None, Answer]

# Until a helper has begun: what the fork server prepares for the first one may take long.
START_TIMEOUT_S = 60.0
RECEIVE_BYTES = 2**18


class Helper:
    """One helper process; it takes one call at a time. The first call after its end starts it again."""

    def __init__(self, server: ForkServer):
        self._server = server
        self._socket: socket.socket | None = None
        # 0: it has none.
        self.pid = 0
        self._pidfd = -1
        self._deadline = Deadline.after(0)

    def start(self) -> None:
        """Starts the process, if there is none.

        Raises:
            ConnectionError: it did not start.
        """
        self._wait(self._started())

    def call(self, request: bytes, timeout_s: float) -> Answer:
        """The answer to a request.

        Raises:
            ConnectionError: the helper has ended; it may have exceeded a limit.
            TimeoutError: it had no answer in time, and was killed.
        """
        return self._wait(self._called(request, timeout_s))

    async def call_async(self, request: bytes, timeout_s: float) -> Answer:
        """As `call`, on an event loop. If the call is cancelled, the helper is killed."""
        steps = self._called(request, timeout_s)
        with self._killed_on_failure():
            while True:
                try:
                    event = next(steps)
                except StopIteration as end:
                    answer: Answer = end.value
                    return answer
                async with asyncio.timeout(self._deadline.left_s):
                    await self._ready(event)

    def end(self) -> None:
        """Kills the process, if there is one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
        self.pid, self._pidfd = 0, -1

    def _wait(self, steps: Steps) -> Answer:
        with self._killed_on_failure():
            while True:
                try:
                    event = next(steps)
                except StopIteration as end:
                    answer: Answer = end.value
                    return answer
                events = select.poll()
                events.register(self._open, event)
                if not events.poll(1e3 * self._deadline.left_s):
                    raise TimeoutError("no answer in time")

    @contextmanager
    def _killed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            has_begun = bool(self.pid)
            self.end()
            if isinstance(error, TimeoutError) and not has_begun:
                self._server.kill()
                raise ConnectionResetError("a helper did not start in time") from error
            raise

    async def _ready(self, event: int) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        add, remove = (
            (loop.add_reader, loop.remove_reader)
            if event == select.POLLIN
            else (loop.add_writer, loop.remove_writer)
        )
        connection = self._open
        add(connection, ready.set)
        try:
            await ready.wait()
        finally:
            remove(connection)

    @property
    def _open(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    # What follows makes the steps of a call; each yields what the socket must be ready for.

    def _started(self) -> Steps:
        if self._socket is None:
            self._deadline = Deadline.after(START_TIMEOUT_S)
            self._socket = self._server.connect()
            hello = yield from self._received()
            assert isinstance(hello, bytes)
            pid = int.from_bytes(hello, "little")
            try:
                self._pidfd = os.pidfd_open(pid)
            except ProcessLookupError as error:
                raise ConnectionResetError("a helper ended at its start") from error
            self.pid = pid
        return b""

    def _called(self, request: bytes, timeout_s: float) -> Steps:
        yield from self._started()
        self._deadline = Deadline.after(timeout_s)
        for part in (LENGTH.pack(len(request)), request):
            rest = memoryview(part)
            while rest:
                try:
                    rest = rest[self._open.send(rest) :]
                except BlockingIOError:
                    yield select.POLLOUT
        return (yield from self._received())

    def _received(self) -> Steps:
        data, descriptors = bytearray(), list[int]()
        try:
            while len(data) < LENGTH.size or (not descriptors and not _is_whole(data)):
                try:
                    more, some, _, _ = socket.recv_fds(self._open, RECEIVE_BYTES, 1)
                except BlockingIOError:
                    yield select.POLLIN
                    continue
                if not more:
                    raise ConnectionResetError("a helper ended")
                data += more
                descriptors += some
        except BaseException:
            for one in descriptors:
                os.close(one)
            raise
        return descriptors[0] if descriptors else bytes(memoryview(data)[LENGTH.size :])


def _is_whole(data: bytearray) -> bool:
    (length,) = LENGTH.unpack_from(data)
    return len(data) == LENGTH.size + int(length)
