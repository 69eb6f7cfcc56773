"""Helpers that prepare prompts with images: Python's lock would let threads do so one at a time.

They are forks of the worker, so each has the model's processor at once and shares its memory.
"""

import logging
import os
import queue
from typing import Any

import msgspec

from titopool.errors import ERRORS_BY_CODE, GenerationFailed, TitopoolError
from titopool.helpers.fork_server import ForkServer
from titopool.helpers.helper import Helper
from workers.images.exchange import Refused, read_shared, write_shared
from workers.images.placeholders import PlacingProcessor
from workers.images.preparation import Request, prepare

logger = logging.getLogger(__name__)


class ImageProcesses:
    """A fixed number of processes, each of which prepares one prompt at a time."""

    def __init__(
        self, processor: PlacingProcessor, *, max_model_len: int, number: int, timeout_s: float
    ):
        self._timeout_s = timeout_s

        def answer(body: bytes) -> int:
            return write_shared(_answer(body, processor, max_model_len))

        self._server = ForkServer("titopool::images", lambda: answer)
        self._free: queue.SimpleQueue[Helper] = queue.SimpleQueue()
        self._helpers = [Helper(self._server) for _ in range(number)]
        for helper in self._helpers:
            helper.start()
            self._free.put(helper)

    def prepare(self, request: Request) -> tuple[Any, int]:
        """The prepared prompt and the bytes of its tensors. Waits for a free process.

        Raises:
            TitopoolError: of `preparation.prepare`.
            GenerationFailed: the process ended twice, or had no answer in time.
        """
        helper = self._free.get()
        try:
            answer, num_bytes = self._ask(helper, msgspec.msgpack.encode(request))
        finally:
            self._free.put(helper)
        if isinstance(answer, Refused):
            raise ERRORS_BY_CODE[answer.code](answer.message, param=answer.param)
        return answer, num_bytes

    def _ask(self, helper: Helper, request: bytes) -> tuple[Any, int]:
        try:
            try:
                descriptor = helper.call(request, self._timeout_s)
            except ConnectionError as error:
                # It may have ended before, for want of memory. If it ends again, the prompt is
                # the cause.
                logger.warning("a process that prepares images is started again: %s", error)
                descriptor = helper.call(request, self._timeout_s)
        except OSError as error:
            why = "had no answer in time" if isinstance(error, TimeoutError) else "ended twice"
            raise GenerationFailed(
                f"the process that prepared the prompt's images {why}; the worker's log may have "
                "the reason; send smaller images, or other ones"
            ) from error
        assert isinstance(descriptor, int)
        try:
            return read_shared(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Kills the processes; a call that waits for one fails."""
        self._server.close()


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
