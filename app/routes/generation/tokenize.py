"""`POST /tokenize` and `POST /detokenize`, as vLLM's server has them."""

from typing import Any

from flask import Blueprint, Response

from app.http.responses import json_response
from app.inputs.admission import Admission
from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat, render_all
from app.inputs.tokenizer import encode_all
from app.inputs.tools import normalized_tools
from app.schemas.generation import DETOKENIZE_BODY, TOKENIZE_BODY, TokenizeBody
from app.service import current_service
from titopool.errors import InvalidRequest
from titopool.settings.sampling import check_token_ids

blueprint = Blueprint("tokenize", __name__)


@blueprint.post("/tokenize/")
def tokenize() -> Response:
    """The token ids that a generating route would make of a text or of messages."""
    with current_service().admit(TOKENIZE_BODY) as (admission, body):
        ids = _encode_body(admission, body)
        strings = admission.use_tokenizer(_token_strings, ids) if body.return_token_strs else None
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
    """The text of token ids, including special tokens."""
    with current_service().admit(DETOKENIZE_BODY) as (admission, body):
        admission.adapter_named(body.model)
        check_token_ids("tokens", body.tokens, admission.facts.vocab_size)
        return json_response({"prompt": admission.use_tokenizer(_decode, body.tokens)})


def _encode_body(admission: Admission, body: TokenizeBody) -> list[int]:
    admission.adapter_named(body.model)
    if (body.prompt is None) == (body.messages is None):
        came = "neither" if body.prompt is None else "both"
        raise InvalidRequest(f"expected either prompt or messages, got {came}", param="prompt")
    if body.prompt is not None:
        with_special_tokens = body.add_special_tokens is not False
        (ids,) = admission.use_tokenizer(encode_all, [body.prompt], with_special_tokens)
        return ids
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


def _token_strings(tokenizer: Any, ids: list[int]) -> list[str]:
    """Each token as the vocabulary writes it, e.g. `Ġthe`."""
    strings: list[str] = tokenizer.convert_ids_to_tokens(ids)
    return strings


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids)
    return text
