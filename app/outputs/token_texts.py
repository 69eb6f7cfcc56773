"""The text of single tokens, as log-probabilities show it.

A letter of several bytes may be spread over tokens. As vLLM's server has it, the token that
ends the letter is shown with all of it and those before with none, so that the tokens of a
completion make up its text.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from app.inputs.admission import Admission
from app.outputs.token_arrays import nested_logprobs
from titopool.wire.messages import Completed, Completion

# What decoding writes for bytes that are no letter.
REPLACEMENT = "\ufffd"
# A letter has four bytes at most: so many tokens before one may belong to it.
MAX_BEFORE = 4
# A token, and those before it that its text may depend on.
Place = tuple[tuple[int, ...], int]


class TextsAt:
    """The texts of the tokens that may stand at the positions of one completion or prompt."""

    def __init__(self, known: dict[int, str], before: Sequence[int], *, as_ids: bool):
        self._known = known
        # All ids up to the last position.
        self._ids = before
        self._as_ids = as_ids
        # Of those that end within a letter by themselves.
        self.mended: dict[Place, str] = {}

    def place(self, end: int, token_id: int) -> Place:
        """Of `token_id` after the first `end` ids."""
        return tuple(self._ids[max(0, end - MAX_BEFORE) : end]), token_id

    def text(self, end: int, token_id: int) -> str:
        """The text of `token_id` after the first `end` ids."""
        text = self._known[token_id]
        return self.mended[self.place(end, token_id)] if text.endswith(REPLACEMENT) else text

    def shown(self, end: int, token_id: int) -> str:
        """The same, or what names the id where that was asked for."""
        return f"token_id:{token_id}" if self._as_ids else self.text(end, token_id)


class TokenTexts:
    """Looks texts up in the tokenizer's thread, for many tokens at once."""

    def __init__(
        self,
        admission: Admission,
        *,
        as_ids: bool,
        needs_texts: bool = True,
    ):
        """With `as_ids`, a token is shown as its id.

        Args:
            needs_texts: False where ids are all that is shown: the tokenizer is not loaded.
        """
        self._admission = admission
        self._as_ids = as_ids
        self._needs_texts = needs_texts
        if needs_texts:
            # Before anything is generated: it may fail.
            admission.tokenizer.prepare(admission.facts, timeout_s=admission.left_s)

    def of_completion(self, completion: Completion, before: Sequence[int] = ()) -> TextsAt:
        """The texts that the log-probabilities of a completion, or a piece of one, name.

        Args:
            before: the last ids of the completion before this piece, MAX_BEFORE at most.
                Positions are counted from their first.
        """
        own = np.frombuffer(completion.token_ids, np.int32).tolist()
        packed = completion.logprobs
        named = packed.token_ids or completion.token_ids if packed else b""
        _, rows = nested_logprobs(completion)
        return self._of([*before, *own], len(before), named, rows)

    def of_prompt(self, result: Completed, prompt_ids: np.ndarray, num_entries: int) -> TextsAt:
        """The same for a prompt, which has none for its first token."""
        named = result.prompt_logprobs.token_ids if result.prompt_logprobs else b""
        rows = np.frombuffer(named, np.int32).reshape(-1, num_entries)
        return self._of(prompt_ids.tolist(), 1, named, rows)

    def _of(self, ids: list[int], first: int, named: bytes, rows: Iterable[np.ndarray]) -> TextsAt:
        known = self._admission.tokenizer.token_texts
        texts = TextsAt(known, ids, as_ids=self._as_ids)
        if self._needs_texts:
            found = np.unique(np.frombuffer(named, np.int32)).tolist()
            if new := [one for one in found if one not in known]:
                known.update(self._admission.use_tokenizer(decode_each, new))
            broken = [one for one in found if known[one].endswith(REPLACEMENT)]
            if broken:
                places = {
                    texts.place(end, token_id)
                    for end, row in enumerate(rows, first)
                    for token_id in row[np.isin(row, broken)].tolist()
                }
                texts.mended = self._admission.use_tokenizer(mend, places)
        return texts


def decode_each(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """The text of each token by itself."""
    return {token_id: tokenizer.decode([token_id]) for token_id in ids}


def mend(tokenizer: Any, places: Iterable[Place]) -> dict[Place, str]:
    """What each token adds to the text before it; "" if it ends within a letter."""
    return {place: _mended(tokenizer, *place) for place in places}


def _mended(tokenizer: Any, before: tuple[int, ...], token_id: int) -> str:
    for num in range(1, len(before) + 1):
        used = list(before[-num:])
        text: str = tokenizer.decode([*used, token_id])
        if not text.endswith(REPLACEMENT):
            while used and tokenizer.decode(used[-1:]).endswith(REPLACEMENT):
                # It was shown with no text.
                used.pop()
            return text.removeprefix(tokenizer.decode(used) if used else "")
    return ""
