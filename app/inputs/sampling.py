"""From a TRL body's fields to checked sampling options."""

import logging
from typing import Any

from app.schemas.decoding import convert
from app.schemas.generation import SAMPLING_FIELDS, SamplingBody
from titopool.errors import AnswerTooLarge, InvalidRequest
from titopool.settings.sampling import (
    SERVER_SET_FIELDS,
    UNSUPPORTED_FIELDS,
    SamplingOptions,
    check_sampling,
)
from titopool.wire.messages import ID_BYTES, WorkerFacts

logger = logging.getLogger(__name__)

# A log-probability in a worker's result: a float32, and the id of its token.
ENTRY_BYTES = 4 + ID_BYTES
RANK_BYTES = 4
# In the worker, while the completion runs: value, id and rank.
WORKER_ENTRY_BYTES = ENTRY_BYTES + RANK_BYTES
# Four characters of a token, on average, two bytes each.
TEXT_BYTES = 8


def sampling_options(body: SamplingBody, facts: WorkerFacts) -> SamplingOptions:
    """The body's sampling options; `generation_kwargs` override fields of the same name.

    Raises:
        InvalidRequest: an option is unknown, set by the server, or out of range.
    """
    merged: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING_FIELDS}
    for name, value in body.generation_kwargs.items():
        if reason := SERVER_SET_FIELDS.get(name) or UNSUPPORTED_FIELDS.get(name):
            raise InvalidRequest(
                f"generation_kwargs.{name}: expected no value, got one: {reason}", param=name
            )
        merged[name] = value
    if body.structured_outputs_regex is not None:
        if merged.get("structured_outputs") is not None:
            logger.warning("structured_outputs_regex replaces generation_kwargs.structured_outputs")
        merged["structured_outputs"] = {"regex": body.structured_outputs_regex}
    options = convert(merged, SamplingOptions)
    try:
        check_sampling(options, facts)
    except InvalidRequest as error:
        if body.structured_outputs_regex is None or error.param != "structured_outputs":
            raise
        # Name the field that the client sent.
        field = "structured_outputs_regex"
        message = error.message.removeprefix("structured_outputs")
        raise InvalidRequest(f"{field}{message}", param=field) from None
    return options


def check_raw_logprobs(body: SamplingBody, options: SamplingOptions, facts: WorkerFacts) -> None:
    """Refuses `raw_logprobs` that the answer would not have."""
    if not body.raw_logprobs:
        return
    if not facts.has_raw_logprobs:
        raise InvalidRequest(
            "raw_logprobs: expected false, because the server does not compute them, got true; start "
            "it with --raw-logprobs",
            param="raw_logprobs",
        )
    if options.logprobs is None:
        raise InvalidRequest(
            "raw_logprobs: expected logprobs of 0 or more with it, got null", param="raw_logprobs"
        )


def check_num_completions(num_prompts: int, n: int, limit: int, field: str = "prompts") -> None:
    """Refuses a request for more completions than `limit` (`max_completions_per_request`)."""
    if num_prompts * n > limit:
        raise InvalidRequest(
            f"{field}: expected at most {limit} completions in a request "
            f"(max_completions_per_request), got {num_prompts} prompts times n = {n}; send several "
            "requests",
            param=field,
        )


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
