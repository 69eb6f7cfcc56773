"""Checks TRL's bodies: sampling options, and prompts that become token ids and images."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from app.call.bounds import TokenIds, check_length, checked_ids
from app.call.call import Call
from app.inputs.images import NO_IMAGES, EncodedImages, PromptImages, read_images
from app.route.decoding import convert
from app.time_slices import sharing_time
from app.trl.bodies import SAMPLING_FIELDS, GenerateBody, SamplingBody, TokensPrompt
from titopool.errors import ImageMismatch, InvalidRequest
from titopool.settings.config import ServerConfig
from titopool.settings.sampling import (
    SERVER_SET_FIELDS,
    UNSUPPORTED_FIELDS,
    SamplingOptions,
    check_sampling,
)
from titopool.wire.messages import WorkerFacts

logger = logging.getLogger(__name__)
# Kinds of prompts, as error messages name them.
KINDS: dict[type, str] = {
    str: "text", list: "token ids", np.ndarray: "token ids", TokensPrompt: "TokensPrompt objects",
}  # fmt: skip


def prompt_ids_of(body: GenerateBody, call: Call) -> list[np.ndarray]:
    """The ids of each prompt as the engine gets them, int32 [tokens].

    Raises:
        InvalidRequest: the prompts are of several kinds, a prompt is empty, or an id is outside
            the vocabulary.
        PromptTooLong: a prompt leaves no room for a generated token.
    """
    _check_kinds(body.prompts)
    facts = call.facts
    keep = tokens_to_keep(body, facts)
    token_ids = _token_ids(body.prompts, call, is_truncated=keep is not None)
    checked = []
    for index, ids in enumerate(sharing_time(token_ids)):
        location = f"prompts[{index}]"
        # Before the ids are visited: there may be millions.
        check_length(min(len(ids), keep or len(ids)), location, facts.max_model_len)
        array = checked_ids(ids, location, facts.vocab_size)
        checked.append(array if keep is None else array[-keep:])
    return checked


def was_sent_as_ids(token_ids: np.ndarray, sent: str | list[int] | TokensPrompt) -> bool:
    """Whether the client sent these ids itself: no text, and no truncation."""
    sent_ids = _ids_in(sent)
    return sent_ids is not None and len(sent_ids) == len(token_ids)


def _check_kinds(prompts: Sequence[object]) -> None:
    if not prompts:
        raise InvalidRequest(
            "prompts: expected at least one prompt, got an empty list", param="prompts"
        )
    first = KINDS[type(prompts[0])]
    for index, prompt in enumerate(prompts):
        if (kind := KINDS[type(prompt)]) != first:
            raise InvalidRequest(
                f"prompts[{index}]: expected {first} like prompts[0], got "
                f"{kind}; send each kind in a separate request",
                param="prompts",
            )


def _token_ids(
    prompts: Sequence[str | list[int] | TokensPrompt], call: Call, *, is_truncated: bool
) -> Sequence[TokenIds]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        locations = [f"prompts[{index}]" for index in range(len(texts))]
        return call.encode(texts, locations, is_truncated=is_truncated)
    return [ids for ids in map(_ids_in, prompts) if ids is not None]


def _ids_in(prompt: str | TokenIds | TokensPrompt) -> TokenIds | None:
    if isinstance(prompt, TokensPrompt):
        return prompt.prompt_token_ids
    return None if isinstance(prompt, str) else prompt


def tokens_to_keep(body: SamplingBody, facts: WorkerFacts) -> int | None:
    """How many ids of each prompt `truncate_prompt_tokens` keeps, from the end; None: all."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return None
    if limit == -1:
        # Leaves room for one generated token.
        return facts.max_model_len - 1
    if limit < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens: expected -1 or at least 1, got {limit}",
            param="truncate_prompt_tokens",
        )
    return limit


def images_of(body: GenerateBody, facts: WorkerFacts, config: ServerConfig) -> list[PromptImages]:
    """The images of each prompt of `POST /generate/`; raises the errors of `read_images`."""
    has_objects = isinstance(body.prompts[0], TokensPrompt)
    if not has_objects and not body.images and not body.mm_processor_kwargs:
        return [NO_IMAGES] * len(body.prompts)
    keep = body.truncate_prompt_tokens
    return [read_images(one, facts, config, truncated_to=keep) for one in _encoded(body)]


def _encoded(body: GenerateBody) -> Iterator[EncodedImages]:
    for name in ("images", "mm_processor_kwargs"):
        check_one_per_prompt(getattr(body, name), len(body.prompts), name)
    for index, prompt in enumerate(body.prompts):
        tokens_prompt = prompt if isinstance(prompt, TokensPrompt) else TokensPrompt([])
        data = tokens_prompt.multi_modal_data
        in_prompt = data.image if data else None
        in_body = body.images[index] if body.images else None
        if in_prompt and in_body:
            raise InvalidRequest(
                f"images[{index}]: expected null, as prompts[{index}].multi_modal_data has images",
                param="images",
            )
        files = in_prompt or in_body or []
        yield EncodedImages(
            prompt=f"prompts[{index}]",
            location=f"prompts[{index}].multi_modal_data.image"
            if in_prompt
            else f"images[{index}]",
            files=[files] if isinstance(files, str) else files,
            is_list=not isinstance(files, str),
            mm_processor_kwargs=processor_kwargs_of(body, index, tokens_prompt.mm_processor_kwargs),
        )


def check_one_per_prompt(value: object, num_prompts: int, name: str) -> None:
    """Raises ImageMismatch for a list without exactly one entry for each prompt."""
    if isinstance(value, list) and len(value) != num_prompts:
        raise ImageMismatch(
            f"{name}: expected one entry for each of the {num_prompts} prompts (null for a prompt "
            f"without images), got {len(value)}",
            param=name,
        )


def processor_kwargs_of(
    body: SamplingBody, index: int, of_prompt: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The processor's arguments for prompt `index`; `of_prompt` replaces those of the body."""
    of_body = body.mm_processor_kwargs
    if isinstance(of_body, list):
        of_body = of_body[index]
    return (of_body if of_prompt is None else of_prompt) or {}


# ---- sampling options ------------------------------------------------------------------


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
