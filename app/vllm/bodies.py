"""Bodies of `/inference/v1/…`, with the fields of vLLM 0.27 to 0.33, and of its tokenization.

`tests/engine/text/test_vllm_fields.py` compares them with the installed vLLM.
"""

from typing import Any, Literal

import msgspec

from app.inputs.features import ContentPart, Features
from app.route.components import Components, Schema
from app.route.decoding import convert, decode_object
from app.route.field_schemas import fields_of, nullable, object_of, required_of, unused_fields
from app.route.fields import Message, StreamedFields, check_stream
from app.route.unused_fields import (
    UNUSED_OF_GENERATE,
    UNUSED_OF_TOKENIZE,
    UNUSED_SAMPLING,
    used_fields,
)
from titopool.settings.grammars import StructuredOutputs
from titopool.settings.sampling import SamplingOptions


class GenerateFields(StreamedFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /inference/v1/generate`."""

    # Of one prompt.
    token_ids: list[int]
    # vLLM's SamplingParams.
    sampling_params: dict[str, Any]
    # "npy": as vLLM's server has them, in place of the object that renderers reads. A client that
    # sends the field needs a server that returns routed experts.
    routed_experts_format: Literal["object", "npy"] | None = None
    # The prompt's images: with expanded placeholders in `token_ids`, or single ones.
    features: Features | None = None
    content_parts: list[ContentPart] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.features is not None and self.content_parts:
            raise ValueError(
                "content_parts: expected none with features, got both; send the images once"
            )

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer has the expanded prompt and the ranges of its images."""
        return self.return_token_ids or bool(self.content_parts)


class InferenceAbortBody(msgspec.Struct, kw_only=True):
    """`POST /inference/v1/abort_requests`; as in vLLM's server, other fields have no effect."""

    request_ids: list[str]


class TokensDecoder:
    """Decodes a body to the route's fields and the sampling options; null means left out."""

    body_type = GenerateFields
    types = (GenerateFields, SamplingOptions, StructuredOutputs)

    def decode(self, body: bytes, /) -> tuple[GenerateFields, SamplingOptions]:
        """Called by `app.route.decoding.decode_body`, which explains msgspec's errors.

        Raises:
            InvalidRequest: a field is unknown, not supported, or of another type or range.
            msgspec.DecodeError: the body is not a JSON object.
        """
        fields = convert(used_fields(decode_object(body), UNUSED_OF_GENERATE), GenerateFields)
        options = _sampling_options(fields.sampling_params)
        check_stream(fields, options)
        return fields, options

    def schema(self, components: Components) -> Schema:
        """As `app.route.decoding.DescribedDecoder`."""
        options = {
            **nullable(fields_of(components, SamplingOptions, without=UNUSED_SAMPLING)),
            **unused_fields(UNUSED_SAMPLING),
        }
        options["max_tokens"] = {**options["max_tokens"], "default": None}
        about = "vLLM's SamplingParams. Null means left out; without `max_tokens` the context ends."
        required = required_of(components, GenerateFields)
        fields = {
            **unused_fields(UNUSED_OF_GENERATE),
            **nullable(fields_of(components, GenerateFields), but=required),
            "sampling_params": components.add("SamplingParams", object_of(about, options)),
        }
        about = "`POST /inference/v1/generate`. Null means left out."
        return components.add("TokensBody", object_of(about, fields, required))


GENERATE_BODY = TokensDecoder()


def _sampling_options(sent: dict[str, Any]) -> SamplingOptions:
    """The options of `sampling_params`; what the server sets itself has no effect."""
    # Without a limit a completion ends with the context. As in vLLM's server, all requests get
    # routed experts from a server that returns them.
    values: dict[str, Any] = {"max_tokens": None, "routed_experts_prompt_start": 0}
    values |= used_fields(sent, UNUSED_SAMPLING, "sampling_params.")
    return convert(values, SamplingOptions, "sampling_params")


# ---- tokenization ----------------------------------------------------------------------


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /tokenize`, as vLLM's server takes it: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    # Default: true for a prompt, false for messages.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # With `trust_request_chat_template` only, as the one among `chat_template_kwargs`.
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class TokenizeDecoder:
    """Decodes the body of `POST /tokenize`; null means left out, as in vLLM's clients."""

    body_type = TokenizeBody
    types = (TokenizeBody,)

    def decode(self, body: bytes, /) -> TokenizeBody:
        """Called by `app.route.decoding.decode_body`, which explains msgspec's errors.

        Raises:
            InvalidRequest: a field is unknown, not supported, or of another type.
            msgspec.DecodeError: the body is not a JSON object.
        """
        return convert(used_fields(decode_object(body), UNUSED_OF_TOKENIZE), TokenizeBody)

    def schema(self, components: Components) -> Schema:
        """As `app.route.decoding.DescribedDecoder`."""
        return components.ref(TokenizeBody)


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /detokenize`, as vLLM's server takes it."""

    tokens: list[int]
    model: str | None = None
    # Not vLLM's: also the text of each token.
    return_token_texts: bool = False


TOKENIZE_BODY = TokenizeDecoder()
DETOKENIZE_BODY = msgspec.json.Decoder(DetokenizeBody)
