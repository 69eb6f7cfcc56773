"""`POST /v1/completions`, `/v1/chat/completions` and `/v1/chat/completions/tokens`.

OpenAI's bodies and answers with vLLM's extensions, so that the openai package works. The last
takes the very ids that the engine gets; `messages` are only what the answer belongs to
(prime-rl, verifiers 0.1.8 and 0.1.9).
"""

import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

import gevent
import numpy as np
from flask import Blueprint, Response
from flask import request as http_request

from app import openai_logprobs
from app.answering import Prompt, check_batch, expanded_ids, generate
from app.conversations import read_conversation
from app.health import json_response
from app.images import EncodedImages, read_images
from app.openai_bodies import (
    ChatFields,
    CompletionsFields,
    RouteFields,
    checked,
    read,
)
from app.prompts import check_length, checked_ids
from app.rendering import Chat, check_template_kwargs, render_all
from app.schemas import SamplingBody
from app.service import Service, current_service
from app.tokenizer import encode_all
from titopool.errors import InvalidRequest
from titopool.messages import Completed, Completion
from titopool.sampling import SamplingOptions

logger = logging.getLogger(__name__)
blueprint = Blueprint("openai", __name__)


@blueprint.post("/v1/completions/")
def completions() -> Response:
    """Text or ids in, text out."""
    service = current_service()
    with service.place():
        begin = time.monotonic()
        facts = service.link.facts
        fields, options = read(http_request.get_data(cache=False), CompletionsFields, facts)
        options.logprobs = fields.logprobs
        checked(options, facts)
        prompts = _prompts_of(service, fields)
        check_batch(len(prompts), options.n, service.config.max_completions_per_request, "prompt")
        deadline = begin + service.config.request_timeout_s
        results = generate(service, prompts, options, deadline)
        choices = _choices(service, fields, options, results, openai_logprobs.of_completion)
        for choice, (completion, ids) in zip(choices, _flat(prompts, results), strict=True):
            choice["text"] = completion.text
            if fields.return_token_ids:
                choice["prompt_token_ids"] = ids.tolist()
        return _answer(service, "text_completion", "cmpl", choices, prompts, results)


@blueprint.post("/v1/chat/completions/")
def chat_completions() -> Response:
    """Messages in, a message out."""
    return _chat(with_tokens=False)


@blueprint.post("/v1/chat/completions/tokens/")
def chat_completions_of_tokens() -> Response:
    """As /v1/chat/completions, but the engine gets exactly `tokens`."""
    return _chat(with_tokens=True)


def _chat(*, with_tokens: bool) -> Response:
    service = current_service()
    with service.place():
        begin = time.monotonic()
        facts = service.link.facts
        fields, options = read(http_request.get_data(cache=False), ChatFields, facts)
        if with_tokens != (fields.tokens is not None):
            raise InvalidRequest(
                f"tokens: expected {'the prompt' if with_tokens else 'none'} on this route; "
                "/v1/chat/completions/tokens takes ids",
                param="tokens",
            )
        most = fields.max_completion_tokens
        options.max_tokens = fields.max_tokens if most is None else most
        options.logprobs = fields.top_logprobs if fields.logprobs else None
        checked(options, facts)
        deadline = begin + service.config.request_timeout_s
        prompt = _prompt_of(service, fields, deadline)
        check_batch(1, options.n, service.config.max_completions_per_request, "n")
        results = generate(service, [prompt], options, deadline)
        choices = _choices(service, fields, options, results, openai_logprobs.of_chat)
        for choice, (completion, _) in zip(choices, _flat([prompt], results), strict=True):
            choice["message"] = {"role": "assistant", "content": completion.text}
        extra: dict[str, Any] = {}
        if fields.return_token_ids or with_tokens:
            (ids,) = expanded_ids([prompt], results)
            extra["prompt_token_ids"] = ids.tolist()
        return _answer(service, "chat.completion", "chatcmpl", choices, [prompt], results, **extra)


def _prompts_of(service: Service, fields: CompletionsFields) -> list[Prompt]:
    facts = service.link.facts
    several, is_one = _separate(fields.prompt)
    if isinstance(several[0], str):
        several = service.tokenizer.use(
            _encode, several, fields.add_special_tokens,
            facts=facts, timeout_s=service.config.request_timeout_s,
        )  # fmt: skip
    prompts = []
    for index, ids in enumerate(several):
        place = "prompt" if is_one else f"prompt[{index}]"
        array = checked_ids(ids, place, facts.vocab_size)
        check_length(len(array), place, facts.max_model_len)
        prompts.append(Prompt(array, cache_salt=fields.cache_salt))
    return prompts


