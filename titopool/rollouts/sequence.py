"""A sequence of token ids in segments: each was written by the model, or by template and client."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from titopool.client.results import Completion
from titopool.conversations.interface import Ids

Array: TypeAlias = NDArray[Any]
# In place of a weight version where the model did not write the token.
NO_VERSION = -1


@dataclass(frozen=True, eq=False)
class Segment:
    """Ids with one author. The model's have log-probabilities and versions."""

    ids: Ids
    # [tokens] float32, and [tokens] int64; None: the model did not write the ids.
    logprobs: Array | None = None
    versions: Array | None = None

    @property
    def is_sampled(self) -> bool:
        return self.logprobs is not None

    def first(self, num: int) -> "Segment":
        """The first ids of what the model wrote."""
        assert self.logprobs is not None
        assert self.versions is not None
        return Segment(self.ids[:num], self.logprobs[:num], self.versions[:num])


def written(ids: Any) -> Segment:
    """A segment that the model did not write.

    Raises:
        ValueError: the ids are not a list of integers from 0 on.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or (len(array) and (array.dtype.kind not in "iu" or array.min() < 0)):
        raise ValueError(f"ids: expected a list of integers from 0 on, got {str(ids)[:60]}")
    return Segment(_frozen(array.astype(np.int32)))


def sampled(completion: Completion) -> Segment:
    """A completion's segment.

    Raises:
        ValueError: the completion has not one log-probability for each id.
    """
    ids = np.asarray(completion.ids, np.int32)
    logprobs = np.asarray(completion.logprobs, np.float32)
    if logprobs.shape != ids.shape:
        raise ValueError(
            f"logprobs: expected one for each of {len(ids)} tokens, got shape {logprobs.shape}; "
            "leave out logprobs=None"
        )
    versions = versions_of(completion.weight_versions, len(ids))
    return Segment(_frozen(ids), _frozen(logprobs), _frozen(versions))


def versions_of(spans: Iterable[tuple[int, int]], num_tokens: int) -> Array:
    """The version of the weights that sampled each token; `spans`: (version, its first token), in order."""
    versions = np.full(num_tokens, NO_VERSION, np.int64)
    for version, first in spans:
        versions[first:] = version
    return versions


def _frozen(array: Array) -> Array:
    """A copy that cannot be written: branches share it."""
    array = array.copy()
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class RolloutArrays:
    """A sequence for a trainer. T is the number of tokens."""

    # [T] int32: everything that was sent and sampled.
    ids: Ids
    # [T] int8: 1 everywhere, as there is no padding.
    attention_mask: Array
    # [T] int8: 1 where the model wrote the token.
    loss_mask: Array
    # [T] float32: of the sampler; 0 where the model did not write the token, so that sums and
    # products with the mask stay finite.
    logprobs: Array
    # [T] int64: version of the weights that sampled the token; -1 where the model did not write it.
    weight_versions: Array
    # Files in base64, in the order of their placeholders.
    images: tuple[str, ...] = ()
    # [images, 2] int32: offset and length of each image's placeholder in `ids`. None: images were
    # added after the last turn.
    image_ranges: Array | None = None
    # How many of the model's tokens another tokenization of its text would change. None: not asked
    # for.
    num_drifted: int | None = None

    @cached_property
    def prompt_length(self) -> int:
        """The number of tokens before the first one that the model wrote."""
        places = np.flatnonzero(self.loss_mask)
        return int(places[0]) if len(places) else len(self.ids)


def arrays_of(
    segments: tuple[Segment, ...],
    images: tuple[str, ...] = (),
    ranges: tuple[tuple[int, int], ...] | None = None,
    tokenizer: Any = None,
) -> RolloutArrays:
    """The segments one after the other.

    Args:
        tokenizer: counts `num_drifted`.
    """
    ids = np.concatenate([one.ids for one in segments] or [np.zeros(0, np.int32)])
    loss_mask = np.zeros(len(ids), np.int8)
    logprobs = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), NO_VERSION, np.int64)
    start = 0
    for one in segments:
        end = start + len(one.ids)
        if one.logprobs is not None and one.versions is not None:
            loss_mask[start:end] = 1
            logprobs[start:end] = one.logprobs
            versions[start:end] = one.versions
        start = end
    has_ranges = ranges is not None and len(ranges) == len(images)
    return RolloutArrays(
        ids=ids,
        attention_mask=np.ones(len(ids), np.int8),
        loss_mask=loss_mask,
        logprobs=logprobs,
        weight_versions=versions,
        images=images,
        image_ranges=np.array(ranges, np.int32).reshape(-1, 2) if has_ranges else None,
        num_drifted=None
        if tokenizer is None
        else sum(_num_changed(tokenizer, one.ids) for one in segments if one.is_sampled),
    )


def _num_changed(tokenizer: Any, ids: Ids) -> int:
    """How many of `ids` do not come back from `tokenizer` for their text.

    The two lists are aligned as a diff aligns lines.
    """
    ours: list[int] = ids.tolist()
    theirs: list[int] = tokenizer(tokenizer.decode(ours), add_special_tokens=False)["input_ids"]
    if ours == theirs:
        return 0
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    return len(ours) - sum(block.size for block in blocks)
