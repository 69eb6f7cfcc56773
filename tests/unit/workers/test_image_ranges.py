"""The ranges that clients send for images, compared with vLLM's; without vLLM."""

from types import SimpleNamespace

import numpy as np
import pytest

from titopool.errors import ImageMismatch
from workers.images.ranges import check_ranges

# As for Gemma 3: a marker, two tokens that the image replaces around a line feed, a marker.
MARKED = SimpleNamespace(offset=1, length=5, is_embed=np.array([False, True, False, True, False]))
PLAIN = SimpleNamespace(offset=8, length=3, is_embed=None)
IDS = bytes(4 * 12)


def check(*ranges: tuple[int, int], sent: bytes = IDS) -> None:
    check_ranges(sent, ranges, IDS, [MARKED, PLAIN])


@pytest.mark.parametrize("first", [(1, 5), (2, 3), (1, 4), (2, 4)])
def test_a_range_may_leave_out_the_tokens_around_an_image(first):
    check(first, (8, 3))


@pytest.mark.parametrize(
    "ranges, part",
    [
        ([(0, 5), (8, 3)], "image 0 at offset 1 with 5 tokens"),
        ([(1, 6), (8, 3)], "got offset 1 and length 6"),
        ([(3, 2), (8, 3)], "image 0"),
        ([(2, 2), (8, 3)], "image 0"),
        ([(1, 5), (8, 2)], "image 1 at offset 8 with 3 tokens"),
        ([(1, 5), (9, 2)], "image 1"),
        ([(8, 3), (1, 5)], "image 0"),
    ],
)
def test_a_range_of_other_tokens_is_refused(ranges, part):
    with pytest.raises(ImageMismatch, match=part):
        check(*ranges)


def test_ids_that_were_not_expanded_are_refused():
    with pytest.raises(ImageMismatch, match=r"12 tokens.*got 7 tokens with single"):
        check((1, 5), (8, 3), sent=bytes(4 * 7))
