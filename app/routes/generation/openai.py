"""`POST /v1/completions`, `/v1/chat/completions` and `/v1/chat/completions/tokens`.

OpenAI's bodies and answers with vLLM's extensions, so that the openai package works. The last
takes the very ids that the engine gets; `messages` are only what the answer belongs to
(prime-rl, verifiers 0.1.8 and 0.1.9).
"""

from contextlib import ExitStack
from typing import Any

from flask import Blueprint, Response
from flask import request as http_request

from app.generation import Prompt, check_batch, generate
from app.http.responses import json_response
from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import render_all
from app.inputs.images import EncodedImages, read_images
from app.inputs.token_ids import check_length, checked_ids
from app.inputs.tokenizer import encode_all
from app.inputs.tools import Tools, make_chat, read_tools
from app.outputs.token_texts import TokenTexts
from app.routes.generation.openai_answers import Asked, whole_answer
from app.routes.generation.openai_stream import stream
from app.routes.weights.lora import adapter_named
from app.schemas.generation import SamplingBody
from app.schemas.openai import (
    ChatFields,
    CompletionsFields,
    RouteFields,
    read,
)
from app.service import Admitted, current_service
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions, check_sampling
from titopool.wire.messages import ChatParsing

blueprint = Blueprint("openai", __name__)


@blueprint.post("/v1/completions/")
def completions() -> Response:
    """Text or ids in, text out."""
    with ExitStack() as held:
        admission = held.enter_context(current_service().admit())
        facts = admission.facts
        fields, options = read(http_request.get_data(cache=False), CompletionsFields, facts)
        adapter = adapter_named(admission.service, fields.model)
        options.logprobs = fields.logprobs
        check_sampling(options, facts)
        prompts = _prompts_of(admission, fields, options.n)
        texts = _texts(admission, fields, options)
        asked = Asked(admission, fields, options, prompts, texts, fields.return_token_ids, adapter)
        return _answer(asked, None, held)


@blueprint.post("/v1/chat/completions/")
def chat_completions() -> Response:
    """Messages in, a message out."""
    return _chat(with_tokens=False)


@blueprint.post("/v1/chat/completions/tokens/")
def chat_completions_of_tokens() -> Response:
    """As /v1/chat/completions, but the engine gets exactly `tokens`."""
    return _chat(with_tokens=True)


def _chat(*, with_tokens: bool) -> Response:
    with ExitStack() as held:
        admission = held.enter_context(current_service().admit())
        facts = admission.facts
        fields, options = read(http_request.get_data(cache=False), ChatFields, facts)
        adapter = adapter_named(admission.service, fields.model)
        if with_tokens != (fields.tokens is not None):
            raise InvalidRequest(
                f"tokens: expected {'the prompt' if with_tokens else 'none'} on this route; "
                "/v1/chat/completions/tokens takes ids",
                param="tokens",
            )
        most = fields.max_completion_tokens
        options.max_tokens = fields.max_tokens if most is None else most
        options.logprobs = fields.top_logprobs if fields.logprobs else None
        check_sampling(options, facts)
        check_batch(1, options.n, admission.service.config.max_completions_per_request, "n")
        tools = read_tools(fields, facts)
        prompt = _prompt_of(admission, fields, tools)
        texts = _texts(admission, fields, options)
        shows_ids = fields.return_token_ids or with_tokens
        asked = Asked(admission, fields, options, [prompt], texts, shows_ids, adapter)
        return _answer(asked, tools.parsing, held)


def _answer(asked: Asked, chat: ChatParsing | None, held: ExitStack) -> Response:
    if asked.fields.stream:
        return stream(asked, chat, held)
    results = generate(
        asked.admission, asked.prompts, asked.options, chat=chat, adapter=asked.adapter
    )  # fmt: skip
    return json_response(whole_answer(asked, results))


def _texts(admission: Admitted, fields: RouteFields, options: SamplingOptions) -> TokenTexts | None:
    if options.logprobs is None and options.prompt_logprobs is None:
        return None
    as_ids = fields.return_tokens_as_token_ids
    is_shown = not as_ids or isinstance(fields, ChatFields) or options.prompt_logprobs is not None
    return TokenTexts(admission, as_ids=as_ids, needs_texts=is_shown)


def _prompts_of(admission: Admitted, fields: CompletionsFields, n: int) -> list[Prompt]:
    service, facts = admission.service, admission.facts
    if fields.mm_processor_kwargs:
        raise InvalidRequest(
            "mm_processor_kwargs: expected none, as this route takes no images; use /generate/",
            param="mm_processor_kwargs",
        )
    several, is_one = _separate(fields.prompt)
    check_batch(len(several), n, service.config.max_completions_per_request, "prompt")
    if isinstance(several[0], str):
        several = admission.use_tokenizer(_encode, several, fields.add_special_tokens)
    prompts = []
    for index, ids in enumerate(several):
        place = "prompt" if is_one else f"prompt[{index}]"
        array = checked_ids(ids, place, facts.vocab_size)
        check_length(len(array), place, facts.max_model_len)
        prompts.append(Prompt(array, place, cache_salt=fields.cache_salt))
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


def _prompt_of(admission: Admitted, fields: ChatFields, tools: Tools) -> Prompt:
    service, facts = admission.service, admission.facts
    # With tokens, the messages are rendered by nobody: a malformed call of the model may stay.
    conversation = read_conversation(fields.messages, "messages", is_rendered=fields.tokens is None)
    encoded = EncodedImages(
        "messages", "messages: image", conversation.images, True, fields.mm_processor_kwargs or {}
    )
    images = read_images(encoded, SamplingBody(), facts, service.config)
    if fields.tokens is not None:
        array = checked_ids(fields.tokens, "tokens", facts.vocab_size)
        place = "tokens"
        service.drift.compare(fields, tools)
    else:
        chat = make_chat(fields, conversation.messages, tools)
        (ids,) = admission.use_tokenizer(render_all, [chat])
        array, place = checked_ids(ids, "messages", facts.vocab_size), "messages"
    check_length(len(array), place, facts.max_model_len)
    return Prompt(array, place, images, fields.cache_salt)
