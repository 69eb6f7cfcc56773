"""The text of single tokens, as log-probabilities show it.

The bytes of one character may be spread over several tokens. As in vLLM's server, the token that
completes the character is shown with the whole character, and the tokens before it with no text.
Decoders of SentencePiece drop the space with which a text begins, so a token is decoded after
another one. So the shown tokens of a completion add up to its text.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import starmap
from typing import Any, TypeVar

import numpy as np

from app.call.call import Call
from app.time_slices import sharing_time
from titopool.wire.messages import Completed, Completion

# What a tokenizer decodes an incomplete character to.
REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most this many tokens before one share its character.
MAX_BEFORE = 4
# Calls of `decode`, about 10 µs each, that are made without a change to the tokenizer's thread.
MAX_CALLS = 16
# Ids that are looked through without a pause.
NAMED_AT_ONCE = 2**15
# A token alone takes so many, and one in its context so many at most.
CALLS_ALONE = 2
CALLS_IN_CONTEXT = 2 * MAX_BEFORE + 1
# The text of the token that others are decoded after.
ANCHOR = "a"
# A token id with the ids before it, at most MAX_BEFORE, that its text may depend on.
TokenInContext = tuple[tuple[int, ...], int]
Token = TypeVar("Token", int, TokenInContext)


class TextLookup:
    """The texts of all token ids that the log-probabilities of one sequence name."""

    def __init__(self, token_texts: dict[int, str], ids: Sequence[int], *, as_ids: bool):
        # Texts of tokens decoded without their context, by id.
        self._token_texts = token_texts
        # The sequence up to its last position.
        self._ids = ids
        self._as_ids = as_ids
        # Texts of the tokens that, decoded without it, end within a character.
        self.texts_in_context: dict[TokenInContext, str] = {}

    def in_context(self, end: int, token_id: int) -> TokenInContext:
        """`token_id` after the first `end` ids of the sequence."""
        return tuple(self._ids[max(0, end - MAX_BEFORE) : end]), token_id

    def text(self, end: int, token_id: int) -> str:
        """The text that `token_id` adds after the first `end` ids."""
        text = self._token_texts[token_id]
        if text.endswith(REPLACEMENT):
            return self.texts_in_context[self.in_context(end, token_id)]
        return text

    def shown(self, end: int, token_id: int) -> str:
        """The text, or `token_id:<id>` with `return_tokens_as_token_ids`."""
        return f"token_id:{token_id}" if self._as_ids else self.text(end, token_id)


class TokenTexts:
    """Decodes the tokens of a request's log-probabilities, many in one call of the tokenizer."""

    def __init__(self, call: Call, *, as_ids: bool, needs_texts: bool = True):
        """Loads the tokenizer, so that a failure comes before the generation.

        Args:
            as_ids: show each token as `token_id:<id>`.
            needs_texts: False if the response shows ids only: the tokenizer is not loaded.

        Raises:
            NoReadyWorker: the tokenizer cannot be loaded, or not in time.
        """
        self._call = call
        self._as_ids = as_ids
        self._needs_texts = needs_texts
        if needs_texts:
            call.tokenizer.prepare(call.facts, timeout_s=call.deadline.left_s)

    def of_completion(self, completion: Completion, before: Sequence[int] = ()) -> TextLookup:
        """The texts for the log-probabilities of a completion or a chunk of one.

        Args:
            before: the completion's last ids before this chunk, at most MAX_BEFORE. Positions
                of the lookup count from the first of them.
        """
        ids = np.frombuffer(completion.token_ids, np.int32).tolist()
        packed = completion.logprobs
        named = packed.token_ids or completion.token_ids if packed else b""
        counts = np.frombuffer(packed.counts, np.int32) if packed and packed.counts else 1
        return self._look_up([*before, *ids], len(before), named, counts)

    def of_prompt(self, result: Completed, prompt_ids: np.ndarray, num_entries: int) -> TextLookup:
        """The texts for the log-probabilities of a prompt, which begin at its second token."""
        named = result.prompt_logprobs.token_ids if result.prompt_logprobs else b""
        return self._look_up(prompt_ids.tolist(), 1, named, num_entries)

    def _look_up(
        self, ids: list[int], first: int, named: bytes, counts: np.ndarray | int
    ) -> TextLookup:
        """Texts for `ids`.

        Args:
            named: int32 ids of the positions from `first` on, one position after the other.
            counts: how many of them belong to each position.
        """
        known = self._call.tokenizer.token_texts
        lookup = TextLookup(known, ids, as_ids=self._as_ids)
        if not self._needs_texts:
            return lookup
        all_named = np.frombuffer(named, np.int32)
        parts = [slice(at, at + NAMED_AT_ONCE) for at in range(0, len(all_named), NAMED_AT_ONCE)]
        unique = set[int]()
        for part in sharing_time(parts):
            unique.update(np.unique(all_named[part]).tolist())
        if new := unique.difference(known):
            known.update(self._use_tokenizer(decode_alone, new, CALLS_ALONE))
        incomplete = [one for one in unique if known[one].endswith(REPLACEMENT)]
        if incomplete:
            ends = np.repeat(np.arange(first, len(ids)), counts)
            tokens = set[TokenInContext]()
            for part in sharing_time(parts):
                is_incomplete = np.isin(all_named[part], incomplete)
                found = ends[part][is_incomplete].tolist(), all_named[part][is_incomplete].tolist()
                tokens.update(starmap(lookup.in_context, zip(*found, strict=True)))
            lookup.texts_in_context = self._use_tokenizer(
                decode_in_context, tokens, CALLS_IN_CONTEXT
            )
        return lookup

    def _use_tokenizer(
        self, decode: Callable[..., dict[Token, str]], tokens: Collection[Token], num_calls: int
    ) -> dict[Token, str]:
        call = self._call
        # The results are there. An answer whose client reads slowly is written after the request's
        # deadline too, and its writer notices a client that has left.
        return call.tokenizer.use(
            decode, tokens,
            facts=call.facts,
            timeout_s=max(call.deadline.left_s, call.config.client_timeout_s),
            is_short=len(tokens) * num_calls <= MAX_CALLS,
        )  # fmt: skip


