"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's bodies and responses."""

from functools import partial

from flask import Blueprint, Response

from app.anthropic.answers import (
    AnthropicError,
    MessageAnswer,
    MessageEvent,
    TokenCount,
    in_shape,
    whole_answer,
)
from app.anthropic.bodies import COUNT_BODY, MESSAGES_BODY, set_options
from app.anthropic.conversation import chat_of
from app.anthropic.stream import MessageEvents
from app.call.call import admitted
from app.call.chats import make_turn
from app.call.jobs import expanded_ids
from app.call.streams import respond
from app.route.operation import (
    EVENTS,
    GENERATION_ERRORS,
    IMAGE_ERRORS,
    QUESTION,
    Example,
    Operation,
)
from app.route.parameters import SESSION_ID
from titopool.settings.sampling import SamplingOptions

blueprint = Blueprint("anthropic", __name__)
blueprint.after_request(in_shape)


@blueprint.post("/v1/messages/")
@Operation(
    body=MESSAGES_BODY,
    answer=MessageAnswer,
    other_media={EVENTS: MessageEvent},
    error=AnthropicError,
    errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
    headers=(SESSION_ID,),
    examples={
        "question": Example(
            "A question, with the ids that were sampled",
            {"messages": QUESTION, "max_tokens": 8, "return_token_ids": True},
        ),
        "stream": Example("A stream", {"messages": QUESTION, "max_tokens": 4, "stream": True}),
    },
)
def messages() -> Response:
    """Messages in, a message out, in Anthropic's form.

    Unknown fields are accepted and counted. The events of a stream have names, and `message_stop` is
    the last.
    """
    with admitted(MESSAGES_BODY) as (call, sent):
        call.accept_unknown(sent.unknown)
        fields = sent.fields
        set_options(sent, can_limit_thoughts=bool(call.facts.reasoning_parser))
        chat = chat_of(fields)
        fields.messages, fields.system, fields.tools = [], None, None
        user_id = fields.metadata.user_id if fields.metadata else None
        fields.session_id = fields.session_id or call.session or user_id
        turn, request = make_turn(call, fields, chat, sent.options)
        events = MessageEvents(turn) if fields.stream else None
        return respond(call, request, whole=partial(whole_answer, turn), events=events)


@blueprint.post("/v1/messages/count_tokens/")
@Operation(
    body=COUNT_BODY,
    error=AnthropicError,
    errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
    examples={"question": Example("A question", {"messages": QUESTION})},
)
def count_tokens() -> TokenCount:
    """How many tokens the prompt of a conversation has, with those of its images."""
    with admitted(COUNT_BODY) as (call, sent):
        call.accept_unknown(sent.unknown)
        sent.fields.stream = False
        options = SamplingOptions(max_tokens=1)
        turn, request = make_turn(call, sent.fields, chat_of(sent.fields), options)
        if not turn.prompt.images.images:
            return TokenCount(input_tokens=len(turn.prompt.token_ids))
        (ids,) = expanded_ids([turn.prompt], call.render_images(request))
        return TokenCount(input_tokens=len(ids))
