"""Bodies of OpenAI's routes: a route's fields and vLLM's sampling options in one object."""

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from app.schemas.decoding import convert
from app.schemas.generation import CacheSalt, Message, WeightVersion
from titopool.errors import InvalidRequest
from titopool.settings.sampling import (
    SERVER_SET_FIELDS,
    UNSUPPORTED_FIELDS,
    PositiveCount,
    SamplingOptions,
)

# Accepted and ignored: they describe the client or the request, not the generation.
IGNORED = frozenset(("user", "metadata", "store", "service_tier", "safety_identifier",
                     "prompt_cache_key", "request_id", "session_id"))  # fmt: skip
# How many alternatives get a log-probability at each token.
NumLogprobs = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's `stream_options`, with vLLM's `continuous_usage_stats`."""

    # Send the usage in a last event.
    include_usage: bool = False
    # With `include_usage`: send the usage so far in every event.
    continuous_usage_stats: bool = False


class RouteFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both routes take, apart from sampling options."""

    model: str | None = None
    cache_salt: CacheSalt | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    prompt_logprobs: NumLogprobs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Wait until the pool serves this version of the weights, or a later one.
    min_weight_version: WeightVersion | None = None


class CompletionsFields(RouteFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/completions`."""

    # One text, the ids of one prompt, a list of texts, or a list of lists of ids.
    prompt: str | list[str | int | list[int]]
    add_special_tokens: bool = True
    logprobs: NumLogprobs | None = None


class ChatFields(RouteFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`, and with `tokens` `POST /v1/chat/completions/tokens`."""

    messages: list[Message]
    tokens: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    chat_template_kwargs: dict[str, Any] = {}
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


# Fields that this server does not support, each with the values that request nothing: those are
# accepted.
REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI's.
    "audio": (), "best_of": (1,), "echo": (False,), "function_call": (), "functions": (),
    "modalities": (["text"],), "prediction": (), "suffix": ("",), "verbosity": (),
    "web_search_options": (),
    # vLLM's. A client's `chat_template` would run as code in this process.
    "add_special_tokens": (False,), "chat_template": (), "documents": (), "ec_transfer_params": (),
    "kv_transfer_params": (), "length_penalty": (1.0,), "logprob_token_ids": (),
    "media_io_kwargs": (), "mm_payload": ("tensors",), "priority": (0,), "prompt_embeds": (),
    "return_assistant_tokens_mask": (False,), "return_mm_kwargs": (),
    "return_prompt_text": (False,), "return_token_offsets": (False,),
    "truncate_prompt_tokens": (), "truncation_side": (), "use_beam_search": (False,),
    "vllm_xargs": (),
}  # fmt: skip
Fields = TypeVar("Fields", bound=RouteFields)


class OpenAIDecoder(Generic[Fields]):
    """Decodes a body to the route's fields and the sampling options; null means left out."""

    def __init__(self, fields_type: type[Fields]):
        self._fields_type = fields_type

    def decode(self, body: bytes, /) -> tuple[Fields, SamplingOptions]:
        """Called by `app.schemas.decoding.decode_body`, which explains msgspec's errors.

        Raises:
            InvalidRequest: a field is unknown, not supported, or of another type or range.
            msgspec.DecodeError: the body is not a JSON object.
        """
        route_values, sampling_values = {}, {}
        for name, value in _decode_object(body).items():
            if value is None or name in IGNORED:
                continue
            if name in self._fields_type.__struct_fields__:
                route_values[name] = value
            elif name not in REFUSED:
                if reason := SERVER_SET_FIELDS.get(name) or UNSUPPORTED_FIELDS.get(name):
                    raise InvalidRequest(f"{name}: {reason}; leave it out", param=name)
                sampling_values[name] = value
            elif value not in REFUSED[name]:
                raise InvalidRequest(
                    f"{name}: this server does not support it; leave it out", param=name
                )
        fields = convert(route_values, self._fields_type)
        if fields.response_format is not None:
            sampling_values |= _structured_outputs(fields.response_format, sampling_values)
        options = convert(sampling_values, SamplingOptions)
        options.detokenize = True
        options.prompt_logprobs = fields.prompt_logprobs
        _check_stream(fields)
        return fields, options


COMPLETIONS_BODY = OpenAIDecoder(CompletionsFields)
CHAT_COMPLETIONS_BODY = OpenAIDecoder(ChatFields)


def _check_stream(fields: RouteFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest(
            "stream_options: expected none without stream; set stream to true or leave "
            "stream_options out",
            param="stream_options",
        )
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs: expected none with stream, whose events cannot carry them; leave "
            "one of the two out",
            param="prompt_logprobs",
        )


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
