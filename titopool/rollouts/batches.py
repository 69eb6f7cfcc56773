"""Padded batches as GRPO takes them: prompts padded on the left, completions on the right."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from titopool.conversations.interface import Ids
from titopool.rollouts.sequence import NO_VERSION, Array, RolloutArrays


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """B sequences. A row is its prompt (P wide) and what follows it (C wide).

    The prompt ends before the first token that the model wrote; later turns of tools and users
    belong to the completion, where `loss_mask` leaves them out.
    """

    # [B, P] int32, padded on the left, and [B, P] int8: 1 where a token is.
    prompt_ids: Array
    prompt_mask: Array
    # [B, C] int32, padded on the right, and [B, C] int8: 1 where a token is.
    completion_ids: Array
    completion_mask: Array
    # [B, C] int8: 1 where the model wrote the token.
    loss_mask: Array
    # [B, C] float32: of the sampler; 0 where `loss_mask` is 0.
    logprobs: Array
    # [B, C] int64: -1 where `loss_mask` is 0.
    weight_versions: Array
    # [B] bool: the completion was cut to `max_completion_tokens`.
    is_cut: Array
    # [B]: files in base64.
    images: tuple[tuple[str, ...], ...]
    # [B]: int32 [images, 2], offset in `input_ids` and length of each image; None: not known.
    image_ranges: tuple[Array | None, ...]

    @property
    def input_ids(self) -> Array:
        """[B, P + C] int32, for a forward pass."""
        return np.concatenate([self.prompt_ids, self.completion_ids], axis=1)

    @property
    def attention_mask(self) -> Array:
        """[B, P + C] int8."""
        return np.concatenate([self.prompt_mask, self.completion_mask], axis=1)

    def ids_of(self, row: int) -> Ids:
        """A row without padding."""
        ids: Ids = self.input_ids[row][self.attention_mask[row] == 1]
        return ids


def pad_rollouts(
    rollouts: Iterable[RolloutArrays], pad_id: int, *, max_completion_tokens: int | None = None
) -> TokenBatch:
    """A batch of sequences, in their order.

    Args:
        pad_id: fills the places without a token; any id will do, as the masks are 0 there.
        max_completion_tokens: cuts longer completions at their end, and marks them (`is_cut`).

    Raises:
        ValueError: an image lies in what would be cut.
    """
    rows = list(rollouts)
    most = max_completion_tokens
    prompts = [row.prompt_length for row in rows]
    ends = [
        len(row.ids) if most is None else min(len(row.ids), length + most)
        for row, length in zip(rows, prompts, strict=True)
    ]
    for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
        if end < len(row.ids) and row.images and not _ends_before(row.image_ranges, end):
            raise ValueError(
                f"max_completion_tokens: expected no image in what is cut, got one in row {index}; "
                "raise it, or leave the row out"
            )
    width = max(prompts, default=0)

    def right(name: str, fill: float) -> Array:
        values = [getattr(row, name) for row in rows]
        tails = [v[a:b] for v, a, b in zip(values, prompts, ends, strict=True)]
        return _padded(tails, fill, is_left=False)

    heads = [row.ids[:length] for row, length in zip(rows, prompts, strict=True)]
    marks = [row.attention_mask[:length] for row, length in zip(rows, prompts, strict=True)]
    return TokenBatch(
        prompt_ids=_padded(heads, pad_id, is_left=True),
        prompt_mask=_padded(marks, 0, is_left=True),
        completion_ids=right("ids", pad_id),
        completion_mask=right("attention_mask", 0),
        loss_mask=right("loss_mask", 0),
        logprobs=right("logprobs", 0),
        weight_versions=right("weight_versions", NO_VERSION),
        is_cut=np.array(
            [end < len(row.ids) for row, end in zip(rows, ends, strict=True)], dtype=bool
        ),
        images=tuple(row.images for row in rows),
        image_ranges=tuple(
            None
            if row.image_ranges is None
            else row.image_ranges + np.array([width - length, 0], np.int32)
            for row, length in zip(rows, prompts, strict=True)
        ),
    )


def _ends_before(ranges: Array | None, end: int) -> bool:
    return ranges is not None and bool((ranges.sum(axis=1) <= end).all())


def _padded(rows: Sequence[Array], fill: float, *, is_left: bool) -> Array:
    """[rows, width of the longest], of the rows' type."""
    width = max((len(row) for row in rows), default=0)
    padded = np.full((len(rows), width), fill, rows[0].dtype if rows else np.int32)
    for index, row in enumerate(rows):
        start = width - len(row) if is_left else 0
        padded[index, start : start + len(row)] = row
    return padded
