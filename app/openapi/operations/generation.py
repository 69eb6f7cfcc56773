"""TRL's generating routes, scores, the tokenizer, and the comparison with a trainer."""

from app.openapi.answers.native import SGLangCompletion
from app.openapi.answers.tokens import (
    BinaryGenerateAnswer,
    BinarySequencesAnswer,
    DetokenizeAnswer,
    GenerateAnswer,
    MismatchAnswer,
    SequencesAnswer,
    TokenizeAnswer,
)
from app.openapi.operation import (
    GENERATION_ERRORS,
    IMAGE_ERRORS,
    MODEL_ERRORS,
    Example,
    Operation,
)
from app.openapi.parameters import IDEMPOTENCY_KEY, SESSION_ID
from app.schemas import sglang
from app.schemas.generation import (
    CHAT_BODY,
    DETOKENIZE_BODY,
    MISMATCH_BODY,
    SEQUENCES_BODY,
    TOKENIZE_BODY,
)
from titopool.errors import DeadlinePassed, PromptTooLong, RequestNotFound

TAG = "generate"
MSGPACK = "application/msgpack"
EVENTS = "text/event-stream"
_CHAT = [{"role": "user", "content": "What is 6 times 7?"}]

OPERATIONS = {
    "generate.generate": Operation(
        tag=TAG,
        summary="Generate from ids or text, as TRL's or SGLang's client does.",
        description=(
            "A body with `prompts` is TRL's and gets its answer, in MessagePack if `Accept` prefers "
            "it. A body with `input_ids` or `text` is SGLang's and gets an object, or a list for "
            "several completions, or with `stream` events."
        ),
        body=sglang.GENERATE_BODY,
        answer=(GenerateAnswer, SGLangCompletion, list[SGLangCompletion]),
        other_media={MSGPACK: BinaryGenerateAnswer, EVENTS: SGLangCompletion},
        errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
        headers=(SESSION_ID, IDEMPOTENCY_KEY),
        examples={
            "ids": Example(
                "Two completions of a prompt of ids",
                {"prompts": [[42, 1393, 14]], "n": 2, "max_tokens": 8, "logprobs": 2},
            ),
            "text": Example(
                "A text, with other sampling options",
                {
                    "prompts": ["Hello, world"], "max_tokens": 8, "temperature": 0.7,
                    "generation_kwargs": {"seed": 7, "stop": ["\n\n"]},
                },
            ),
            "sglang": Example(
                "SGLang's form",
                {
                    "input_ids": [42, 1393, 14], "return_logprob": True,
                    "sampling_params": {"max_new_tokens": 8, "temperature": 1.0},
                },
            ),
            "sglang_batch": Example(
                "SGLang's form with several prompts",
                {"text": ["Hello", "world"], "sampling_params": {"max_new_tokens": 4}},
            ),
            "sglang_stream": Example(
                "SGLang's form as a stream",
                {"text": "Hello", "sampling_params": {"max_new_tokens": 4}, "stream": True},
            ),
        },
    ),
    "chat.chat": Operation(
        tag=TAG,
        summary="Generate from conversations, as TRL's client does.",
        body=CHAT_BODY,
        answer=GenerateAnswer,
        other_media={MSGPACK: BinaryGenerateAnswer},
        errors=(*GENERATION_ERRORS, *IMAGE_ERRORS),
        headers=(SESSION_ID, IDEMPOTENCY_KEY),
        examples={"question": Example("A question", {"messages": [_CHAT], "max_tokens": 8})},
    ),
    "sequence_logprobs.get_sequence_logprobs": Operation(
        tag=TAG,
        summary="Score sequences: nothing is generated.",
        body=SEQUENCES_BODY,
        answer=(SequencesAnswer, BinarySequencesAnswer),
        errors=GENERATION_ERRORS,
        headers=(SESSION_ID,),
        examples={
            "json": Example(
                "Two sequences",
                {
                    "sequences": [[42, 1393, 14, 9], [5, 6, 7]], "prompt_lengths": [2, 0],
                    "top_logprobs": 2,
                },
            ),
            "binary": Example(
                "The same as arrays",
                {
                    "sequences": [[42, 1393, 14, 9]], "prompt_lengths": [2], "top_logprobs": 2,
                    "response_format": "binary",
                },
            ),
        },
    ),
    "tokenize.tokenize": Operation(
        tag=TAG,
        description="The body has either `prompt` or `messages`.",
        body=TOKENIZE_BODY,
        answer=TokenizeAnswer,
        errors=(*MODEL_ERRORS, PromptTooLong, DeadlinePassed),
        examples={
            "text": Example("A text", {"prompt": "Hello, world", "return_token_strs": True}),
            "messages": Example("Messages", {"messages": _CHAT}),
        },
    ),
    "tokenize.detokenize": Operation(
        tag=TAG,
        description="At most `max_model_len` ids.",
        body=DETOKENIZE_BODY,
        answer=DetokenizeAnswer,
        errors=(*MODEL_ERRORS, DeadlinePassed),
        examples={"ids": Example("Ids", {"tokens": [42, 1393, 14]})},
    ),
    "mismatch.mismatch": Operation(
        tag=TAG,
        summary="Compare a trainer's log-probabilities with those that a request was answered with.",
        description="Values are from -10000 to 0: less is a mask's value.",
        body=MISMATCH_BODY,
        answer=MismatchAnswer,
        errors=(*MODEL_ERRORS, RequestNotFound),
        examples={
            "one": Example(
                "A request with one completion of two tokens",
                {"request_id": "rollout-17", "logprobs": [[-7.66, -9.08]]},
            )
        },
    ),
}  # fmt: skip
