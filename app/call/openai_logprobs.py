"""Log-probabilities in OpenAI's shapes for completions and chats, and vLLM's for ids and prompts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, repeat
from typing import Any

import numpy as np

from app.call.token_texts import TextLookup, TokenTexts
from app.outputs.json_parts import Rows, as_lists
from app.outputs.token_arrays import prompt_rows, sampled_logprobs
from app.time_slices import sharing_time
from titopool.wire.messages import ID_BYTES, Completed, Completion, Logprobs

# vLLM's server writes this for -inf, which JSON does not have.
LEAST = -9999.0
# As Python's objects they take 36 bytes each.
NUMBERS_AT_ONCE = 8192


def of_completion(
    completion: Completion, texts: TokenTexts, k: int, before: Sequence[int] = (), offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions.

    Args:
        k: the number of alternatives at each token.
        before: in a stream, the choice's last ids before this chunk.
        offset: in a stream, the number of characters before this chunk.
    """
    lookup, begin = texts.of_completion(completion, before), len(before)

    def shown() -> Iterator[str]:
        ids = np.frombuffer(completion.token_ids, np.int32)
        return (lookup.shown(end, one) for end, one in enumerate(numbers(ids), begin))

    def best() -> Iterator[dict[str, float]]:
        for end, (token_id, entries) in enumerate(positions(completion), begin):
            # The sampled token comes first.
            kept = list(({token_id: entries[token_id]} | entries).items())[: k + 1]
            yield _by_text(lookup, end, kept)

    sampled = numbers(sampled_logprobs(completion))
    lengths = map(len, shown())
    return {
        "tokens": Rows(shown()),
        "token_logprobs": Rows(map(finite, sampled)),
        "top_logprobs": Rows(best()),
        "text_offset": Rows(islice(accumulate(lengths, initial=offset), num_tokens_of(completion))),
    }


def _by_text(
    lookup: TextLookup, end: int, entries: Iterable[tuple[int, float]]
) -> dict[str, float]:
    """Values by the tokens' texts; of tokens with one text, those after the first have their ids."""
    found: dict[str, float] = {}
    for token_id, value in entries:
        text = lookup.shown(end, token_id)
        found[f"token_id:{token_id}" if text in found else text] = finite(value)
    return found


def of_echo(
    result: Completed, prompt_ids: np.ndarray, location: str, k: int, texts: TokenTexts
) -> dict[str, list[Any]]:
    """`logprobs` of a prompt before those of a choice of /v1/completions; null at the first token.

    Raises:
        GenerationFailed: as `prompt_rows`.
    """
    rows = prompt_rows(result, location, num_tokens=len(prompt_ids), k=k)
    counts = np.full(len(rows.values), k + 1, np.int32)
    packed = Logprobs(rows.values.tobytes(), rows.token_ids.tobytes(), counts.tobytes())
    # The first token has no value; 0 stands for it until here.
    zero = Logprobs(np.zeros(1, np.float32).tobytes())
    first = as_lists(of_completion(Completion(prompt_ids[:1].tobytes(), "", zero, []), texts, 0))
    first |= {"token_logprobs": [None], "top_logprobs": [None]}
    others = Completion(prompt_ids[1:].tobytes(), "", packed, [])
    offset = len(first["tokens"][0])
    rest = as_lists(of_completion(others, texts, k, prompt_ids[:1].tolist(), offset))
    return {name: first[name] + rest[name] for name in first}


