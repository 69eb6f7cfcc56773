"""`POST /v1/responses`: items in, items out, so that the openai package's `client.responses` works.

The prompt is that of the same conversation at /v1/chat/completions.
"""

import re
from functools import partial

import orjson
from flask import Blueprint, Response

from app.call.call import Call, admitted
from app.call.chats import make_turn
from app.call.jobs import encode_sent
from app.call.streams import respond
from app.call.token_texts import TokenTexts
from app.conversations.matching import num_system
from app.responses.answers import (
    PREFIX,
    ResponseAnswer,
    ResponseEvent,
    ResponsesRequest,
    whole_answer,
)
from app.responses.bodies import NO_STATE, RESPONSES_BODY, set_options
from app.responses.items import translate
from app.responses.stream import ResponseEvents
from app.route.decoding import shown
from app.route.fields import Message
from app.route.operation import EVENTS, GENERATION_ERRORS, IMAGE_ERRORS, Example, Operation
from app.route.parameters import SESSION_ID
from titopool.errors import ContextLengthExceeded, InvalidRequest, PromptTooLong

blueprint = Blueprint("responses", __name__)
ASKED = "What is 6 times 7?"
CALL = {
    "type": "function_call", "call_id": "call_1", "name": "multiply", "arguments": '{"a": 6, "b": 7}'
}  # fmt: skip
# Where a chat's messages and tools stand in errors.
_OF_CHAT = re.compile(r"^messages(\[\d+\]|\.\w+)*|(?<=\])\.function(?=\.)")


@blueprint.post("/v1/responses/")
@Operation(
    description=(
        "`input` has all items; in a session (`POST /sessions`), `previous_response_id` stands for those up to "
        "a response. With `stream`, the answer is events, each with its "
        "`type` as its name. Unknown fields are accepted and counted in `/metrics`."
    ),
    body=RESPONSES_BODY,
    answer=ResponseAnswer,
    other_media={EVENTS: ResponseEvent},
    errors=(*GENERATION_ERRORS, *IMAGE_ERRORS, ContextLengthExceeded),
    headers=(SESSION_ID,),
    examples={
        "text": Example(
            "A text, with ids and log-probabilities",
            {
                "input": ASKED,
                "max_output_tokens": 8,
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 2,
                "return_token_ids": True,
            },
        ),
        "items": Example(
            "A conversation in which a function was called",
            {
                "instructions": "Be brief.",
                "input": [
                    {"role": "user", "content": ASKED},
                    CALL,
                    {"type": "function_call_output", "call_id": "call_1", "output": "42"},
                ],
                "max_output_tokens": 8,
            },
        ),
        "stream": Example("A stream", {"input": ASKED, "max_output_tokens": 4, "stream": True}),
    },
)
def responses() -> Response:
    """Items in, a response out."""
    with admitted(RESPONSES_BODY) as (call, (fields, options, unknown)):
        call.accept_unknown(unknown)
        set_options(fields, options)
        fields.session_id = fields.session_id or call.session or fields.prompt_cache_key
        try:
            chat = translate(fields)
            if fields.previous_response_id is not None:
                chat.messages = _with_messages_before(
                    call, fields.previous_response_id, chat.messages
                )
            turn, request = make_turn(call, fields, chat, options)
        except InvalidRequest as error:
            raise _in_its_terms(error) from None
        # The items may have long texts, and images.
        fields.input = ""
        texts = None if fields.num_logprobs is None else TokenTexts(call, as_ids=False)
        asked = ResponsesRequest(turn, fields, texts)
        # Before anything is generated: the answer repeats them.
        encode_sent(orjson.dumps, [[asked.head()]], "tools, text.format", "tools")
        events = ResponseEvents(asked) if fields.stream else None
        return respond(call, request, whole=partial(whole_answer, asked), events=events)


def _with_messages_before(call: Call, response_id: str, messages: list[Message]) -> list[Message]:
    """The messages up to a response of the session, before others. As in OpenAI's API, only the request's
    own instructions hold."""
    if call.turn is None:
        raise InvalidRequest(
            f"previous_response_id: expected no value, got {shown(response_id)}: {NO_STATE}, or make a session "
            "with POST /sessions",
            param="previous_response_id",
        )
    known = call.turn.messages_until(response_id.removeprefix(PREFIX))
    num_own, num_known = num_system(messages), num_system(known)
    return [*messages[:num_own], *known[num_known:], *messages[num_own:]]


def _in_its_terms(error: InvalidRequest) -> InvalidRequest:
    """An error of a chat in the Responses API's terms: its field's names, and its code."""
    kind = ContextLengthExceeded if isinstance(error, PromptTooLong) else type(error)
    message = _OF_CHAT.sub(lambda found: "input" if found[0].startswith("m") else "", error.message)
    return kind(message, param="input" if error.param == "messages" else error.param)
