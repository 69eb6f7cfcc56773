"""vLLM's native routes for token ids, and render."""

from app.openapi.answers.native import TokensAnswer, TokensEvent
from app.openapi.answers.openai import Render
from app.openapi.operation import (
    COMMAND_ERRORS,
    GENERATION_ERRORS,
    IMAGE_ERRORS,
    Example,
    Operation,
)
from app.openapi.operations.generation import EVENTS
from app.openapi.operations.openai import MESSAGES, STREAMS
from app.openapi.parameters import IDEMPOTENCY_KEY, SESSION_ID
from app.schemas.inference import ABORT_BODY, GENERATE_BODY
from app.schemas.openai import CHAT_COMPLETIONS_BODY, COMPLETIONS_BODY

TAG = "inference"

OPERATIONS = {
    "inference.generate": Operation(
        tag=TAG,
        summary="The ids of one prompt in, the ids of its completions out.",
        description=STREAMS,
        body=GENERATE_BODY,
        answer=TokensAnswer,
        other_media={EVENTS: TokensEvent},
        errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
        headers=(SESSION_ID, IDEMPOTENCY_KEY),
        examples={
            "ids": Example(
                "Two completions",
                {
                    "token_ids": [42, 1393, 14], "return_token_ids": True,
                    "sampling_params": {"max_tokens": 8, "n": 2, "logprobs": 2},
                },
            ),
            "stream": Example(
                "A stream",
                {"token_ids": [42, 1393, 14], "sampling_params": {"max_tokens": 4}, "stream": True},
            ),
        },
    ),
    "inference.abort_requests": Operation(
        tag=TAG,
        description="A key that is no administrator's ends its own requests only.",
        body=ABORT_BODY,
        answer=None,
        errors=COMMAND_ERRORS,
        examples={"one": Example("One request", {"request_ids": ["rollout-17"]})},
    ),
    "render.render_chat": Operation(
        tag=TAG,
        summary="Messages in, a body for /inference/v1/generate out.",
        body=CHAT_COMPLETIONS_BODY,
        answer=Render,
        errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
        examples={"question": Example("A question", {"messages": MESSAGES, "max_tokens": 8})},
    ),
    "render.render_completions": Operation(
        tag=TAG,
        summary="Text or ids in, a body for /inference/v1/generate for each prompt out.",
        body=COMPLETIONS_BODY,
        answer=list[Render],
        errors=GENERATION_ERRORS,
        examples={"texts": Example("Two texts", {"prompt": ["Hello", "world"], "max_tokens": 8})},
    ),
}  # fmt: skip
