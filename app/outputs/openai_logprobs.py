"""Log-probabilities in OpenAI's shapes for completions and chats, and vLLM's for ids and prompts."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from app.outputs.token_arrays import prompt_rows
from app.outputs.token_texts import TextLookup, TokenTexts
from app.time_slices import sharing_time
from titopool.wire.messages import Completed, Completion, Logprobs

# vLLM's server writes this for -inf, which JSON does not have.
LEAST = -9999.0


def of_completion(
    completion: Completion, texts: TokenTexts, k: int, before: Sequence[int] = (), offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions.

    Args:
        k: the number of alternatives at each token.
        before: in a stream, the choice's last ids before this chunk.
        offset: in a stream, the number of characters before this chunk.
    """
    lookup = texts.of_completion(completion, before)
    tokens, values, best, offsets = [], [], [], []
    for end, (token_id, entries) in enumerate(positions(completion), len(before)):
        token = lookup.shown(end, token_id)
        tokens.append(token)
        values.append(finite(entries[token_id]))
        # The sampled token comes first.
        kept = list(({token_id: entries[token_id]} | entries).items())[: k + 1]
        best.append(_by_text(lookup, end, kept))
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets,
    }  # fmt: skip


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
    first = of_completion(Completion(prompt_ids[:1].tobytes(), "", zero, []), texts, 0)
    first |= {"token_logprobs": [None], "top_logprobs": [None]}
    others = Completion(prompt_ids[1:].tobytes(), "", packed, [])
    offset = len(first["tokens"][0])
    rest = of_completion(others, texts, k, prompt_ids[:1].tolist(), offset)
    return {name: first[name] + rest[name] for name in first}


def of_chat(
    completion: Completion, texts: TokenTexts, k: int, before: Sequence[int] = ()
) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions; arguments as of `of_completion`."""
    lookup = texts.of_completion(completion, before)
    content = []
    for end, (token_id, entries) in enumerate(positions(completion), len(before)):
        sampled = _entry(lookup, end, token_id, entries[token_id])
        # The bytes of the text, also where `token` is `token_id:<id>`.
        sampled["bytes"] = list(lookup.text(end, token_id).encode())
        best = [_entry(lookup, end, one, value) for one, value in list(entries.items())[:k]]
        content.append(sampled | {"top_logprobs": best})
    return {"content": content}


def of_ids(completion: Completion, k: int | None) -> dict[str, Any]:
    """`logprobs` of a choice of /inference/v1/generate: each token by its text form and its id.

    Clients read `token` and `bytes`, as vLLM sent them up to 0.31, or `token_id` and `rank`, as it
    sends them from 0.32 on.

    Args:
        k: the number of best tokens in `top_logprobs`, -1: all. None: all entries, those of
            `logprob_token_ids`, whose ranks are not known.
    """
    content = []
    end = None if k == -1 else k
    num_tokens = len(completion.token_ids) // 4
    packed = completion.logprobs or Logprobs(b"")
    ranks = np.frombuffer(packed.ranks, np.int32).tolist() or [None] * num_tokens
    for (token_id, entries), own_rank in zip(positions(completion), ranks, strict=True):
        best = [
            _id_entry(one, value, None if k is None else rank)
            for rank, (one, value) in enumerate(islice(entries.items(), end), 1)
        ]
        sampled = _id_entry(token_id, entries[token_id], own_rank)
        sampled["top_logprobs"] = best
        content.append(sampled)
    return {"content": content}


def of_prompt(
    result: Completed, prompt_ids: np.ndarray, location: str, k: int, texts: TokenTexts | None
) -> list[Any]:
    """vLLM's `prompt_logprobs`: at each token, itself and the best `k`; null at the first token.

    Clients take the first entry for the token itself. Without `texts`, `decoded_token` is null.

    Raises:
        GenerationFailed: as `prompt_rows`.
    """
    rows = prompt_rows(result, location, num_tokens=len(prompt_ids), k=k)
    values, ids, ranks = (array.tolist() for array in rows)
    lookup = texts and texts.of_prompt(result, prompt_ids, k + 1)
    shown: list[Any] = [
        {
            str(token_id): {
                "logprob": finite(value),
                "rank": rank,
                "decoded_token": lookup and lookup.text(end, int(token_id)),
            }
            for token_id, value, rank in zip(*row, strict=True)
        }
        for end, row in enumerate(sharing_time(zip(ids, values, ranks, strict=True)), 1)
    ]
    return [None, *shown] if len(prompt_ids) else []


def positions(completion: Completion) -> Iterable[tuple[int, dict[int, float]]]:
    """Each sampled id with the log-probabilities at its position by token id, best first.

    Other greenlets run in between.
    """
    packed = completion.logprobs or Logprobs(b"")
    sampled = np.frombuffer(completion.token_ids, np.int32).tolist()
    # All of Python's numbers at once: an array for each position takes twice as long.
    ids = np.frombuffer(packed.token_ids, np.int32).tolist() or sampled
    values = np.frombuffer(packed.values, np.float32).tolist()
    counts = np.frombuffer(packed.counts, np.int32).tolist() or [1] * len(sampled)
    begin = 0
    for token_id, count in sharing_time(zip(sampled, counts, strict=True)):
        end = begin + count
        yield token_id, dict(zip(ids[begin:end], values[begin:end], strict=True))
        begin = end


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
