"""Log-probabilities in OpenAI's shapes for completions and chats, and vLLM's for prompts."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from app.outputs.token_arrays import nested_logprobs, prompt_rows
from app.outputs.token_texts import TextLookup, TokenTexts
from titopool.wire.messages import Completed, Completion

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
    for end, (token_id, entries) in enumerate(_positions(completion), len(before)):
        token = lookup.shown(end, token_id)
        tokens.append(token)
        values.append(_value(entries[token_id]))
        # The sampled token comes first. Of entries with equal texts the last one wins, as in
        # vLLM's server.
        kept = list(({token_id: entries[token_id]} | entries).items())[: k + 1]
        best.append({lookup.shown(end, one): _value(value) for one, value in kept})
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets,
    }  # fmt: skip


def of_chat(
    completion: Completion, texts: TokenTexts, k: int, before: Sequence[int] = ()
) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions; arguments as of `of_completion`."""
    lookup = texts.of_completion(completion, before)
    content = []
    for end, (token_id, entries) in enumerate(_positions(completion), len(before)):
        sampled = _entry(lookup, end, token_id, entries[token_id])
        # The bytes of the text, also where `token` is `token_id:<id>`.
        sampled["bytes"] = list(lookup.text(end, token_id).encode())
        best = [_entry(lookup, end, one, value) for one, value in list(entries.items())[:k]]
        content.append(sampled | {"top_logprobs": best})
    return {"content": content}


def of_prompt(
    result: Completed, prompt_ids: np.ndarray, location: str, k: int, texts: TokenTexts
) -> list[Any]:
    """vLLM's `prompt_logprobs`: at each token, itself and the best `k`; null at the first token.

    Raises:
        GenerationFailed: as `prompt_rows`.
    """
    rows = prompt_rows(result, location, num_tokens=len(prompt_ids), k=k)
    values, ids, ranks = (array.tolist() for array in rows)
    lookup = texts.of_prompt(result, prompt_ids, k + 1)
    positions: list[Any] = [
        {
            str(token_id): {
                "logprob": _value(value),
                "rank": rank,
                "decoded_token": lookup.text(end, int(token_id)),
            }
            for token_id, value, rank in zip(*row, strict=True)
        }
        for end, row in enumerate(zip(ids, values, ranks, strict=True), 1)
    ]
    return [None, *positions] if len(prompt_ids) else []


def _positions(completion: Completion) -> Iterable[tuple[int, dict[int, float]]]:
    """Each sampled id with the log-probabilities at its position by token id, best first."""
    values, ids = nested_logprobs(completion)
    sampled = np.frombuffer(completion.token_ids, np.int32).tolist()
    for token_id, row_ids, row in zip(sampled, ids, values, strict=True):
        yield token_id, dict(zip(row_ids.tolist(), row.tolist(), strict=True))


def _entry(lookup: TextLookup, end: int, token_id: int, value: float) -> dict[str, Any]:
    token = lookup.shown(end, token_id)
    return {"token": token, "logprob": _value(value), "bytes": list(token.encode())}


def _value(value: float) -> float:
    """`value` as JSON can write it; NaN and -inf become LEAST."""
    return max(value, LEAST) if value == value else LEAST
