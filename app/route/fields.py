"""Fields that bodies of several protocols have."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from titopool.errors import InvalidRequest
from titopool.settings.sampling import PositiveCount, SamplingOptions

# vLLM refuses an empty salt. A request's salt is a part of each of its jobs.
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
WeightVersion = Annotated[int, Meta(ge=0, le=2**62)]
# An OpenAI chat message; the model's chat template decides which fields matter.
Message = dict[str, Any]
Label = Annotated[str, Meta(max_length=256)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Size = Annotated[int, Meta(ge=0, le=2**40)]
# Of an update's tensors. The largest models have 150,000, with a matrix for each expert.
MAX_TENSORS = 2**18
Names = Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=MAX_TENSORS)]
Shapes = Annotated[list[Annotated[list[Size], Meta(max_length=16)]], Meta(max_length=MAX_TENSORS)]
# How many alternatives get a log-probability at each token.
NumLogprobs = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's `stream_options`, with vLLM's `continuous_usage_stats`."""

    # Send the usage in a last event.
    include_usage: bool = False
    # With `include_usage`: send the usage so far in every event.
    continuous_usage_stats: bool = False


class StreamedFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of all routes that stream, apart from sampling options."""

    model: str | None = None
    # The headers X-Request-Id and X-Session-ID as fields of the body.
    request_id: str | None = None
    session_id: str | None = None
    cache_salt: CacheSalt | None = None
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Wait until the pool serves this version of the weights, or a later one.
    min_weight_version: WeightVersion | None = None


class RouteFields(StreamedFields, forbid_unknown_fields=True, kw_only=True):
    """Fields that OpenAI's routes take, apart from sampling options."""

    mm_processor_kwargs: dict[str, Any] | None = None
    return_tokens_as_token_ids: bool = False
    # Each choice has the spans of weight versions in vLLM's form.
    return_weight_versions: bool = False
    response_format: dict[str, Any] | None = None
    prompt_logprobs: NumLogprobs | None = None


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


def check_stream(fields: StreamedFields, options: SamplingOptions) -> None:
    """Raises InvalidRequest for fields that contradict `stream`."""
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest(
            "stream_options: expected none without stream; set stream to true or leave "
            "stream_options out",
            param="stream_options",
        )
    if fields.stream and options.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs: expected none with stream, whose events cannot carry them; leave "
            "one of the two out",
            param="prompt_logprobs",
        )
