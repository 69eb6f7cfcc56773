"""The body of `/v1/responses`: OpenAI's fields, titopool's own and vLLM's sampling options.

Follows `openai.types.responses.ResponseCreateParams`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from app.route.decoding import beginning
from app.route.fields import StreamedFields
from app.route.open_bodies import OpenDecoder
from app.route.unused_fields import Unused
from titopool.errors import InvalidRequest
from titopool.settings.grammars import StructuredOutputs
from titopool.settings.sampling import PositiveCount, SamplingOptions

LOGPROBS = "message.output_text.logprobs"
# Of a tool. Others have no effect.
TOOL_FIELDS = ("name", "description", "parameters", "strict")
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How much the model thinks, for chat templates that read it."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # Without effect: reasoning is shown as it is.
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A grammar of the text; `name` and `schema` belong to `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    # Without effect: the text always follows the schema.
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """The form of the text."""

    format: TextFormat = field(default_factory=lambda: TextFormat(type="text"))
    # Only `medium`.
    verbosity: str | None = None


class ObfuscationOptions(msgspec.Struct, kw_only=True):
    """The Responses API's `stream_options`."""

    # Without effect: events have no padding.
    include_obfuscation: bool = True


class ResponsesFields(StreamedFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses`."""

    # A user's text, or items.
    input: str | list[dict[str, Any]]
    # A system message before all others.
    instructions: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: PositiveCount | None = None
    # With `message.output_text.logprobs` in `include`: the number of alternatives at each token.
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    text: TextOptions = field(default_factory=TextOptions)
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    # Encrypted reasoning is never made: reasoning comes as text.
    include: list[str] = field(default_factory=list)
    # The answer repeats it.
    metadata: dict[str, str] = field(default_factory=dict)
    # In a session: the response after whose messages `input` follows.
    previous_response_id: str | None = None
    # Stands for `session_id` where that is missing.
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None
    stream_options: ObfuscationOptions | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for one in self.include:
            if one not in INCLUDED:
                raise ValueError(
                    f"include: expected {' or '.join(INCLUDED)}, got {one[:60]!r}, which nothing "
                    "here makes; leave it out"
                )

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives at each token; None: no log-probabilities."""
        return self.top_logprobs if LOGPROBS in self.include else None


NO_STATE = "no response is kept; send all items as input"
UNUSED: dict[str, Unused] = {
    "background": Unused("a response is made while its client waits", (False,)),
    "context_management": Unused("no context is shortened; send a shorter input"),
    "conversation": Unused(NO_STATE),
    "image": Unused("images are read as they are", ({"context_compression": "disabled"},)),
    "max_tool_calls": Unused("it limits built-in tools, and there are none", accepted=None),
    "moderation": Unused("nothing is moderated"),
    "prompt": Unused("no templates of prompts are kept; send instructions and input"),
    "prompt_cache_options": Unused("the prefix cache has none", accepted=None),
    "prompt_cache_retention": Unused("the prefix cache has none", accepted=None),
    "access_programs": Unused("it describes the client, not the generation", accepted=None),
    "truncation": Unused("no prompt is shortened; send a shorter one", ("disabled",)),
    # vLLM's.
    "enable_response_messages": Unused("no answer has a prompt's messages", (False,)),
    "previous_input_messages": Unused(NO_STATE),
    # Of chats.
    "include_reasoning": Unused("reasoning is an item of its own", (True,)),
    "logprobs": Unused(f'send "include": ["{LOGPROBS}"] and top_logprobs', (False,)),
    "max_completion_tokens": Unused("use max_output_tokens"),
    "max_tokens": Unused("use max_output_tokens"),
    "messages": Unused("use input"),
    "reasoning_effort": Unused("use reasoning.effort"),
    "response_format": Unused("use text.format"),
}
RESPONSES_BODY = OpenDecoder(ResponsesFields, UNUSED)


def set_options(fields: ResponsesFields, options: SamplingOptions) -> None:
    """Sets the sampling options that the API has under other names.

    Raises:
        InvalidRequest: `text` is malformed, not served, or stands beside `structured_outputs`.
    """
    options.max_tokens = fields.max_output_tokens
    options.logprobs = fields.num_logprobs
    form, verbosity = fields.text.format, fields.text.verbosity
    if verbosity not in (None, "medium"):
        raise _wrong_text(
            f"verbosity: expected medium, as no chat template reads it, got {beginning(verbosity, 60, str)!r}; write "
            "into instructions how long a text shall be"
        )
    if form.type == "text":
        return
    if options.structured_outputs is not None:
        raise _wrong_text("format: expected type text beside structured_outputs; leave one out")
    if form.type == "json_object":
        options.structured_outputs = StructuredOutputs(json_object=True)
    elif form.name is not None and form.schema is not None:
        options.structured_outputs = StructuredOutputs(json=form.schema)
    else:
        raise _wrong_text("format: expected name and schema with json_schema; send both")


def _wrong_text(message: str) -> InvalidRequest:
    return InvalidRequest(f"text.{message}", param="text")
