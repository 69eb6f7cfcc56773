"""Checked prompts, the jobs that are made of them, and what their results take at most."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from app.call.bounds import (
    ENTRY_BYTES,
    RANK_BYTES,
    TokenIds,
    bytes_of_replay,
    bytes_of_token,
    check_length,
    checked_ids,
)
from app.inputs.images import NO_IMAGES, PromptImages
from app.time_slices import sharing_time
from titopool.errors import AnswerTooLarge, InvalidRequest
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.wire.messages import (
    COMPLETION_BYTES,
    ChatParsing,
    Completed,
    Job,
    WorkerFacts,
    encode,
)
from titopool.wire.prefixes import prompt_hashes

# vLLM's parsers read tools on the event loop of the worker, which sends heartbeats.
MAX_PARSING_BYTES = 1024 * 1024
# Unique in this process; workers distinguish front ends by their sockets.
_job_ids = itertools.count(1)
# Memory of a job without its ids.
JOB_BYTES = 1024
# Of a completion, what is expected at most: most completions end long before `max_tokens`.
EXPECTED_TOKENS = 8192
# A job has five spans, or more. Of a large request the first jobs are traced.
MAX_TRACED_JOBS = 32


class Prompt(NamedTuple):
    """The checked prompt of one job."""

    # int32.
    token_ids: np.ndarray
    # Where the prompt stands in the client's body, e.g. `prompts[3]`.
    location: str
    images: PromptImages = NO_IMAGES
    cache_salt: str | None = None
    # Whether the client sent exactly `token_ids`; only /generate/ sets it.
    sent_as_ids: bool = False
    # The job's own ones; None: as the request's.
    options: SamplingOptions | None = None
    adapter: str | None = None
    client_id: str | None = None


def check_prompt(
    ids: TokenIds,
    location: str,
    facts: WorkerFacts,
    images: PromptImages = NO_IMAGES,
    cache_salt: str | None = None,
) -> Prompt:
    """The prompt of `ids`.

    Raises:
        InvalidRequest: `ids` is empty, or an id is outside the vocabulary.
        PromptTooLong: the prompt leaves no room for a token.
    """
    # Before the ids are visited: there may be millions.
    check_length(len(ids), location, facts.max_model_len)
    token_ids = checked_ids(ids, location, facts.vocab_size)
    return Prompt(token_ids, location, images, cache_salt)


def make_jobs(
    prompts: Sequence[Prompt],
    options: SamplingOptions,
    facts: WorkerFacts,
    *,
    with_prefixes: bool,
    is_streamed: bool = False,
    adapter: str = "",
    chat: ChatParsing | None = None,
    client_id: str = "",
    key_name: str = "",
    traceparent: str = "",
) -> list[Job]:
    """One job for each prompt, in order.

    Args:
        with_prefixes: whether jobs carry the digests of their prompts' blocks for routing.
    """
    sampling = {
        name: msgspec.Raw(encode_sent(encode_options, one, "sampling options", None))
        for name, one in distinct_options(prompts, options).items()
    }
    parsing = (
        b"" if chat is None else encode_sent(encode, chat, "tools, chat_template_kwargs", "tools")
    )
    if len(parsing) > MAX_PARSING_BYTES:
        raise InvalidRequest(
            f"tools, chat_template_kwargs: expected at most {MAX_PARSING_BYTES} bytes together, got "
            f"{len(parsing)}; send fewer or shorter tools",
            param="tools",
        )
    jobs: list[Job] = []
    for prompt in sharing_time(prompts):
        images, num_prompt = prompt.images, len(prompt.token_ids)
        room = facts.max_model_len - num_prompt
        own = prompt.options or options
        max_new = room if own.max_tokens is None else min(room, own.max_tokens)
        token_ids = prompt.token_ids.tobytes()
        prefix = None
        if with_prefixes:
            prefix = prompt_hashes(token_ids, prompt.cache_salt, images.digests, facts.images)
        jobs.append(
            Job(
                job_id=next(_job_ids),
                attempt=1,
                prompt_token_ids=token_ids,
                num_sequences=own.n,
                num_tokens=num_prompt + own.n * max_new,
                sampling=sampling[id(own)],
                cache_salt=prompt.cache_salt,
                prefix=prefix,
                images=images.images,
                mm_processor_kwargs=images.mm_processor_kwargs,
                image_ranges=images.ranges,
                is_streamed=is_streamed,
                chat=parsing,
                adapter=adapter if prompt.adapter is None else prompt.adapter,
                client_id=client_id if prompt.client_id is None else prompt.client_id,
                key_name=key_name,
                traceparent=traceparent if len(jobs) < MAX_TRACED_JOBS else "",
            )
        )
    return jobs


def distinct_options(
    prompts: Sequence[Prompt], options: SamplingOptions
) -> dict[int, SamplingOptions]:
    """By identity: prompts may share long grammars."""
    return {id(one): one for one in (prompt.options or options for prompt in sharing_time(prompts))}


def bounds_of_results(
    prompts: Sequence[Prompt], options: SamplingOptions, facts: WorkerFacts
) -> list[int]:
    """The memory that is expected of the result of each prompt in a front end.

    It is the most that the result takes where completions have at most `EXPECTED_TOKENS`.
    """
    found = []
    for prompt in sharing_time(prompts):
        own, num_prompt = prompt.options or options, len(prompt.token_ids)
        room = max(0, facts.max_model_len - num_prompt)
        num_tokens = room if own.max_tokens is None else min(room, own.max_tokens)
        of_prompt = 0
        if own.prompt_logprobs is not None:
            k = facts.vocab_size if own.prompt_logprobs == -1 else own.prompt_logprobs
            of_prompt = num_prompt * (k + 1) * (ENTRY_BYTES + RANK_BYTES)
        of_token = bytes_of_token(own, facts)
        # With images, the engine's prompt is longer.
        num_run = facts.max_model_len - num_tokens if prompt.images.images else num_prompt
        num_tokens = min(num_tokens, EXPECTED_TOKENS)
        of_replay = bytes_of_replay(own, facts, num_run, num_tokens)
        found.append(of_prompt + own.n * (COMPLETION_BYTES + num_tokens * of_token + of_replay))
    return found


def check_experts(
    prompts: Sequence[Prompt], options: SamplingOptions, facts: WorkerFacts, limit: int
) -> None:
    """Refuses prompts whose own routed experts take more than `limit` bytes (`memory_budget_bytes`).

    Raises:
        AnswerTooLarge: they do, however few tokens are sampled.
    """
    least = 0
    for prompt in sharing_time(prompts if facts.routed_expert_bytes else ()):
        own = prompt.options or options
        least += own.n * bytes_of_replay(own, facts, len(prompt.token_ids), 0)
    if least > limit:
        raise AnswerTooLarge(
            f"expected routed experts of at most {limit} bytes (memory_budget_bytes), got {least} of "
            f"the prompts alone, {facts.routed_expert_bytes} for a token of each completion; ask for "
            "fewer completions in one request, or for those of later tokens only",
            param="n",
        )


def bytes_of_jobs(jobs: Sequence[Job]) -> int:
    """Memory of jobs in a front end: ids and files, and their copies in messages."""
    return sum(
        JOB_BYTES + 3 * len(job.prompt_token_ids) + 2 * sum(len(image.data) for image in job.images)
        for job in jobs
    )


def encode_sent(
    encoder: Callable[[Any], bytes], value: Any, fields: str, param: str | None
) -> bytes:
    """What a client has sent, encoded.

    Raises:
        InvalidRequest: JSON has such values, and `encoder` does not take them.
    """
    try:
        return encoder(value)
    except (OverflowError, RecursionError, TypeError, UnicodeEncodeError) as error:
        raise InvalidRequest(
            f"{fields}: expected numbers of 64 bits at most, valid Unicode and no deep nesting, "
            f"got others ({error}); send other values",
            param=param,
        ) from None


def expanded_ids(prompts: Sequence[Prompt], results: Sequence[Completed]) -> list[np.ndarray]:
    """The ids of each prompt with its image placeholders expanded, as the engine ran them."""
    return [
        np.frombuffer(result.prompt_token_ids, np.int32)
        if result.prompt_token_ids
        else prompt.token_ids
        for prompt, result in zip(prompts, results, strict=True)
    ]
