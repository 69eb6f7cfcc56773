"""The bodies of OpenAI's routes: fields of the route, and vLLM's sampling options beside them."""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from app.schemas.generation import CacheSalt, Message, explain, field_of
from titopool.errors import InvalidRequest
from titopool.settings.sampling import (
    SERVER_SET_FIELDS,
    UNSUPPORTED_FIELDS,
    PositiveCount,
    SamplingOptions,
)
from titopool.wire.messages import WorkerFacts

# Known and of no effect here: what a client says of itself.
IGNORED = frozenset(("user", "metadata", "store", "service_tier", "safety_identifier",
                     "prompt_cache_key", "request_id", "session_id"))  # fmt: skip
# Of log-probabilities at each token.
Entries = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_read_json = msgspec.json.Decoder(dict[str, Any]).decode


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a stream tells beside its text."""

    # A last chunk with the usage; with the other, every chunk has the usage so far.
    include_usage: bool = False
    continuous_usage_stats: bool = False


class RouteFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both routes take beside sampling options."""

    model: str | None = None
    cache_salt: CacheSalt | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    prompt_logprobs: Entries | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


class CompletionsFields(RouteFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/completions`."""

    # A text, its ids, or several of one kind.
    prompt: str | list[str | int | list[int]]
    add_special_tokens: bool = True
    logprobs: Entries | None = None


class ChatFields(RouteFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/chat/completions`, and with `tokens` `POST /v1/chat/completions/tokens`."""

    messages: list[Message]
    tokens: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    logprobs: bool = False
    top_logprobs: Entries = 0
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
            raise ValueError("top_logprobs: expected logprobs to be true with it")


# Not taken; each with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI's.
    "audio": (), "best_of": (1,), "echo": (False,), "function_call": (), "functions": (),
    "modalities": (["text"],), "prediction": (), "suffix": ("",), "verbosity": (),
    "web_search_options": (),
    # vLLM's. A template that a client sends would run here.
    "add_special_tokens": (False,), "chat_template": (), "documents": (), "ec_transfer_params": (),
    "kv_transfer_params": (), "length_penalty": (1.0,), "logprob_token_ids": (),
    "media_io_kwargs": (), "mm_payload": ("tensors",), "priority": (0,), "prompt_embeds": (),
    "return_assistant_tokens_mask": (False,), "return_mm_kwargs": (), "return_prompt_text": (False,), "return_token_offsets": (False,),
    "truncate_prompt_tokens": (), "truncation_side": (), "use_beam_search": (False,),
    "vllm_xargs": (),
}  # fmt: skip
Fields = TypeVar("Fields", bound=RouteFields)


def read(
    body: bytes, fields_type: type[Fields], facts: WorkerFacts
) -> tuple[Fields, SamplingOptions]:
    """The route's fields and the sampling options of a body; null means left out.

    Raises:
        InvalidRequest: a field is unknown, not supported, or of another type or range.
    """
    given = {name: value for name, value in _decoded(body).items() if value is not None}
    of_route, of_sampling = {}, {}
    for name, value in given.items():
        if name in fields_type.__struct_fields__:
            of_route[name] = value
        elif name in IGNORED or (name in REFUSED and value in REFUSED[name]):
            continue
        elif reason := _why_not(name):
            raise InvalidRequest(f"{name}: {reason}; leave it out", param=name)
        else:
            of_sampling[name] = value
    fields = _converted(of_route, fields_type)
    if fields.response_format is not None:
        of_sampling |= _structured(fields.response_format, of_sampling)
    options = _converted(of_sampling, SamplingOptions)
    options.detokenize = True
    options.prompt_logprobs = fields.prompt_logprobs
    _check_stream(fields)
    return fields, options


def _check_stream(fields: RouteFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest(
            "stream_options: expected none without stream; set stream or leave them out",
            param="stream_options",
        )
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs: expected none with stream, whose chunks have no place for them",
            param="prompt_logprobs",
        )


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return _read_json(body)
    except (
        msgspec.ValidationError,
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:
        raise InvalidRequest(f"expected a body in JSON, got something else: {error}") from None


def _why_not(name: str) -> str | None:
    if name in REFUSED:
        return "this server does not have it"
    return SERVER_SET_FIELDS.get(name) or UNSUPPORTED_FIELDS.get(name)


Converted = TypeVar("Converted")


def _converted(values: dict[str, Any], wanted: type[Converted]) -> Converted:
    try:
        return msgspec.convert(values, wanted, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest(explain(error), param=field_of(error)) from None


def _structured(wanted: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's response_format as vLLM's structured_outputs."""
    if options.get("structured_outputs"):
        raise InvalidRequest(
            "response_format: expected either it or structured_outputs, got both",
            param="response_format",
        )
    match wanted:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"structured_outputs": {"json_object": True}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"structured_outputs": {"json": schema}}
    raise InvalidRequest(
        "response_format: expected type text, json_object, or json_schema with json_schema.schema, "
        f"got {str(wanted)[:100]}",
        param="response_format",
    )
