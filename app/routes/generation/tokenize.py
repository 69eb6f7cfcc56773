"""`POST /tokenize` and `POST /detokenize`, as vLLM's server has them."""

from typing import Any

from flask import Blueprint, Response
from flask import request as http_request

from app.http.responses import json_response
from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat, render_all
from app.inputs.tokenizer import encode_all
from app.inputs.tools import normalized_tools
from app.routes.weights.lora import adapter_named
from app.schemas.generation import (
    DETOKENIZE_BODY,
    TOKENIZE_BODY,
    TokenizeBody,
    decode_body,
)
from app.service import Admitted, current_service
from titopool.errors import InvalidRequest
from titopool.settings.sampling import check_token_ids

blueprint = Blueprint("tokenize", __name__)


@blueprint.post("/tokenize/")
def tokenize() -> Response:
    """The ids of a text or of messages, as a generating route would use them."""
    with current_service().admit() as admission:
        body = decode_body(http_request.get_data(cache=False), TOKENIZE_BODY)
        ids = _ids_of(admission, body)
        strings = None
        if body.return_token_strs:
            strings = admission.use_tokenizer(token_strings, ids)
    return json_response(
        {
            "count": len(ids),
            "max_model_len": admission.facts.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


@blueprint.post("/detokenize/")
def detokenize() -> Response:
    """The text of token ids, special tokens included."""
    with current_service().admit() as admission:
        body = decode_body(http_request.get_data(cache=False), DETOKENIZE_BODY)
        adapter_named(admission.service, body.model)
        check_token_ids("tokens", body.tokens, admission.facts.vocab_size)
        return json_response({"prompt": admission.use_tokenizer(decode, body.tokens)})


def _ids_of(admission: Admitted, body: TokenizeBody) -> list[int]:
    adapter_named(admission.service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("expected either prompt or messages", param="prompt")
    if body.prompt is not None:
        with_special_tokens = body.add_special_tokens is not False
        return admission.use_tokenizer(_encode_one, body.prompt, with_special_tokens)
    if body.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens: expected false with messages, as the chat template writes the "
            "special tokens",
            param="add_special_tokens",
        )
    chat = Chat(
        read_conversation(body.messages or [], "messages").messages,
        "messages",
        normalized_tools(body.tools) or None,
        body.chat_template_kwargs,
        body.add_generation_prompt,
        body.continue_final_message,
    )
    (ids,) = admission.use_tokenizer(render_all, [chat])
    return ids


def _encode_one(tokenizer: Any, text: str, with_special_tokens: bool) -> list[int]:
    (ids,) = encode_all(tokenizer, [text], with_special_tokens=with_special_tokens)
    return ids


def token_strings(tokenizer: Any, ids: list[int]) -> list[str]:
    """Each token as the vocabulary writes it."""
    strings: list[str] = tokenizer.convert_ids_to_tokens(ids)
    return strings


def decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids)
    return text