def _separate(prompt: str | list[Any]) -> tuple[list[Any], bool]:
    """The prompts, all texts or all lists of ids, and whether it was one without a list around."""
    if isinstance(prompt, str):
        return [prompt], True
    kinds = {type(one) for one in prompt}
    if len(kinds) != 1:
        raise InvalidRequest(
            "prompt: expected a text, ids, a list of texts or a list of lists of ids, got "
            f"{' and '.join(sorted(kind.__name__ for kind in kinds)) or 'an empty list'}",
            param="prompt",
        )
    return ([prompt], True) if kinds == {int} else (prompt, False)


def _encode(tokenizer: Any, texts: list[str], with_special_tokens: bool) -> list[list[int]]:
    return encode_all(tokenizer, texts, with_special_tokens=with_special_tokens)


def _prompt_of(service: Service, fields: ChatFields, deadline: float) -> Prompt:
    facts = service.link.facts
    # With tokens, the messages are rendered by nobody: a malformed call of the model may stay.
    conversation = read_conversation(fields.messages, "messages", is_rendered=fields.tokens is None)
    encoded = EncodedImages(
        "messages", "messages: image", conversation.images, True, fields.mm_processor_kwargs or {}
    )
    images = read_images(encoded, SamplingBody(), facts, service.config)
    if fields.tokens is not None:
        array = checked_ids(fields.tokens, "tokens", facts.vocab_size)
        place = "tokens"
    else:
        check_template_kwargs(fields.chat_template_kwargs)
        chat = Chat(
            conversation.messages, "messages", fields.tools, fields.chat_template_kwargs,
            fields.add_generation_prompt, fields.continue_final_message,
        )  # fmt: skip
        (ids,) = service.tokenizer.use(
            render_all, [chat], facts=facts, timeout_s=deadline - time.monotonic()
        )
        array, place = checked_ids(ids, "messages", facts.vocab_size), "messages"
    check_length(len(array), place, facts.max_model_len)
    return Prompt(array, images, fields.cache_salt)


def _flat(
    prompts: Sequence[Prompt], results: Sequence[Completed]
) -> list[tuple[Completion, np.ndarray]]:
    """Each completion with the ids of its prompt, prompt-major."""
    return [
        (completion, ids)
        for ids, result in zip(expanded_ids(prompts, results), results, strict=True)
        for completion in result.completions
    ]


def _choices(
    service: Service,
    fields: RouteFields,
    options: SamplingOptions,
    results: Sequence[Completed],
    logprobs_of: Any,
) -> list[dict[str, Any]]:
    """What the choices of both routes have in common."""
    completions = [one for result in results for one in result.completions]
    texts = None
    if options.logprobs is not None:
        ids = (
            [] if fields.return_tokens_as_token_ids else openai_logprobs.ids_to_decode(completions)
        )
        decoded = {}
        if ids:
            decoded = service.tokenizer.use(
                openai_logprobs.decode_each, ids,
                facts=service.link.facts, timeout_s=service.config.request_timeout_s,
            )  # fmt: skip
        texts = openai_logprobs.TokenTexts(decoded, as_ids=fields.return_tokens_as_token_ids)
    choices = []
    for index, one in enumerate(completions):
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": logprobs_of(one, texts, options.logprobs) if texts else None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if fields.return_token_ids:
            choice["token_ids"] = np.frombuffer(one.token_ids, np.int32).tolist()
        choices.append(choice)
        # Others take their turn between long lists of log-probabilities.
        gevent.sleep(0)
    return choices


def _answer(
    service: Service,
    kind: str,
    prefix: str,
    choices: list[dict[str, Any]],
    prompts: Sequence[Prompt],
    results: Sequence[Completed],
    **extra: Any,
) -> Response:
    num_prompt = sum(len(ids) for ids in expanded_ids(prompts, results))
    num_made = sum(len(one.token_ids) // 4 for result in results for one in result.completions)
    num_cached = sum(result.num_cached_tokens for result in results)
    return json_response(
        {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": service.link.facts.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_made,
                "total_tokens": num_prompt + num_made,
                "prompt_tokens_details": {"cached_tokens": num_cached},
            },
            **extra,
        }
    )
