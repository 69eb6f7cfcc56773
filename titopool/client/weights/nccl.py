"""The NCCL calls that a trainer needs to send weights, through ctypes and torch's NCCL library.

Runs in: trainers. Workers use vLLM's binding (`PyNcclCommunicator`). Both sides start in the same
way (`titopool/wire/rendezvous.py`). torch's ProcessGroupNCCL exchanges its ids under keys of its own,
so that it cannot join a communicator of vLLM's.
"""

import ctypes
from typing import Any

from titopool.wire.rendezvous import NCCL_ID_BYTES

# `ncclDataType_t`, by torch's name.
DATATYPES = {
    "int8": 0, "uint8": 1, "bool": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7,
    "float64": 8, "bfloat16": 9,
}  # fmt: skip
FLOAT32, SUM = DATATYPES["float32"], 0


class NcclId(ctypes.Structure):
    """`ncclUniqueId`: the ranks of a communicator find each other by it."""

    _fields_ = (("internal", ctypes.c_byte * NCCL_ID_BYTES),)


class NcclError(Exception):
    """A NCCL call failed; the message is NCCL's."""


class Nccl:
    """One communicator, on one GPU."""

    def __init__(self, *, rank: int, world_size: int, nccl_id: bytes, device: Any):
        """Blocks until all ranks have joined.

        Raises:
            NcclError: NCCL failed.
        """
        import torch

        self._library = library()
        self._device = torch.device(device)
        self._communicator = ctypes.c_void_p()
        unique = NcclId.from_buffer_copy(nccl_id)
        # Restores the trainer's current device.
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
        """Starts to send `buffer`, a contiguous tensor, from rank `source`.

        The caller must not change the buffer until `stream` has run the broadcast.

        Raises:
            NcclError: NCCL failed, or has no such dtype.
        """
        import torch

        name = str(buffer.dtype).removeprefix("torch.")
        if name not in DATATYPES:
            raise NcclError(f"expected a dtype of {', '.join(DATATYPES)}, got {name}; convert it")
        pointer = ctypes.c_void_p(buffer.data_ptr())
        with torch.cuda.device(self._device):
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
            code = self._library.ncclBroadcast(
                pointer, pointer, ctypes.c_size_t(buffer.numel()),
                ctypes.c_int(DATATYPES[name]), ctypes.c_int(source), self._communicator,
                ctypes.c_void_p(self.stream.cuda_stream),
            )  # fmt: skip
        self._check(code)

    def abort(self) -> None:
        """Aborts what is in flight and leaves the communicator."""
        if self._communicator:
            communicator, self._communicator = self._communicator, ctypes.c_void_p()
            self._library.ncclCommAbort(communicator)

    def _check(self, code: int) -> None:
        if code != 0:
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            raise NcclError(self._library.ncclGetErrorString(code).decode())


def library() -> ctypes.CDLL:
    """The NCCL library that torch has loaded.

    Raises:
        NcclError: torch sees no GPU.
        OSError: torch has loaded no NCCL.
    """
    import torch

    if not torch.cuda.is_available():
        raise NcclError("expected a GPU, got none; send from a machine with one, or over gloo")
    # `import torch` loads NCCL under this name.
    return ctypes.CDLL("libnccl.so.2")


def new_id() -> bytes:
    """The id for a new communicator. Rank 0 makes it."""
    unique = NcclId()
    code = library().ncclGetUniqueId(ctypes.byref(unique))
    if code != 0:
        raise NcclError(f"ncclGetUniqueId gave {code}")
    return bytes(unique)
