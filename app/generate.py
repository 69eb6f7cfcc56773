"""`POST /generate/`, a path of two protocols: TRL's and SGLang's."""

import msgspec
from flask import Blueprint, Response

from app.call.call import admitted
from app.route.components import Components, Schema
from app.route.long_lists import decode_object_in_pieces
from app.route.operation import EVENTS, GENERATION_ERRORS, IMAGE_ERRORS, MSGPACK, Example, Operation
from app.route.parameters import IDEMPOTENCY_KEY, SESSION_ID
from app.sglang.answers import SGLangCompletion
from app.sglang.bodies import (
    SOURCES,
    PromptFields,
    RequestFields,
    SGLangBody,
    body_schema,
    sglang_body,
)
from app.sglang.routes import generate_as_sglang
from app.trl.bodies import GENERATE_BODY as TRL_BODY
from app.trl.bodies import GenerateBody
from app.trl.routes import generate_as_trl
from titopool.answers.generation import BinaryGenerateAnswer, GenerateAnswer
from titopool.errors import InvalidRequest

blueprint = Blueprint("generate", __name__)


class GenerateDecoder:
    """Decodes the body of `POST /generate` in TRL's form or in SGLang's."""

    body_type = GenerateBody
    types = (*TRL_BODY.types, RequestFields, PromptFields)

    def decode(self, body: bytes, /) -> GenerateBody | SGLangBody:
        """Called by `app.route.decoding.decode_body`, which explains msgspec's errors.

        Raises:
            InvalidRequest: there is not exactly one of `prompts`, `input_ids` and `text`, or in
                SGLang's form a field is unknown, not supported, or of another type or range.
            msgspec.DecodeError: the body is not JSON, or not TRL's.
        """
        try:
            return TRL_BODY.decode(body)
        except msgspec.ValidationError:
            # SGLang's body fails at its first field.
            values = decode_object_in_pieces(body)
            given = [one for one in ("prompts", *SOURCES) if values.get(one) is not None]
            if given == ["prompts"]:
                raise
        if len(given) != 1:
            raise InvalidRequest(
                "prompts: expected one of prompts (TRL's form), input_ids and text (SGLang's form), "
                f"got {' and '.join(given) or 'none of them'}; leave the others out",
                param="prompts",
            )
        return sglang_body(values, given[0])

    def schema(self, components: Components) -> Schema:
        """As `app.route.decoding.DescribedDecoder`."""
        return {"anyOf": [TRL_BODY.schema(components), body_schema(components)]}


GENERATE_BODY = GenerateDecoder()


@blueprint.post("/generate/")
@Operation(
    summary="Generate from ids or text, as TRL's or SGLang's client does.",
    description="A body with `prompts` is TRL's and gets its answer, in MessagePack if `Accept` prefers "
    "it. A body with `input_ids` or `text` is SGLang's and gets an object, or a list for "
    "several completions, or with `stream` events.",
    body=GENERATE_BODY,
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
                "prompts": ["Hello, world"],
                "max_tokens": 8,
                "temperature": 0.7,
                "generation_kwargs": {"seed": 7, "stop": ["\n\n"]},
            },
        ),
        "sglang": Example(
            "SGLang's form",
            {
                "input_ids": [42, 1393, 14],
                "return_logprob": True,
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
)
def generate() -> Response:
    """Checks the whole body before it generates anything."""
    with admitted(GENERATE_BODY) as (call, body):
        if isinstance(body, SGLangBody):
            return generate_as_sglang(call, body)
        return generate_as_trl(call, body)
