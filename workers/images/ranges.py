"""Compares where a client says that images stand in a prompt with where they stand."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from titopool.errors import ImageMismatch


def check_ranges(
    prompt_token_ids: bytes,
    image_ranges: Sequence[tuple[int, int]],
    token_ids: bytes,
    places: Sequence[Any],
) -> None:
    """Refuses `image_ranges` that are not those of the expanded images.

    A client may count the tokens around an image's own (`<|vision_start|>`, line feeds) or not: a
    range lies within vLLM's and covers all tokens that the image replaces.

    Args:
        prompt_token_ids: as the client sent them, int32.
        token_ids: the prompt with expanded placeholders, int32.
        places: vLLM's PlaceholderRange of each image in these ids.

    Raises:
        ImageMismatch: a range is another one, or the client's ids are not expanded.
    """
    for number, ((offset, length), place) in enumerate(zip(image_ranges, places, strict=True)):
        first, end = _replaced(place)
        place_end = place.offset + place.length
        if not place.offset <= offset <= first < end <= offset + length <= place_end:
            raise ImageMismatch(
                f"expected image {number} at offset {place.offset} with {place.length} tokens, as "
                f"its size needs, got offset {offset} and length {length} in "
                "features.mm_placeholders; send the range of its placeholders in token_ids",
                param="features",
            )
    if token_ids != prompt_token_ids:
        raise ImageMismatch(
            f"expected ids with all placeholders of the {len(places)} images "
            f"({len(token_ids) // 4} tokens), got {len(prompt_token_ids) // 4} tokens with single "
            "placeholders; send features with expanded ids, or content_parts instead",
            param="features",
        )


def _replaced(place: Any) -> tuple[int, int]:
    """The first token that the image replaces, and the one after its last."""
    if place.is_embed is None:
        return place.offset, place.offset + place.length
    found = np.flatnonzero(np.asarray(place.is_embed))
    return place.offset + int(found[0]), place.offset + int(found[-1]) + 1
