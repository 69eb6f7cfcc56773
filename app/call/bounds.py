"""What a request may ask for: token ids, completions, and the memory of their answer."""

import numpy as np

from titopool.errors import AnswerTooLarge, InvalidRequest, PromptTooLong
from titopool.settings.sampling import SamplingOptions, check_token_ids
from titopool.wire.messages import ID_BYTES, WorkerFacts

# As a client sends them, and as long lists are decoded (`app/route/long_lists.py`).
TokenIds = list[int] | np.ndarray


def checked_ids(ids: TokenIds, location: str, vocab_size: int) -> np.ndarray:
    """Token ids as int32 [tokens]; `location` is their location in the client's body.

    Raises:
        InvalidRequest: there are no ids, or an id is outside the vocabulary.
    """
    if not len(ids):
        raise InvalidRequest(
            f"{location}: expected at least one token, got an empty prompt",
            param=location.partition("[")[0],
        )
    # Before the conversion, because an integer may be too large for int32.
    check_token_ids(location, ids, vocab_size)
    return np.asarray(ids, dtype=np.int32)


def check_length(num_tokens: int, location: str, max_model_len: int) -> None:
    """Raises PromptTooLong for a prompt that leaves no room for a generated token."""
    if num_tokens >= max_model_len:
        # verifiers searches for "exceeds the model's context length" and then ends the rollout as
        # too long instead of failed.
        raise PromptTooLong(
            f"{location}: expected at most {max_model_len - 1} tokens, one less than the "
            f"model's {max_model_len} (max_model_len), got {num_tokens}, which exceeds the model's "
            "context length; shorten the prompt or, on a route that takes it, set "
            "truncate_prompt_tokens",
            param=location.partition("[")[0],
        )


# ---- completions and memory ------------------------------------------------------------

# A log-probability in a worker's result: a float32, and the id of its token.
ENTRY_BYTES = 4 + ID_BYTES
RANK_BYTES = 4
# In the worker, while the completion runs: value, id and rank.
WORKER_ENTRY_BYTES = ENTRY_BYTES + RANK_BYTES
# Four characters of a token, on average, two bytes each.
TEXT_BYTES = 8


def bytes_of_token(options: SamplingOptions, facts: WorkerFacts) -> int:
    """The most bytes that a sampled token has in a result."""
    num_bytes = ID_BYTES
    if options.detokenize or options.stop:
        num_bytes += TEXT_BYTES
    if num_entries := options.num_logprobs(facts.vocab_size):
        # Entries, the sampled token's rank, and the number of entries.
        num_bytes += ENTRY_BYTES * num_entries + 2 * RANK_BYTES
        num_bytes += 4 if facts.has_raw_logprobs else 0
    return num_bytes


def bytes_of_replay(
    options: SamplingOptions, facts: WorkerFacts, num_prompt: int, num_tokens: int
) -> int:
    """The most bytes of routed experts and of the sampling mask that a completion has in a result.

    A mask has more ids where several have the `top_k`-th logit.

    Args:
        num_prompt, num_tokens: of the prompt, and of the completion at most.
    """
    start = options.routed_experts_prompt_start
    if start is None:
        return 0
    # The last token has no row.
    num_bytes = max(0, num_prompt + num_tokens - 1 - start) * facts.routed_expert_bytes
    if facts.has_sampling_masks:
        num_ids = min(options.top_k if options.top_k > 0 else facts.vocab_size, facts.vocab_size)
        # The ids at each position, and their number.
        num_bytes += num_tokens * ID_BYTES * (num_ids + 1)
    return num_bytes


def check_answer_size(options: SamplingOptions, facts: WorkerFacts, limit: int) -> None:
    """Refuses completions of a prompt that may take more than `limit` bytes (`memory_budget_bytes`).

    One worker holds them until the last one ends.

    Raises:
        AnswerTooLarge: they may take more.
    """
    num_tokens = min(facts.max_model_len, options.max_tokens or facts.max_model_len)
    num_entries = options.num_logprobs(facts.vocab_size)
    num_bytes = options.n * num_tokens * (ID_BYTES + WORKER_ENTRY_BYTES * num_entries)
    if num_bytes > limit:
        raise AnswerTooLarge(
            f"n, max_tokens, logprobs: expected at most {limit} bytes of completions for a prompt "
            f"(memory_budget_bytes), got up to {num_bytes}: n = {options.n} times {num_tokens} tokens "
            f"with {num_entries} log-probabilities each; ask for fewer of them",
            param="n",
        )
