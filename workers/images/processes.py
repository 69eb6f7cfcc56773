"""Processes that prepare prompts with images: Python's lock would let threads do so one at a time.

Each is a fork of the worker, so it has the model's processor at once and shares its memory. It ends
with the worker, even if the worker is killed in the midst of a prompt.
"""

import logging
import os
import queue
import select
import signal
import socket
import struct
import threading
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from titopool.errors import ERRORS_BY_CODE, GenerationFailed, TitopoolError
from workers.forks import become_apart
from workers.images.exchange import Refused, read_shared, write_shared
from workers.images.placeholders import PlacingProcessor
from workers.images.preparation import Request, prepare

logger = logging.getLogger(__name__)

# Before a request: its bytes.
LENGTH = struct.Struct("<Q")
# Comes with the descriptor of an answer.
MARK = b"a"


class ImageProcesses:
    """A fixed number of processes, each of which prepares one prompt at a time."""

    def __init__(
        self, processor: PlacingProcessor, *, max_model_len: int, number: int, timeout_s: float
    ):
        self._free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._processes = [_Process(processor, max_model_len, timeout_s) for _ in range(number)]
        for process in self._processes:
            self._free.put(process)

    def prepare(self, request: Request) -> tuple[Any, int]:
        """The prepared prompt and the bytes of its tensors. Waits for a free process.

        Raises:
            TitopoolError: of `preparation.prepare`.
            GenerationFailed: the process ended twice, or had no answer in time.
        """
        process = self._free.get()
        try:
            answer, num_bytes = process.ask(msgspec.msgpack.encode(request))
        finally:
            self._free.put(process)
        if isinstance(answer, Refused):
            raise ERRORS_BY_CODE[answer.code](answer.message, param=answer.param)
        return answer, num_bytes

    def close(self) -> None:
        """Kills the processes; a call that waits for one fails."""
        for process in self._processes:
            process.close()


class _Process:
    """One process; one thread at a time may ask it."""

    def __init__(self, processor: PlacingProcessor, max_model_len: int, timeout_s: float):
        self._processor, self._max_model_len = processor, max_model_len
        self._timeout_s = timeout_s
        self._is_closed = False
        # None: it has ended.
        self._pid: int | None = None
        self._start()

    def _start(self) -> None:
        worker = os.pidfd_open(os.getpid())
        self._socket, theirs = socket.socketpair()
        with theirs:
            pid = os.fork()
            if pid == 0:
                _run(theirs, worker, self._processor, self._max_model_len)
        os.close(worker)
        self._pid = pid
        self._socket.settimeout(self._timeout_s)

    def ask(self, request: bytes) -> tuple[Any, int]:
        try:
            try:
                return self._ask(request)
            except ConnectionError:
                # It may have ended before, for want of memory. If it ends again, the prompt is
                # the cause.
                return self._ask(request)
        except OSError as error:
            why = "had no answer in time" if isinstance(error, TimeoutError) else "ended twice"
            raise GenerationFailed(
                f"the process that prepared the prompt's images {why}; the worker's log may have "
                "the reason; send smaller images, or other ones"
            ) from error

    def _ask(self, request: bytes) -> tuple[Any, int]:
        """Raises ConnectionError if the process has ended, TimeoutError if it was killed."""
        try:
            if self._pid is None and not self._is_closed:
                self._start()
            self._socket.sendall(LENGTH.pack(len(request)))
            self._socket.sendall(request)
            mark, descriptors, _, _ = socket.recv_fds(self._socket, len(MARK), 1)
            if not mark:
                raise ConnectionResetError("it ended")
        except OSError as error:
            logger.warning("a process that prepares images is started again: %s", error)
            self._end()
            raise
        try:
            return read_shared(descriptors[0])
        finally:
            os.close(descriptors[0])

    def close(self) -> None:
        self._is_closed = True
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _end(self) -> None:
        self._socket.close()
        if self._pid is not None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._pid = None


def _run(
    requests: socket.socket, worker: int, processor: PlacingProcessor, max_model_len: int
) -> NoReturn:
    """Answers requests until the worker has ended.

    Args:
        worker: the worker's pidfd.
    """
    try:
        become_apart("titopool::images", {requests.fileno(), worker})
        threading.Thread(target=_end_with, args=(worker,), daemon=True).start()
        # The threads of tokenizers did not survive the fork.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with requests.makefile("rb") as stream:
            while head := stream.read(LENGTH.size):
                body = stream.read(*LENGTH.unpack(head))
                descriptor = write_shared(_answer(body, processor, max_model_len))
                socket.send_fds(requests, [MARK], [descriptor])
                os.close(descriptor)
    except ConnectionError:
        # The worker has ended.
        pass
    except BaseException:
        logger.exception("a process that prepares images ends")
    finally:
        os._exit(0)


def _end_with(worker: int) -> None:
    """Ends this process with the worker, also in the midst of a request."""
    events = select.poll()
    events.register(worker, select.POLLIN)
    events.poll()
    os._exit(0)


def _answer(body: bytes, processor: PlacingProcessor, max_model_len: int) -> Any:
    try:
        request = msgspec.msgpack.decode(body, type=Request)
        return prepare(request, processor, max_model_len)
    except TitopoolError as error:
        return Refused(error.code, error.message, error.param)
    except Exception:
        logger.exception("images could not be prepared")
        return Refused(
            GenerationFailed.code,
            "the prompt's images could not be prepared; the worker's log has the reason",
        )