def decode_alone(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """The text of each token without its context, with the space that begins it."""
    anchor = tokenizer(ANCHOR, add_special_tokens=False)["input_ids"][-1:]
    before = tokenizer.decode(anchor)
    return {token_id: _text_after(tokenizer, anchor, before, token_id) for token_id in ids}


def _text_after(tokenizer: Any, anchor: list[int], before: str, token_id: int) -> str:
    alone: str = tokenizer.decode([token_id])
    text: str = tokenizer.decode([*anchor, token_id])
    added = text.removeprefix(before)
    # A decoder may separate special tokens from the text before them, or compose characters.
    only_spaces = text.startswith(before) and added.lstrip(" ") == alone.lstrip(" ")
    return added if only_spaces and token_id not in tokenizer.all_special_ids else alone


def decode_in_context(
    tokenizer: Any, tokens: Iterable[TokenInContext]
) -> dict[TokenInContext, str]:
    """What each token adds to the text before it; "" if it ends within a character."""
    return {token: _added_text(tokenizer, *token) for token in tokens}


def texts_in_order(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each of `ids` adds to the text of those before it; "" if it ends within a character."""
    alone = decode_alone(tokenizer, set(ids))
    # The text begins without the space of its first token.
    first = [tokenizer.decode(ids[:1])] if ids and not alone[ids[0]].endswith(REPLACEMENT) else []
    return first + [
        _added_text(tokenizer, tuple(ids[max(0, end - MAX_BEFORE) : end]), token_id)
        if alone[token_id].endswith(REPLACEMENT)
        else alone[token_id]
        for end, token_id in enumerate(ids[len(first) :], len(first))
    ]


def _added_text(tokenizer: Any, before: tuple[int, ...], token_id: int) -> str:
    for num in range(1, len(before) + 1):
        used = list(before[-num:])
        text: str = tokenizer.decode([*used, token_id])
        if not text.endswith(REPLACEMENT):
            while used and tokenizer.decode(used[-1:]).endswith(REPLACEMENT):
                # This token is shown with no text.
                used.pop()
            return text.removeprefix(tokenizer.decode(used) if used else "")
    return ""
