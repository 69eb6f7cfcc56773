"""What a trainer needs to replay a completion: routed experts and sampling masks, for JSON in parts."""

from collections.abc import Iterator
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np

from app.outputs.json_parts import Base64
from titopool.wire.messages import RoutedExperts, SamplingMask

# Of routed experts, in the array that is encoded at once.
PART_BYTES = 16 * 1024


def experts_json(experts: RoutedExperts | None, form: str | None) -> dict[str, Any] | Base64 | None:
    """An object as renderers, verifiers and prime-rl read it; null for None.

    Args:
        form: "npy" for the form of vLLM's server, an .npy file in base64.
    """
    if experts is None:
        return None
    rows = rows_of(experts)
    if form == "npy":
        head = BytesIO()
        found = np.lib.format.header_data_from_array_1_0(rows)  # type: ignore[no-untyped-call]
        np.lib.format.write_array_header_1_0(head, found)  # type: ignore[no-untyped-call]
        return Base64(chain([head.getvalue()], parts_of(rows)))
    return {
        # First: renderers looks for the bytes `"routed_experts":{"data":"`.
        "data": Base64(parts_of(rows)),
        "shape": experts.shape,
        "start": experts.start,
        "dtype": experts.dtype,
    }


def experts_int32(experts: RoutedExperts, *, start: int, num_rows: int) -> Base64 | None:
    """The form of SGLang's server: base64 of int32, [num_rows, layers, experts of a token].

    Null if there are fewer rows: the prompt was aborted before all of it was computed.

    Args:
        start: the token of the first row, not before that of `experts`.
    """
    wanted = rows_of(experts)[start - experts.start : num_rows + start - experts.start]
    return Base64(parts_of(wanted, np.int32)) if len(wanted) == num_rows else None


def mask_lists(mask: SamplingMask | None) -> Iterator[np.ndarray] | None:
    """The form of vLLM's server: the ids at each position."""
    if mask is None:
        return None
    ids, counts = np.frombuffer(mask.token_ids, np.int32), np.frombuffer(mask.counts, np.int32)
    return (ids[end - num : end] for end, num in zip(counts.cumsum(), counts, strict=True))


def rows_of(experts: RoutedExperts) -> np.ndarray:
    """[rows, layers, experts of a token]"""
    return np.frombuffer(experts.data, experts.dtype).reshape(experts.shape)


def parts_of(rows: np.ndarray, dtype: Any = None) -> Iterator[bytes]:
    """The bytes of `rows`, in C order, with items of `dtype` instead of their own."""
    flat = rows.reshape(-1)
    step = PART_BYTES // flat.itemsize
    return (
        flat[begin : begin + step].astype(dtype or flat.dtype).tobytes()
        for begin in range(0, len(flat), step)
    )
