"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from app.replies import nested_logprobs
from titopool.messages import Completion

# JSON has no infinity; vLLM's server writes this for it.
LEAST = -9999.0


class TokenTexts:
    """The text of single tokens; made for all ids of an answer at once."""

    def __init__(self, texts: dict[int, str], *, as_ids: bool):
        self._texts = texts
        self._as_ids = as_ids

    def __getitem__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._texts[token_id]


def ids_to_decode(completions: Iterable[Completion]) -> list[int]:
    """Every id that the log-probabilities of an answer name."""
    found: set[int] = set()
    for one in completions:
        if one.logprobs is not None:
            ids = one.logprobs.token_ids or one.token_ids
            found.update(np.unique(np.frombuffer(ids, np.int32)).tolist())
    return sorted(found)


def decode_each(tokenizer: Any, ids: list[int]) -> dict[int, str]:
    return {token_id: tokenizer.decode([token_id]) for token_id in ids}


def of_completion(completion: Completion, texts: TokenTexts, k: int) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions."""
    tokens, values, best, offsets, offset = [], [], [], [], 0
    for token_id, entries in _positions(completion):
        token = texts[token_id]
        tokens.append(token)
        values.append(_value(entries[token_id]))
        kept = list(entries.items())[: max(k, 1)]
        best.append(
            {texts[one]: _value(value) for one, value in (*kept, (token_id, entries[token_id]))}
        )
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets,
    }  # fmt: skip


def of_chat(completion: Completion, texts: TokenTexts, k: int) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""
    content = []
    for token_id, entries in _positions(completion):
        content.append(
            {
                **_entry(texts[token_id], entries[token_id]),
                "top_logprobs": [
                    _entry(texts[one], value) for one, value in list(entries.items())[:k]
                ],
            }
        )
    return {"content": content}


def _positions(completion: Completion) -> Iterable[tuple[int, dict[int, float]]]:
    """Each sampled id with its entries, best first."""
    values, ids = nested_logprobs(completion)
    sampled = np.frombuffer(completion.token_ids, np.int32).tolist()
    for token_id, row_ids, row in zip(sampled, ids, values, strict=True):
        yield token_id, dict(zip(row_ids.tolist(), row.tolist(), strict=True))


def _entry(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": _value(value), "bytes": list(token.encode())}


def _value(value: float) -> float:
    return max(value, LEAST) if value == value else LEAST
