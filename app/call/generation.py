"""From checked prompts to results: the steps that all generating routes share.

A route makes `Prompt`s and calls `run_prompts`, which makes one job for each prompt, submits
them to the workers as one `Request` and waits. A route that streams calls `make_request` itself,
then `run_request` or `app.call.streams.stream`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import gevent
import msgspec
import numpy as np
from flask import Response
from flask import request as http_request
from gevent.event import Event

from app.call.admission import Admission
from app.call.bounds import (
    ENTRY_BYTES,
    RANK_BYTES,
    TokenIds,
    bytes_of_replay,
    bytes_of_token,
    check_answer_size,
    check_length,
    checked_ids,
)
from app.call.kept_logprobs import arrays_of
from app.counts.http_requests import current_record
from app.http.connections import client_gone, current_client, watching
from app.http.idempotency import current_claim, refuse_stream
from app.http.responses import respond_in_parts
from app.inputs.images import NO_IMAGES, PromptImages, check_placeholders
from app.outputs.token_arrays import JSON, MSGPACK, binary_reply, is_binary, json_reply
from app.pool.request import Request
from app.time_slices import sharing_time
from titopool.errors import AnswerTooLarge, Conflict, DeadlinePassed, InvalidRequest
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
# How often a request whose client has gone looks whether a repeat has come.
CHECK_REPEAT_S = 0.5


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


def run_prompts(
    admission: Admission,
    prompts: Sequence[Prompt],
    options: SamplingOptions,
    *,
    adapter: str = "",
    chat: ChatParsing | None = None,
    min_weight_version: int | None = None,
) -> list[Completed]:
    """Runs all prompts at the workers and returns their results, in order.

    Args:
        adapter: the name of a LoRA adapter; "" for the base model.
        chat: what vLLM's parsers need; None: the text is not parsed.
        min_weight_version: as `make_request`.

    Raises:
        TitopoolError: why the request failed.
    """
    request = make_request(
        admission, prompts, options,
        adapter=adapter, chat=chat, min_weight_version=min_weight_version,
    )  # fmt: skip
    return run_request(admission, request)


def run_request(admission: Admission, request: Request) -> list[Completed]:
    """Runs the jobs of a request at the workers and returns their results, in order.

    Raises:
        TitopoolError: why the request failed.
    """
    admission.expect_results(request)
    with submitted(admission, request):
        if not request.wait(admission.deadline.left_s):
            cancel_overdue(admission, request)
    results = request.take_results()
    admission.settle_results()
    if admission.keep_logprobs is not None:
        admission.keep_logprobs(admission.kept_name, arrays_of(results))
    return results


def make_request(
    admission: Admission,
    prompts: Sequence[Prompt],
    options: SamplingOptions,
    *,
    is_streamed: bool = False,
    adapter: str = "",
    chat: ChatParsing | None = None,
    min_weight_version: int | None = None,
) -> Request:
    """A request with one job for each prompt, not yet submitted.

    Args:
        min_weight_version: wait until the pool serves this version or a later one.

    Raises:
        TitopoolError: there are too many prompts, images do not fit one, no worker is ready, or the
            pool did not serve the version before the request's deadline.
    """
    if is_streamed:
        refuse_stream()
    link, facts = admission.link, admission.facts
    link.check_num_prompts(len(prompts))
    locations = [prompt.location for prompt in prompts]
    check_placeholders(
        [prompt.token_ids for prompt in prompts], [prompt.images for prompt in prompts],
        locations, facts.images,
    )  # fmt: skip
    for one in _distinct_options(prompts, options).values():
        check_answer_size(one, facts, admission.config.memory_budget_bytes)
    if not is_streamed:
        _check_experts(prompts, options, facts, admission.config.memory_budget_bytes)
    jobs = make_jobs(
        prompts, options, facts,
        with_prefixes=link.needs_prefixes,
        is_streamed=is_streamed,
        adapter=adapter,
        chat=chat,
        client_id=admission.client_id,
        key_name=admission.key.name,
        traceparent=admission.shown.traceparent,
    )  # fmt: skip
    admission.keep_memory(_bytes_of_jobs(jobs))
    if min_weight_version is not None:
        wait_for_version(admission, min_weight_version)
    link.check_ready()
    return Request(
        jobs, locations,
        facts=facts, session=admission.session, weight=admission.key.weight,
        count_bytes=admission.count_results,
        # A stream holds what its client has not read yet.
        bounds=[] if is_streamed else bounds_of_results(prompts, options, facts),
    )  # fmt: skip


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
        for name, one in _distinct_options(prompts, options).items()
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


def _distinct_options(
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


def _check_experts(
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


def _bytes_of_jobs(jobs: Sequence[Job]) -> int:
    """Memory of jobs in a front end: ids and files, and their copies in messages."""
    return sum(
        JOB_BYTES + 3 * len(job.prompt_token_ids) + 2 * sum(len(image.data) for image in job.images)
        for job in jobs
    )


def wait_for_version(admission: Admission, version: int) -> None:
    """Waits until the pool serves `version` or a later one.

    Raises:
        Conflict: it did not before the request's deadline; or it went back to an earlier version.
        ClientGone: the client closed its connection.
    """
    left, shown = Event(), admission.shown
    shown.on_abort = left.set
    latest = admission.link.weights.version
    with watching(current_client(), left.set):
        while (current := admission.link.weights.version) < version:
            if current < latest:
                raise Conflict(
                    f"min_weight_version: expected that the pool goes on from version {latest} to "
                    f"{version}, but it went back to version {current}, as a trainer does that starts "
                    "again from an earlier checkpoint; ask for a version of its new run"
                )
            latest = current
            if admission.deadline.has_passed:
                raise Conflict(
                    f"min_weight_version: expected that the pool serves version {version} within "
                    f"{admission.config.request_timeout_s:g} s (request_timeout_s), but it serves "
                    f"version {current}; ask for a lower one, or send the "
                    "request again after the update"
                )
            admission.link.wait_for_weights(left, admission.deadline.left_s)
            if shown.is_aborted:
                # Its jobs end without a token.
                return
            if left.is_set():
                raise client_gone()


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


@contextmanager
def submitted(admission: Admission, request: Request) -> Iterator[None]:
    """Submits `request`; within the block, a client that hangs up cancels it.

    With an Idempotency-Key the request goes on for as long as a repeat may come.
    """
    claim, record = current_claim(), current_record()
    if record is not None:
        record.generation = request

    def on_client_gone() -> None:
        if claim is not None and not claim.has_ended:
            claim.touch()
        while claim is not None and not claim.has_ended and claim.is_awaited():
            gevent.sleep(CHECK_REPEAT_S)
        admission.link.cancel(request, client_gone())

    with watching(current_client(), on_client_gone):
        shown = admission.shown
        shown.submit(request)
        admission.link.submit(request, aborted=shown.ended_ids)
        yield


def cancel_overdue(admission: Admission, request: Request) -> None:
    """Cancels a request whose deadline has passed."""
    timeout_s = admission.config.request_timeout_s
    admission.link.cancel(
        request,
        DeadlinePassed(
            f"the request did not end within {timeout_s:g} s (request_timeout_s); ask for fewer "
            "tokens in one request, or raise request_timeout_s"
        ),
    )


def expanded_ids(prompts: Sequence[Prompt], results: Sequence[Completed]) -> list[np.ndarray]:
    """The ids of each prompt with its image placeholders expanded, as the engine ran them."""
    return [
        np.frombuffer(result.prompt_token_ids, np.int32)
        if result.prompt_token_ids
        else prompt.token_ids
        for prompt, result in zip(prompts, results, strict=True)
    ]


def token_response(
    prompts: Sequence[Prompt],
    results: list[Completed],
    options: SamplingOptions,
    *,
    with_raw: bool,
) -> Response:
    """The response of /generate/ and /chat/: MessagePack if the client prefers it, else JSON.

    Empties `results`. MessagePack leaves out prompt ids that the client sent itself.
    """
    ids = expanded_ids(prompts, results)
    with_logprobs = options.logprobs is not None or options.logprob_token_ids is not None
    asked = {"with_logprobs": with_logprobs, "with_raw": with_raw}
    if not is_binary(http_request.headers.get("Accept", "")):
        return respond_in_parts(json_reply(ids, results, **asked), JSON)
    unknown = [
        None if prompt.sent_as_ids and len(run) == len(prompt.token_ids) else run
        for prompt, run in zip(prompts, ids, strict=True)
    ]
    return respond_in_parts(binary_reply(unknown, results, **asked), MSGPACK)
