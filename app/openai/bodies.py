"""Bodies of OpenAI's routes: a route's fields and vLLM's sampling options in one object."""

from typing import Any, Generic, Literal, TypeVar

import msgspec

from app.route.components import Components, Schema
from app.route.decoding import convert, decode_object
from app.route.field_schemas import fields_of, nullable, object_of, required_of, unused_fields
from app.route.fields import Message, NumLogprobs, StreamedFields, check_stream
from app.route.unused_fields import CHAT_ONLY, UNUSED, check_chat_only, check_unused
from titopool.errors import InvalidRequest
from titopool.settings.grammars import StructuredOutputs
from titopool.settings.sampling import PositiveCount, SamplingOptions


class RouteFields(StreamedFields, forbid_unknown_fields=True, kw_only=True):
    """Fields that both routes take, apart from sampling options."""

    mm_processor_kwargs: dict[str, Any] | None = None
    return_tokens_as_token_ids: bool = False
    # Each choice has the spans of weight versions in vLLM's form.
    return_weight_versions: bool = False
    response_format: dict[str, Any] | None = None
    prompt_logprobs: NumLogprobs | None = None


class CompletionsFields(RouteFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/completions`."""

    # One text, the ids of one prompt, a list of texts, or a list of lists of ids.
    prompt: str | list[str | int | list[int]]
    add_special_tokens: bool = True
    # The number of alternatives. Gateways that turn chats into ids send a chat's fields: true, with
    # `top_logprobs`, by default 1 as in vLLM's server, and `max_completion_tokens`.
    logprobs: NumLogprobs | bool | None = None
    top_logprobs: NumLogprobs = 0
    max_completion_tokens: PositiveCount | None = None
    # Each choice's text, and its log-probabilities if requested, begin with the prompt's.
    echo: bool = False

    def __post_init__(self) -> None:
        if self.top_logprobs and self.logprobs is not True:
            raise ValueError(
                "top_logprobs: expected 0 unless logprobs is true; send the number as logprobs"
            )
        if self.echo and self.stream:
            raise ValueError(
                "echo: expected false with stream, whose events do not repeat the prompt"
            )

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives at each token; None: no log-probabilities."""
        if self.logprobs is True:
            return self.top_logprobs or 1
        return None if self.logprobs is False else self.logprobs


class ChatFields(RouteFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`, and with `tokens` `POST /v1/chat/completions/tokens`."""

    messages: list[Message]
    tokens: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    # With `trust_request_chat_template` only, as the one among `chat_template_kwargs`.
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # None: "auto" with tools, "none" without.
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )

    def __post_init__(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: expected 0 without logprobs; set logprobs to true")


Fields = TypeVar("Fields", bound=RouteFields)
_OF_CHAT = {"description": "Of a chat: without effect where the prompt is ids, else refused."}


class OpenAIDecoder(Generic[Fields]):
    """Decodes a body to the route's fields and the sampling options; null means left out."""

    def __init__(self, fields_type: type[Fields]):
        self.body_type = fields_type
        self.types = (fields_type, SamplingOptions, StructuredOutputs)

    def decode(self, body: bytes, /) -> tuple[Fields, SamplingOptions]:
        """Called by `app.route.decoding.decode_body`, which explains msgspec's errors.

        Raises:
            InvalidRequest: a field is unknown, not supported, or of another type or range.
            msgspec.DecodeError: the body is not a JSON object.
        """
        values = decode_object(body)
        route_values, sampling_values = {}, {}
        for name, value in values.items():
            if value is None:
                continue
            if name in self.body_type.__struct_fields__:
                route_values[name] = value
            elif name in UNUSED:
                check_unused(name, value, UNUSED[name])
            elif name in CHAT_ONLY:
                check_chat_only(name, values.get("prompt"))
            else:
                sampling_values[name] = value
        fields = convert(route_values, self.body_type)
        if fields.response_format is not None:
            sampling_values |= _structured_outputs(fields.response_format, sampling_values)
        options = convert(sampling_values, SamplingOptions)
        options.detokenize = True
        options.prompt_logprobs = fields.prompt_logprobs
        check_stream(fields, options)
        return fields, options

    def schema(self, components: Components) -> Schema:
        """As `app.route.decoding.DescribedDecoder`: both in one object, and fields without effect."""
        fields = {
            **nullable(fields_of(components, SamplingOptions, without=UNUSED)),
            **unused_fields(UNUSED),
            **(
                {name: dict(_OF_CHAT) for name in CHAT_ONLY}
                if self.body_type is CompletionsFields
                else {}
            ),
            **nullable(
                fields_of(components, self.body_type), but=required_of(components, self.body_type)
            ),
        }
        about = components.struct(self.body_type)["description"] + " Null means left out."
        name = f"OpenAI{self.body_type.__name__.replace('Fields', 'Body')}"
        return components.add(
            name, object_of(about, fields, required_of(components, self.body_type))
        )

    @property
    def honoured(self) -> set[str]:
        """The fields that have an effect."""
        return {*self.body_type.__struct_fields__, *SamplingOptions.__struct_fields__}


COMPLETIONS_BODY = OpenAIDecoder(CompletionsFields)
CHAT_COMPLETIONS_BODY = OpenAIDecoder(ChatFields)


def _structured_outputs(
    response_format: dict[str, Any], sampling_values: dict[str, Any]
) -> dict[str, Any]:
    """OpenAI's `response_format` as vLLM's `structured_outputs`."""
    if sampling_values.get("structured_outputs"):
        raise InvalidRequest(
            "response_format: expected either response_format or structured_outputs, got both; "
            "leave one out",
            param="response_format",
        )
    match response_format:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"structured_outputs": {"json_object": True}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"structured_outputs": {"json": schema}}
    raise InvalidRequest(
        "response_format: expected type text, json_object, or json_schema with json_schema.schema, "
        f"got {str(response_format)[:100]}",
        param="response_format",
    )
