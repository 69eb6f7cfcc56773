"""From checked prompts to an answer: what every route that generates has in common."""

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
from flask import Response
from flask import request as http_request

from app.http.disconnects import watching
from app.http.responses import respond
from app.inputs.images import NO_IMAGES, PromptImages, check_placeholders
from app.outputs.token_arrays import JSON, MSGPACK, binary_reply, is_binary, json_reply
from app.pool.pending import Request
from app.schemas.generation import SAMPLING_FIELDS, SamplingBody, explain
from app.service import Admitted, Service
from titopool.errors import ClientGone, DeadlinePassed, InvalidRequest
from titopool.settings.sampling import (
    SERVER_SET_FIELDS,
    UNSUPPORTED_FIELDS,
    SamplingOptions,
    check_sampling,
    encode_options,
)
from titopool.wire.messages import ChatParsing, Completed, Job, WorkerFacts, encode
from titopool.wire.prefixes import prompt_hashes

logger = logging.getLogger(__name__)

# Unique in this process; workers tell processes apart by their sockets.
_job_ids = itertools.count(1)


class Prompt(NamedTuple):
    """What one job is made of."""

    token_ids: np.ndarray
    # Where it stood in the client's body.
    location: str
    images: PromptImages = NO_IMAGES
    cache_salt: str | None = None
    # Whether the client sent just these ids.
    is_known: bool = False


def answer(
    admission: Admitted,
    prompts: Sequence[Prompt],
    options: SamplingOptions,
    adapter: str = "",
) -> Response:
    """Generates and replies, as /generate/ and /chat/ do; in MessagePack if the client asks."""
    results = generate(admission, prompts, options, adapter=adapter)
    prompt_ids = expanded_ids(prompts, results)
    with_logprobs = has_logprobs(options)
    if is_binary(http_request.accept_mimetypes):
        unknown = [
            None if prompt.is_known and len(ids) == len(prompt.token_ids) else ids
            for prompt, ids in zip(prompts, prompt_ids, strict=True)
        ]
        return respond(binary_reply(unknown, results, with_logprobs=with_logprobs), MSGPACK)
    return respond(json_reply(prompt_ids, results, with_logprobs=with_logprobs), JSON)


def generate(
    admission: Admitted,
    prompts: Sequence[Prompt],
    options: SamplingOptions,
    *,
    chat: ChatParsing | None = None,
    adapter: str = "",
) -> list[Completed]:
    """The results of all prompts, in order.

    Raises:
        TitopoolError: why the request failed.
    """
    jobs = checked_jobs(admission, prompts, options, chat=chat, adapter=adapter)
    request = Request(jobs, [prompt.location for prompt in prompts], facts=admission.facts)
    run(admission, request)
    return request.completed()


def checked_jobs(
    admission: Admitted,
    prompts: Sequence[Prompt],
    options: SamplingOptions,
    *,
    chat: ChatParsing | None = None,
    is_streamed: bool = False,
    adapter: str = "",
) -> list[Job]:
    """One job for each prompt, in order, that a worker can run now.

    Raises:
        TitopoolError: images do not fit a prompt, or no worker is ready.
    """
    link, facts = admission.service.link, admission.facts
    check_placeholders(
        [one.token_ids for one in prompts], [one.images for one in prompts],
        [one.location for one in prompts], facts.images,
    )  # fmt: skip
    jobs = make_jobs(prompts, options, facts, with_prefixes=link.needs_prefixes)
    link.check_ready()
    if chat is not None or is_streamed or adapter:
        encoded = b"" if chat is None else _encode_chat(chat)
        jobs = [
            msgspec.structs.replace(job, chat=encoded, is_streamed=is_streamed, adapter=adapter)
            for job in jobs
        ]
    return jobs


def _encode_chat(chat: ChatParsing) -> bytes:
    try:
        return encode(chat)
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidRequest(
            f"tools, chat_template_kwargs: expected numbers of 64 bits at most, got others: {error}",
            param="tools",
        ) from None


def run(admission: Admitted, request: Request) -> None:
    """Submits `request` and returns when it has ended, well or not.

    It ends at its deadline, and when the client hangs up.
    """
    with submitted(admission.service, request):
        if not request.wait(admission.left_s):
            admission.service.link.cancel(request, deadline_passed(admission.service))


