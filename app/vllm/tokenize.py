"""`POST /tokenize` and `POST /detokenize`, as vLLM's server has them."""

from typing import Any

from flask import Blueprint

from app.call.call import Call, admitted
from app.call.token_texts import texts_in_order
from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat
from app.inputs.tokenizer import decode_all
from app.inputs.tools import normalized_tools
from app.route.operation import MODEL_ERRORS, QUESTION, Example, Operation
from app.vllm.bodies import DETOKENIZE_BODY, TOKENIZE_BODY, TokenizeBody
from titopool.answers.generation import DetokenizeAnswer, TokenizeAnswer
from titopool.errors import DeadlinePassed, InvalidRequest, PromptTooLong
from titopool.settings.sampling import check_token_ids

blueprint = Blueprint("tokenize", __name__)


@blueprint.post("/tokenize/")
@Operation(
    description="The body has either `prompt` or `messages`.",
    body=TOKENIZE_BODY,
    errors=(*MODEL_ERRORS, PromptTooLong, DeadlinePassed),
    examples={
        "text": Example("A text", {"prompt": "Hello, world", "return_token_strs": True}),
        "messages": Example("Messages", {"messages": QUESTION}),
    },
)
def tokenize() -> TokenizeAnswer:
    """The token ids that a generating route would make of a text or of messages."""
    with admitted(TOKENIZE_BODY) as (call, body):
        ids = _encode_body(call, body)
        strings = None
        if body.return_token_strs:
            strings = call.use_tokenizer(_token_strings, ids, size=len(ids))
    return TokenizeAnswer(
        count=len(ids), max_model_len=call.facts.max_model_len, tokens=ids, token_strs=strings
    )


@blueprint.post("/detokenize/")
@Operation(
    description="At most `max_model_len` ids.",
    body=DETOKENIZE_BODY,
    errors=(*MODEL_ERRORS, DeadlinePassed),
    examples={"ids": Example("Ids", {"tokens": [42, 1393, 14]})},
)
def detokenize() -> DetokenizeAnswer:
    """The text of token ids, including special tokens."""
    with admitted(DETOKENIZE_BODY) as (call, body):
        call.adapter_named(body.model)
        num_tokens, most = len(body.tokens), call.facts.max_model_len
        if num_tokens > most:
            raise InvalidRequest(
                f"tokens: expected at most {most} ids (max_model_len), got {num_tokens}; send them "
                "in several requests",
                param="tokens",
            )
        check_token_ids("tokens", body.tokens, call.facts.vocab_size)
        (text,) = call.use_tokenizer(decode_all, [body.tokens], size=num_tokens)
        answer = DetokenizeAnswer(prompt=text)
        if body.return_token_texts:
            texts = call.use_tokenizer(texts_in_order, body.tokens, size=num_tokens)
            answer.token_texts = texts
        return answer


def _encode_body(call: Call, body: TokenizeBody) -> list[int]:
    call.adapter_named(body.model)
    call.templates.check(body.chat_template)
    if (body.prompt is None) == (body.messages is None):
        came = "neither" if body.prompt is None else "both"
        raise InvalidRequest(f"expected either prompt or messages, got {came}", param="prompt")
    if body.prompt is not None:
        (ids,) = call.encode(
            [body.prompt], ["prompt"], with_special_tokens=body.add_special_tokens is not False
        )
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
        body.chat_template,
    )
    (ids,) = call.render([chat])
    return ids


def _token_strings(tokenizer: Any, ids: list[int]) -> list[str]:
    """Each token as the vocabulary writes it, e.g. `Ġthe`."""
    strings: list[str] = tokenizer.convert_ids_to_tokens(ids)
    return strings
