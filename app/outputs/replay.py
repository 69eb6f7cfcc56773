"""What a trainer needs to replay a completion: routed experts and sampling masks, for JSON."""

from base64 import b64encode
from io import BytesIO
from typing import Any

import numpy as np

from titopool.wire.messages import RoutedExperts, SamplingMask


def experts_json(experts: RoutedExperts | None, form: str | None) -> dict[str, Any] | str | None:
    """An object as renderers, verifiers and prime-rl read it; null for None.

    Args:
        form: "npy" for the form of vLLM's server, an .npy file in base64.
    """
    if experts is None:
        return None
    if form == "npy":
        file = BytesIO()
        np.save(file, np.frombuffer(experts.data, experts.dtype).reshape(experts.shape))
        return b64encode(file.getbuffer()).decode()
    return {
        # First: renderers looks for the bytes `"routed_experts":{"data":"`.
        "data": b64encode(experts.data).decode(),
        "shape": experts.shape,
        "start": experts.start,
        "dtype": experts.dtype,
    }


def experts_int32(experts: RoutedExperts, *, start: int, num_rows: int) -> str | None:
    """The form of SGLang's server: base64 of int32, [num_rows, layers, experts of a token].

    Null if there are fewer rows: the prompt was aborted before all of it was computed.

    Args:
        start: the token of the first row, not before that of `experts`.
    """
    rows = np.frombuffer(experts.data, experts.dtype).reshape(experts.shape)
    wanted = rows[start - experts.start : num_rows + start - experts.start]
    return (
        b64encode(wanted.astype(np.int32).tobytes()).decode() if len(wanted) == num_rows else None
    )


def mask_lists(mask: SamplingMask | None) -> list[list[int]] | None:
    """The form of vLLM's server: the ids at each position."""
    if mask is None:
        return None
    ends = np.frombuffer(mask.counts, np.int32).cumsum()
    rows = np.split(np.frombuffer(mask.token_ids, np.int32), ends)[:-1]
    return [row.tolist() for row in rows]