@contextmanager
def submitted(service: Service, request: Request) -> Iterator[None]:
    """Submits `request`, and cancels it when the client hangs up within the block."""

    def on_client_gone() -> None:
        service.link.cancel(request, ClientGone("the client closed its connection"))

    with watching(http_request.environ.get("gunicorn.socket"), on_client_gone):
        service.link.submit(request)
        yield


def deadline_passed(service: Service) -> DeadlinePassed:
    """What a request gets that did not end in time."""
    return DeadlinePassed(
        f"the request did not end within {service.config.request_timeout_s:g} s; ask for fewer tokens "
        "at once or raise request_timeout_s"
    )


def sampling_options(body: SamplingBody, facts: WorkerFacts) -> SamplingOptions:
    """The body's sampling options; `generation_kwargs` win over the fields beside them.

    Raises:
        InvalidRequest: an option is unknown, not the client's to set, or out of range.
    """
    merged: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING_FIELDS}
    for name, value in body.generation_kwargs.items():
        reason = SERVER_SET_FIELDS.get(name) or UNSUPPORTED_FIELDS.get(name)
        if reason:
            raise InvalidRequest(f"generation_kwargs.{name}: {reason}; leave it out", param=name)
        merged[name] = value
    if body.structured_outputs_regex is not None:
        if merged.get("structured_outputs") is not None:
            logger.warning("structured_outputs_regex replaces generation_kwargs.structured_outputs")
        merged["structured_outputs"] = {"regex": body.structured_outputs_regex}
    try:
        # JSON has only strings as keys; those of logit_bias are token ids.
        options = msgspec.convert(merged, SamplingOptions, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"sampling options: {explain(error)}") from None
    try:
        check_sampling(options, facts)
    except InvalidRequest as error:
        if body.structured_outputs_regex is None or error.param != "structured_outputs":
            raise
        # The body has it under the name of this route.
        field = "structured_outputs_regex"
        message = error.message.removeprefix("structured_outputs")
        raise InvalidRequest(f"{field}{message}", param=field) from None
    return options


def make_jobs(
    prompts: Iterable[Prompt], options: SamplingOptions, facts: WorkerFacts, *, with_prefixes: bool
) -> list[Job]:
    """One job for each prompt, in order."""
    encoded = _encode(options)
    jobs = []
    for ids, _, images, salt, _ in prompts:
        room = facts.max_model_len - len(ids)
        most = room if options.max_tokens is None else min(room, options.max_tokens)
        token_ids = ids.tobytes()
        prefix = None
        if with_prefixes:
            prefix = prompt_hashes(token_ids, salt, images.digests, facts.images)
        jobs.append(
            Job(
                job_id=next(_job_ids),
                attempt=1,
                prompt_token_ids=token_ids,
                num_sequences=options.n,
                num_tokens=len(ids) + options.n * most,
                sampling=encoded,
                cache_salt=salt,
                prefix=prefix,
                images=images.images,
                mm_processor_kwargs=images.mm_processor_kwargs,
            )
        )
    return jobs


def expanded_ids(prompts: Sequence[Prompt], results: Sequence[Completed]) -> list[np.ndarray]:
    """The ids of each prompt as the engine got them."""
    return [
        np.frombuffer(result.prompt_token_ids, np.int32)
        if result.prompt_token_ids
        else prompt.token_ids
        for prompt, result in zip(prompts, results, strict=True)
    ]


def has_logprobs(options: SamplingOptions) -> bool:
    """Whether the engine returns log-probabilities."""
    return options.logprobs is not None or options.logprob_token_ids is not None


def _encode(options: SamplingOptions) -> msgspec.Raw:
    try:
        return msgspec.Raw(encode_options(options))
    except OverflowError:
        raise InvalidRequest(
            "sampling options: expected numbers of 64 bits at most, got a larger one in extra_args "
            "or structured_outputs"
        ) from None


def check_batch(num_prompts: int, n: int, limit: int, field: str = "prompts") -> None:
    if num_prompts * n > limit:
        raise InvalidRequest(
            f"{field}: expected at most {limit} completions in a request "
            f"(max_completions_per_request), got {num_prompts} prompts times n = {n}; send several",
            param=field,
        )
