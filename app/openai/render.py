"""`POST /v1/chat/completions/render` and `/v1/completions/render`: bodies for /inference/v1/generate.

Bodies of OpenAI's routes are checked and tokenized as there. Nothing is generated: a worker only
expands the placeholders of images, which needs the model's processor.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
from flask import Blueprint, Response

from app.call.call import session_key
from app.call.jobs import encode_sent, expanded_ids
from app.http.responses import respond_in_parts
from app.inputs.features import features_of
from app.openai.answers import OpenAIRequest
from app.openai.bodies import CHAT_COMPLETIONS_BODY, COMPLETIONS_BODY
from app.openai.routes import complete_chat, complete_text
from app.outputs.json_parts import json_parts
from app.outputs.token_arrays import JSON
from app.route.decoding import beginning
from app.route.operation import GENERATION_ERRORS, IMAGE_ERRORS, QUESTION, Example, Operation
from titopool.answers.generation import Render
from titopool.errors import AnswerTooLarge, InvalidRequest

blueprint = Blueprint("render", __name__)

# Fields that a body for /inference/v1/generate takes over from the client's.
TAKEN_OVER = (
    "stream", "stream_options", "cache_salt", "session_id", "return_token_ids",
    "mm_processor_kwargs", "min_weight_version",
)  # fmt: skip


@blueprint.post("/v1/chat/completions/render/")
@Operation(
    summary="Messages in, a body for /inference/v1/generate out.",
    body=CHAT_COMPLETIONS_BODY,
    answer=Render,
    errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
    examples={"question": Example("A question", {"messages": QUESTION, "max_tokens": 8})},
)
def render_chat() -> Response:
    """Messages in, a body out."""
    return complete_chat(_render_chat)


@blueprint.post("/v1/completions/render/")
@Operation(
    summary="Text or ids in, a body for /inference/v1/generate for each prompt out.",
    body=COMPLETIONS_BODY,
    answer=list[Render],
    errors=GENERATION_ERRORS,
    examples={"texts": Example("Two texts", {"prompt": ["Hello", "world"], "max_tokens": 8})},
)
def render_completions() -> Response:
    """Text or ids in, a list of bodies out: one for each prompt."""
    return complete_text(lambda request: respond_in_parts(json_parts(_bodies(request)), JSON))


def _render_chat(request: OpenAIRequest) -> Response:
    choice = "none" if request.chat is None else request.chat.tool_choice
    if choice not in ("auto", "none"):
        raise InvalidRequest(
            f"tool_choice: expected auto or none in a render, got {beginning(choice, 60, str)!r}, for which the "
            "tool call parser adds a grammar; use /v1/chat/completions",
            param="tool_choice",
        )
    return respond_in_parts(json_parts(next(_bodies(request))), JSON)


def _bodies(request: OpenAIRequest) -> Iterator[dict[str, Any]]:
    """The bodies of all prompts, each made as it is written.

    Raises:
        InvalidRequest: JSON would not have a field as it was sent.
        AnswerTooLarge: what they have in common takes more than the front end's budget.
    """
    call, prompts = request.call, request.prompts
    # It refuses options that JSON does not have, as where they generate.
    pending = call.make_request(prompts, request.options)
    shared, options = _shared_fields(request), _options(request)
    limit = call.config.memory_budget_bytes
    size = len(prompts) * sum(
        len(encode_sent(orjson.dumps, {name: value}, name, name))
        for name, value in (shared | options).items()
    )
    if size > limit:
        raise AnswerTooLarge(
            f"expected an answer of at most {limit} bytes (memory_budget_bytes), got {size}: "
            f"{len(prompts)} bodies that each repeat the request's options; send fewer prompts, or "
            "shorter options"
        )
    all_ids, features = [prompt.token_ids for prompt in prompts], None
    # Only a chat has images, and it has one prompt.
    if images := prompts[0].images.images:
        (result,) = results = call.render_images(pending)
        all_ids = expanded_ids(prompts, results)
        features = features_of(images, result.image_ranges)
    name, is_one = call.id, len(prompts) == 1
    max_model_len, max_tokens = call.facts.max_model_len, request.options.max_tokens
    return (
        {
            **shared,
            "request_id": name if is_one else f"{name[:240]}-{index}",
            "token_ids": ids,
            "features": features,
            "sampling_params": options
            | {"max_tokens": min(max_model_len - len(ids), max_tokens or max_model_len)},
        }
        for index, ids in enumerate(all_ids)
    )


def _shared_fields(request: OpenAIRequest) -> dict[str, Any]:
    """The fields that the bodies of all prompts have in common."""
    sent = {name: getattr(request.fields, name) for name in TAKEN_OVER}
    # No more of it counts.
    sent["session_id"] = session_key(sent["session_id"])
    return {
        "model": request.adapter or request.call.facts.model,
        **{name: msgspec.to_builtins(value) for name, value in sent.items() if value},
    }


def _options(request: OpenAIRequest) -> dict[str, Any]:
    """The options that are not default, without the limit of tokens."""
    params: dict[str, Any] = msgspec.to_builtins(request.options, str_keys=True)
    params.pop("detokenize", None)
    return params
