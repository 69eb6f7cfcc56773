"""Gives a model's bytes to other workers, while the model generates.

Runs in: vLLM's processes that hold the model, in a thread of its own, which only reads. A reader
that knows the offer's key, which travels in commands only, may ask for three things: the plan, bytes,
and digests. The offer ends when the model is about to change, and when nobody has asked for a while.
"""

import functools
import logging
import threading
import time
from typing import Any, Literal

import msgspec
import zmq

from workers.in_model.peers.model_bytes import ModelBytes

logger = logging.getLogger(__name__)

# The most that one answer carries.
MAX_BYTES = 16 * 2**20
# Encrypting takes more time than reading.
NUM_IO_THREADS = 4
# Limit of a request's size: a question is a few bytes.
MAX_QUESTION_BYTES = 1024
# Milliseconds between two looks whether the offer has ended.
POLL_MS = 100
# How long the thread may take to end: it may read the last bytes.
END_TIMEOUT_S = 10.0


class Question(msgspec.Struct, frozen=True, array_like=True):
    """What a reader asks for; the numbers belong to `bytes`."""

    what: Literal["plan", "bytes", "digests"]
    begin: int = 0
    num_bytes: int = 0


_decode = msgspec.msgpack.Decoder(Question).decode


class Offer:
    """One model's bytes at one port."""

    def __init__(self, content: ModelBytes, device: Any, *, address: str, port: int, idle_s: float):
        """Listens at `address`; `port` 0 is any free port.

        Raises:
            OSError: the address cannot be listened at.
        """
        self._content = content
        self._device = device
        self._idle_s = idle_s
        self._ends_at = time.monotonic() + idle_s
        self._is_ending = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(NUM_IO_THREADS)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.ipv6 = True
        self._socket.maxmsgsize = MAX_QUESTION_BYTES
        # As for the sockets of workers: who has the key may connect.
        public, secret = zmq.curve_keypair()
        self.key = public.decode()
        self._socket.curve_server = True
        self._socket.curve_secretkey = secret
        try:
            self._socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"cannot listen at {address}:{port}: {error}") from None
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self._thread = threading.Thread(target=self._run, name="titopool-offer", daemon=True)
        self._thread.start()

    def renew(self) -> bool:
        """Another reader is about to come; returns False if the offer has ended."""
        self._ends_at = time.monotonic() + self._idle_s
        return self._thread.is_alive() and not self._is_ending.is_set()

    def end(self) -> None:
        """Ends the offer; returns when its thread reads no more of the model."""
        self._is_ending.set()
        self._thread.join(END_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("this worker's weights can no longer be fetched")
        finally:
            # Readers see that the connection is closed.
            self._context.destroy(linger=0)

    def _serve(self) -> None:
        import torch

        stream, buffer = None, torch.empty(MAX_BYTES, dtype=torch.uint8)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            stream, buffer = _stream(self._device), buffer.pin_memory()
        # The model's thread has its own stream and does not wait for this one.
        with torch.no_grad(), torch.cuda.stream(stream):
            while not self._is_ending.is_set() and time.monotonic() < self._ends_at:
                if self._socket.poll(POLL_MS):
                    identity, *frames = self._socket.recv_multipart()
                    try:
                        question = _decode(b"".join(frames))
                    except msgspec.MsgspecError as error:
                        logger.warning("dropped a question for weights: %s", error)
                        continue
                    answer = self._answer(question, buffer, stream)
                    self._ends_at = time.monotonic() + self._idle_s
                    self._socket.send_multipart([identity, answer])

    def _answer(self, question: Question, buffer: Any, stream: Any) -> Any:
        """The answer's frame; empty for bytes that do not exist."""
        if question.what == "plan":
            return msgspec.msgpack.encode(self._content.plan)
        if question.what == "digests":
            return msgspec.msgpack.encode(self._content.digests(self._is_ending.is_set))
        end = question.begin + question.num_bytes
        is_valid = 0 <= question.begin < end <= self._content.plan.num_bytes
        if not is_valid or question.num_bytes > MAX_BYTES:
            return b""
        part = buffer[: question.num_bytes]
        self._content.read(question.begin, part)
        if stream is not None:
            stream.synchronize()
        return memoryview(part.numpy())


@functools.cache
def _stream(device: Any) -> Any:
    """One for all offers of a process: torch keeps memory for each stream."""
    import torch

    return torch.cuda.Stream(device)
