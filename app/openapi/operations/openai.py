"""OpenAI's routes, and routes of other chat APIs that are refused."""

from app.openapi.answers.openai import ChatAnswer, ChatEvent, CompletionsAnswer, Models
from app.openapi.errors import Error
from app.openapi.operation import GENERATION_ERRORS, IMAGE_ERRORS, Example, Operation
from app.openapi.operations.generation import EVENTS
from app.openapi.parameters import SESSION_ID
from app.schemas.openai import CHAT_COMPLETIONS_BODY, COMPLETIONS_BODY
from titopool.errors import NoReadyWorker

TAG = "openai"
STREAMS = "With `stream`, the answer is events; `[DONE]` ends them."
MESSAGES = [{"role": "user", "content": "What is 6 times 7?"}]

OPERATIONS = {
    "openai.completions": Operation(
        tag=TAG,
        description=STREAMS,
        body=COMPLETIONS_BODY,
        answer=CompletionsAnswer,
        other_media={EVENTS: CompletionsAnswer},
        errors=GENERATION_ERRORS,
        headers=(SESSION_ID,),
        examples={
            "text": Example("A text", {"prompt": "Hello, world", "max_tokens": 8, "logprobs": 1}),
            "ids": Example(
                "Ids, with the ids of the completion",
                {"prompt": [42, 1393, 14], "max_tokens": 8, "return_token_ids": True},
            ),
            "stream": Example(
                "A stream",
                {
                    "prompt": "Hello", "max_tokens": 4, "stream": True,
                    "stream_options": {"include_usage": True},
                },
            ),
        },
    ),
    "openai.chat_completions": Operation(
        tag=TAG,
        description=STREAMS,
        body=CHAT_COMPLETIONS_BODY,
        answer=ChatAnswer,
        other_media={EVENTS: ChatEvent},
        errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
        headers=(SESSION_ID,),
        examples={
            "question": Example(
                "A question, with ids and log-probabilities",
                {
                    "messages": MESSAGES, "max_tokens": 8, "logprobs": True, "top_logprobs": 2,
                    "return_token_ids": True, "return_weight_versions": True,
                },
            ),
            "stream": Example(
                "A stream", {"messages": MESSAGES, "max_tokens": 4, "stream": True}
            ),
        },
    ),
    "openai.chat_completions_of_tokens": Operation(
        tag=TAG,
        description=f"The engine gets exactly `tokens`. {STREAMS}",
        body=CHAT_COMPLETIONS_BODY,
        answer=ChatAnswer,
        other_media={EVENTS: ChatEvent},
        errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
        headers=(SESSION_ID,),
        examples={
            "ids": Example(
                "Ids with the messages that they stand for",
                {"messages": MESSAGES, "tokens": [42, 1393, 14], "max_tokens": 8},
            )
        },
    ),
    "models.models": Operation(
        tag=TAG,
        summary="The model and its adapters, as OpenAI's clients list them.",
        answer=Models,
        errors=(NoReadyWorker,),
    ),
    "other_apis.refuse": Operation(
        tag=TAG,
        summary="Not served: a 404 with the reason, as OpenAI's and Anthropic's clients read it.",
        answer=Error,
        status=404,
    ),
}  # fmt: skip
