"""A prepared prompt as it goes from an image process to the worker: vLLM's serializer, in shared memory.

The memory has the number of buffers, their lengths, then the buffers, each at a multiple of
`ALIGNMENT` bytes. The worker's tensors are views of it, and it is freed with the last of them.
torch and vLLM are imported inside functions, as in `workers/engine/vllm.py`.
"""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

ALIGNMENT = 64


class Refused(msgspec.Struct, tag="refused"):
    """A prompt that is refused; `code` is one of `titopool/errors.py`."""

    code: str
    message: str
    param: str | None = None


@cache
def prepared_type() -> Any:
    """The struct of a prepared prompt.

    `fields` are those of vLLM's MultiModalInput that are plain; the next three are its others.
    """
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    fields: list[tuple[str, Any]] = [
        ("token_ids", bytes),
        ("fields", dict[str, Any]),
        ("mm_kwargs", MultiModalKwargsItems),
        ("mm_hashes", dict[str, list[str]]),
        ("mm_placeholders", dict[str, list[PlaceholderRange]]),
        ("decode_s", float),
        ("elapsed_s", float),
    ]
    return msgspec.defstruct("PreparedPrompt", fields, tag="prepared")


def write_shared(answer: Any) -> int:
    """The descriptor of new shared memory with `answer`: a `Refused` or a `prepared_type()`."""
    from vllm.v1.serial_utils import MsgpackEncoder

    buffers = [memoryview(one).cast("B") for one in MsgpackEncoder().encode(answer)]
    lengths = [one.nbytes for one in buffers]
    places = _places(lengths)
    descriptor = os.memfd_create("titopool-images", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(np.array([len(lengths), *lengths], np.uint64).tobytes())
        for buffer, (begin, _) in zip(buffers, places, strict=True):
            file.seek(begin)
            file.write(buffer)
        # An empty buffer at the end writes nothing.
        file.truncate(places[-1][1])
    return descriptor


def read_shared(descriptor: int) -> tuple[Any, int]:
    """What `write_shared` wrote, and the bytes of its memory; the descriptor may be closed then."""
    import torch
    from vllm.v1.serial_utils import MsgpackDecoder

    size = os.fstat(descriptor).st_size
    # Unlike Python's mmap it keeps no descriptor open.
    mapped = torch.from_file(
        f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8
    ).numpy()
    count = int(mapped[:8].view(np.uint64)[0])
    lengths = mapped[8 : 8 + 8 * count].view(np.uint64).tolist()
    buffers = [mapped[begin:end].data for begin, end in _places(lengths)]
    return MsgpackDecoder(Refused | prepared_type()).decode(buffers), size


def _places(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where each buffer begins and ends."""
    places, end = [], 8 * (1 + len(lengths))
    for length in lengths:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + length
        places.append((begin, end))
    return places
