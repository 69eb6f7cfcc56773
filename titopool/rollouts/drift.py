"""Drift: how many tokens change when sampled ids are decoded and tokenized again."""

from difflib import SequenceMatcher
from typing import Any

from titopool.rollouts.interface import Ids


def num_changed(tokenizer: Any, ids: Ids) -> int:
    """How many of `ids` do not come back from `tokenizer` for their text.

    The two lists are aligned as a diff aligns lines.
    """
    ours: list[int] = ids.tolist()
    theirs: list[int] = tokenizer(tokenizer.decode(ours), add_special_tokens=False)["input_ids"]
    if ours == theirs:
        return 0
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    return len(ours) - sum(block.size for block in blocks)
