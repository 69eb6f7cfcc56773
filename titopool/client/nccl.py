"""The few calls of NCCL that a trainer needs to send weights, through torch's own library.

Runs in: trainers. The servers' workers use vLLM's binding, which needs vLLM. Both do the same at
the start: rank 0 makes an id, all ranks join, and one sum over a single float warms NCCL up.
"""

import ctypes
from typing import Any

ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0


class NcclId(ctypes.Structure):
    """What the ranks of a communicator find each other by."""

    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class NcclError(Exception):
    """NCCL refused a call; the message is its own."""


class Nccl:
    """One communicator of this process, on one GPU."""

    def __init__(self, *, rank: int, world_size: int, nccl_id: bytes, device: Any):
        """Blocks until all ranks have come.

        Raises:
            NcclError: NCCL failed.
        """
        import torch

        self._library = library()
        self._device = torch.device(device)
        self._communicator = ctypes.c_void_p()
        unique = NcclId.from_buffer_copy(nccl_id)
        # The trainer's current device stays as it is.
        with torch.cuda.device(self._device):
            self.stream = torch.cuda.Stream(self._device)
            code = self._library.ncclCommInitRank(
                ctypes.byref(self._communicator),
                ctypes.c_int(world_size),
                unique,
                ctypes.c_int(rank),
            )
            self._check(code)
            self._warm_up(torch.zeros(1, device=self._device))

    def _warm_up(self, number: Any) -> None:
        import torch

        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        pointer = ctypes.c_void_p(number.data_ptr())
        code = self._library.ncclAllReduce(
            pointer, pointer, ctypes.c_size_t(1), ctypes.c_int(FLOAT32), ctypes.c_int(SUM),
            self._communicator, ctypes.c_void_p(self.stream.cuda_stream),
        )  # fmt: skip
        self._check(code)
        self.stream.synchronize()

    def broadcast(self, buffer: Any, source: int) -> None:
        """Begins to send the bytes of `buffer`, a contiguous tensor, from rank `source`.

        The buffer must stay as it is until `stream` has come so far.
        """
        import torch

        pointer = ctypes.c_void_p(buffer.data_ptr())
        with torch.cuda.device(self._device):
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
            code = self._library.ncclBroadcast(
                pointer, pointer, ctypes.c_size_t(buffer.numel() * buffer.element_size()),
                ctypes.c_int(UINT8), ctypes.c_int(source), self._communicator,
                ctypes.c_void_p(self.stream.cuda_stream),
            )  # fmt: skip
        self._check(code)

    def abort(self) -> None:
        """Gives up what is under way and leaves."""
        if self._communicator:
            communicator, self._communicator = self._communicator, ctypes.c_void_p()
            self._library.ncclCommAbort(communicator)

    def _check(self, code: int) -> None:
        if code != 0:
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            raise NcclError(self._library.ncclGetErrorString(code).decode())


def library() -> ctypes.CDLL:
    """NCCL as torch has loaded it.

    Raises:
        OSError: there is none.
    """
    import torch

    # torch loads it at its own import: by this name it is found again.
    assert torch.cuda.is_available(), "NCCL needs a GPU"
    return ctypes.CDLL("libnccl.so.2")


def new_id() -> bytes:
    """An id for a new communicator, made by its rank 0."""
    unique = NcclId()
    code = library().ncclGetUniqueId(ctypes.byref(unique))
    if code != 0:
        raise NcclError(f"ncclGetUniqueId gave {code}")
    return bytes(unique)