def of_chat(
    completion: Completion, texts: TokenTexts, k: int, before: Sequence[int] = ()
) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions; arguments as of `of_completion`."""
    lookup = texts.of_completion(completion, before)

    def content() -> Iterator[dict[str, Any]]:
        for end, (token_id, entries) in enumerate(positions(completion), len(before)):
            sampled = _entry(lookup, end, token_id, entries[token_id])
            # The bytes of the text, also where `token` is `token_id:<id>`.
            sampled["bytes"] = list(lookup.text(end, token_id).encode())
            best = [_entry(lookup, end, one, value) for one, value in list(entries.items())[:k]]
            yield sampled | {"top_logprobs": best}

    return {"content": Rows(content())}


def of_ids(completion: Completion, k: int | None) -> dict[str, Any]:
    """`logprobs` of a choice of /inference/v1/generate: each token by its text form and its id.

    Clients read `token` and `bytes`, as vLLM sent them up to 0.31, or `token_id` and `rank`, as it
    sends them from 0.32 on.

    Args:
        k: the number of best tokens in `top_logprobs`, -1: all. None: all entries, those of
            `logprob_token_ids`, whose ranks are not known.
    """
    end = None if k == -1 else k
    packed = completion.logprobs or Logprobs(b"")
    ranks: Iterable[int | None] = numbers(np.frombuffer(packed.ranks, np.int32))
    if not packed.ranks:
        ranks = repeat(None, num_tokens_of(completion))

    def content() -> Iterator[dict[str, Any]]:
        for (token_id, entries), own_rank in zip(positions(completion), ranks, strict=True):
            best = [
                _id_entry(one, value, None if k is None else rank)
                for rank, (one, value) in enumerate(islice(entries.items(), end), 1)
            ]
            yield _id_entry(token_id, entries[token_id], own_rank) | {"top_logprobs": best}

    return {"content": Rows(content())}


def of_prompt(
    result: Completed, prompt_ids: np.ndarray, location: str, k: int, texts: TokenTexts | None
) -> Rows:
    """vLLM's `prompt_logprobs`: at each token, itself and the best `k`; null at the first token.

    Clients take the first entry for the token itself. Without `texts`, `decoded_token` is null.

    Raises:
        GenerationFailed: as `prompt_rows`.
    """
    rows = prompt_rows(result, location, num_tokens=len(prompt_ids), k=k)
    lookup = texts and texts.of_prompt(result, prompt_ids, k + 1)

    def shown() -> Iterator[dict[str, Any] | None]:
        if len(prompt_ids):
            yield None
        columns = zip(*map(numbers, (rows.token_ids, rows.values, rows.ranks)), strict=True)
        for end, (ids, values, ranks) in enumerate(sharing_time(columns), 1):
            yield {
                str(token_id): {
                    "logprob": finite(value),
                    "rank": rank,
                    "decoded_token": lookup and lookup.text(end, token_id),
                }
                for token_id, value, rank in zip(ids, values, ranks, strict=True)
            }

    return Rows(shown())


def numbers(array: np.ndarray) -> Iterator[Any]:
    """The rows of an array as Python's numbers or lists of them, not all of them at once."""
    num_rows = max(1, NUMBERS_AT_ONCE // max(1, array[:1].size))
    for begin in sharing_time(range(0, len(array), num_rows)):
        yield from array[begin : begin + num_rows].tolist()


def num_tokens_of(completion: Completion) -> int:
    """The number of a completion's tokens."""
    return len(completion.token_ids) // ID_BYTES


def positions(completion: Completion) -> Iterable[tuple[int, dict[int, float]]]:
    """Each sampled id with the log-probabilities at its position by token id, best first.

    Other greenlets run in between.
    """
    packed = completion.logprobs or Logprobs(b"")
    sampled = np.frombuffer(completion.token_ids, np.int32)
    # All of Python's numbers of many positions at once: an array for each position takes twice as long.
    ids = numbers(np.frombuffer(packed.token_ids, np.int32) if packed.token_ids else sampled)
    values = numbers(np.frombuffer(packed.values, np.float32))
    counts = numbers(np.frombuffer(packed.counts, np.int32)) if packed.counts else repeat(1)
    for token_id, count in sharing_time(zip(numbers(sampled), counts, strict=False)):
        yield token_id, dict(zip(islice(ids, count), islice(values, count), strict=True))


def _entry(lookup: TextLookup, end: int, token_id: int, value: float) -> dict[str, Any]:
    token = lookup.shown(end, token_id)
    return {"token": token, "logprob": finite(value), "bytes": list(token.encode())}


def _id_entry(token_id: int, value: float, rank: int | None) -> dict[str, Any]:
    return {
        "token": f"token_id:{token_id}", "token_id": token_id, "logprob": finite(value),
        "rank": rank, "bytes": None,
    }  # fmt: skip


def finite(value: float) -> float:
    """`value` as JSON can write it; NaN and -inf become LEAST."""
    return value if value >= LEAST else LEAST
