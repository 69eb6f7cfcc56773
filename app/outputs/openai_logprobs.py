"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from app.outputs.token_arrays import nested_logprobs, prompt_rows
from app.outputs.token_texts import TextsAt, TokenTexts
from titopool.wire.messages import Completed, Completion

# JSON has no infinity; vLLM's server writes this for it.
LEAST = -9999.0


def of_completion(
    completion: Completion, texts: TokenTexts, k: int, before: Sequence[int] = (), offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions.

    Args:
        before: the last ids of the choice before this piece of it.
        offset: that of its first character.
    """
    at = texts.of_completion(completion, before)
    tokens, values, best, offsets = [], [], [], []
    for end, (token_id, entries) in enumerate(_positions(completion), len(before)):
        token = at.shown(end, token_id)
        tokens.append(token)
        values.append(_value(entries[token_id]))
        # The sampled one first: where two have one text, the last counts, as in vLLM's server.
        kept = list(({token_id: entries[token_id]} | entries).items())[: k + 1]
        best.append({at.shown(end, one): _value(value) for one, value in kept})
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets,
    }  # fmt: skip


def of_chat(
    completion: Completion, texts: TokenTexts, k: int, before: Sequence[int] = ()
) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions; `before` as above."""
    at = texts.of_completion(completion, before)
    content = []
    for end, (token_id, entries) in enumerate(_positions(completion), len(before)):
        sampled = _entry(at, end, token_id, entries[token_id])
        # Those of its text, whatever stands for it.
        sampled["bytes"] = list(at.text(end, token_id).encode())
        best = [_entry(at, end, one, value) for one, value in list(entries.items())[:k]]
        content.append(sampled | {"top_logprobs": best})
    return {"content": content}


def of_prompt(
    result: Completed, prompt_ids: np.ndarray, location: str, k: int, texts: TokenTexts
) -> list[Any]:
    """vLLM's `prompt_logprobs`: at each token its own and the best `k`; none at the first."""
    rows = prompt_rows(result, location, num_tokens=len(prompt_ids), k=k)
    values, ids, ranks = (array.tolist() for array in rows)
    at = texts.of_prompt(result, prompt_ids, k + 1)
    positions: list[Any] = [
        {
            str(token_id): {
                "logprob": _value(value),
                "rank": rank,
                "decoded_token": at.text(end, int(token_id)),
            }
            for token_id, value, rank in zip(*row, strict=True)
        }
        for end, row in enumerate(zip(ids, values, ranks, strict=True), 1)
    ]
    return [None, *positions] if len(prompt_ids) else []


def _positions(completion: Completion) -> Iterable[tuple[int, dict[int, float]]]:
    """Each sampled id with its entries, best first."""
    values, ids = nested_logprobs(completion)
    sampled = np.frombuffer(completion.token_ids, np.int32).tolist()
    for token_id, row_ids, row in zip(sampled, ids, values, strict=True):
        yield token_id, dict(zip(row_ids.tolist(), row.tolist(), strict=True))


def _entry(at: TextsAt, end: int, token_id: int, value: float) -> dict[str, Any]:
    token = at.shown(end, token_id)
    return {"token": token, "logprob": _value(value), "bytes": list(token.encode())}


def _value(value: float) -> float:
    return max(value, LEAST) if value == value else LEAST
