"""Log-probabilities in OpenAI's two shapes."""

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from app.replies import nested_logprobs
from app.tokenizer import TokenizerLoader
from titopool.messages import Completed, Completion, WorkerFacts

# JSON has no infinity; vLLM's server writes this for it.
LEAST = -9999.0


class TokenTexts:
    """The text of single tokens, looked up in the tokenizer's thread for many at once."""

    def __init__(
        self, tokenizer: TokenizerLoader, facts: WorkerFacts, deadline: float, *, as_ids: bool
    ):
        """With `as_ids`, a token's text is its id. `deadline` is monotonic seconds."""
        self._tokenizer = tokenizer
        self._facts = facts
        self._deadline = deadline
        self._as_ids = as_ids
        # Loaded before anything is generated: it may fail.
        self._learn(set())

    def learn(self, completion: Completion) -> None:
        """Makes the tokens that the log-probabilities of `completion` name known."""
        if completion.logprobs is not None:
            self._learn_array(completion.logprobs.token_ids or completion.token_ids)

    def learn_prompt(self, result: Completed) -> None:
        """The same for those of a prompt."""
        if result.prompt_logprobs is not None:
            self._learn_array(result.prompt_logprobs.token_ids)

    def _learn_array(self, ids: bytes) -> None:
        if not self._as_ids:
            found = np.unique(np.frombuffer(ids, np.int32)).tolist()
            self._learn(set(found) - self._tokenizer.token_texts.keys())

    def _learn(self, ids: set[int]) -> None:
        if ids or not self._as_ids:
            left_s = self._deadline - time.monotonic()
            known = self._tokenizer.use(decode_each, ids, facts=self._facts, timeout_s=left_s)
            self._tokenizer.token_texts.update(known)

    def __getitem__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_texts[token_id]


def decode_each(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """The text of each token by itself."""
    return {token_id: tokenizer.decode([token_id]) for token_id in ids}


def of_completion(
    completion: Completion, texts: TokenTexts, k: int, offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions; `offset` is that of its first character."""
    tokens, values, best, offsets = [], [], [], []
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


def of_prompt(result: Completed, prompt_ids: np.ndarray, k: int, texts: TokenTexts) -> list[Any]:
    """vLLM's `prompt_logprobs`: at each token its own and the best `k`; none at the first."""
    packed = result.prompt_logprobs
    assert packed is not None
    values, ids, ranks = (
        np.frombuffer(array, kind).reshape(-1, k + 1).tolist()
        for array, kind in (
            (packed.values, np.float32),
            (packed.token_ids, np.int32),
            (packed.ranks, np.int32),
        )
    )
    positions: list[Any] = [
        {
            str(token_id): {
                "logprob": _value(value),
                "rank": rank,
                "decoded_token": texts[int(token_id)],
            }
            for token_id, value, rank in zip(*row, strict=True)
        }
        for row in zip(ids, values, ranks, strict=True)
    ]
    return [None, *positions] if len(prompt_ids) else []


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
