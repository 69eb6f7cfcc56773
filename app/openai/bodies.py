"""Bodies of OpenAI's routes: a route's fields and vLLM's sampling options in one object."""

from typing import Any, TypeVar

from app.route.components import Components, Schema
from app.route.decoding import beginning, convert
from app.route.fields import ChatFields, NumLogprobs, RouteFields, check_stream
from app.route.open_bodies import OptionsDecoder
from app.route.unused_fields import CHAT_ONLY, UNUSED, check_chat_only
from titopool.errors import InvalidRequest
from titopool.settings.grammars import StructuredOutputs
from titopool.settings.sampling import PositiveCount, SamplingOptions


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


Fields = TypeVar("Fields", bound=RouteFields)
_OF_CHAT = {"description": "Of a chat: without effect where the prompt is ids, else refused."}


class OpenAIDecoder(OptionsDecoder[Fields]):
    """Decodes a body of OpenAI's routes."""

    def __init__(self, fields_type: type[Fields]):
        super().__init__(fields_type, UNUSED)

    def decode(self, body: bytes, /) -> tuple[Fields, SamplingOptions]:
        """Called by `app.route.decoding.decode_body`, which explains msgspec's errors.

        Raises:
            InvalidRequest, msgspec.DecodeError: as `read`, and for an unknown field.
        """
        fields, options, unknown = self.read(body)
        # Its error names the first of them.
        convert(dict.fromkeys(name for name in unknown if name not in CHAT_ONLY), SamplingOptions)
        for name in unknown:
            check_chat_only(name, getattr(fields, "prompt", None))
        if fields.response_format is not None:
            _set_structured_outputs(fields.response_format, options)
        options.prompt_logprobs = fields.prompt_logprobs
        check_stream(fields, options)
        return fields, options

    def schema(self, components: Components) -> Schema:
        """As `app.route.decoding.DescribedDecoder`."""
        others = CHAT_ONLY if self.body_type is CompletionsFields else ()
        schema = self.schema_of(components, {name: dict(_OF_CHAT) for name in others})
        return components.add(f"OpenAI{self.body_type.__name__.replace('Fields', 'Body')}", schema)


COMPLETIONS_BODY = OpenAIDecoder(CompletionsFields)
CHAT_COMPLETIONS_BODY = OpenAIDecoder(ChatFields)


def _set_structured_outputs(response_format: dict[str, Any], options: SamplingOptions) -> None:
    """Takes OpenAI's `response_format` into vLLM's `structured_outputs`."""
    if options.structured_outputs is not None:
        raise InvalidRequest(
            "response_format: expected either response_format or structured_outputs, got both; "
            "leave one out",
            param="response_format",
        )
    match response_format:
        case {"type": "text"}:
            pass
        case {"type": "json_object"}:
            options.structured_outputs = StructuredOutputs(json_object=True)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            options.structured_outputs = StructuredOutputs(json=schema)
        case _:
            raise InvalidRequest(
                "response_format: expected type text, json_object, or json_schema with "
                f"json_schema.schema, got {beginning(response_format, 100)}",
                param="response_format",
            )
