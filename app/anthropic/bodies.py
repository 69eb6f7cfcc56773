"""Bodies of Anthropic's routes, with vLLM's sampling options and this server's fields as extensions."""

from typing import Any, Literal

import msgspec

from app.route.fields import Message, StreamedFields
from app.route.open_bodies import OpenDecoder, Sent
from app.route.unused_fields import Unused
from titopool.errors import InvalidRequest
from titopool.settings.grammars import StructuredOutputs
from titopool.settings.sampling import PositiveCount


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the template asks for thoughts, and how many tokens they may have."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: PositiveCount | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The JSON schema of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How much the model thinks, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    # With the type tool.
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Metadata(msgspec.Struct, kw_only=True):
    """Who asks. Requests of one user prefer the same worker, unless `session_id` says otherwise."""

    user_id: str | None = None


class ContextManagement(msgspec.Struct, kw_only=True):
    """What Anthropic's service leaves out of a conversation."""

    edits: list[dict[str, Any]] = []


class ConversationFields(StreamedFields, kw_only=True):
    """`POST /v1/messages/count_tokens`: a conversation in Anthropic's form."""

    messages: list[Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.tool_choice and (self.tool_choice.type == "tool") != (
            self.tool_choice.name is not None
        ):
            raise ValueError("tool_choice: expected a name with the type tool, and with no other")
        edits = self.context_management.edits if self.context_management else ()
        if any(one.get("keep") not in ("all", {"type": "all"}) for one in edits):
            raise ValueError(
                'context_management: expected no edits but those that keep "all", as the server leaves '
                "nothing of a conversation out; edit the messages that you send"
            )


class MessagesFields(ConversationFields, kw_only=True):
    """`POST /v1/messages`: a conversation in Anthropic's form, and how it goes on."""

    max_tokens: PositiveCount
    stop_sequences: list[str] | None = None


_ABOUT_CLIENT = Unused("it describes the client, not the generation", accepted=None)
UNUSED: dict[str, Unused] = {
    "billing_policy": _ABOUT_CLIENT,
    "cache_control": Unused("the prefix cache needs no marks", accepted=None),
    "compaction": Unused("the server shortens no conversation; ask for a summary in a message"),
    "container": Unused("no code runs in the server"),
    "diagnostics": Unused("usage.cache_read_input_tokens says what was cached", accepted=None),
    "fallback_credit_token": _ABOUT_CLIENT,
    "fallbacks": Unused("the model declines nothing", accepted=None),
    "inference_geo": _ABOUT_CLIENT,
    "logprobs": Unused(
        "send return_token_ids, which returns those of the sampled tokens", (False,)
    ),
    "mcp_servers": Unused("the server calls no tools; list them in tools"),
    "output_format": Unused("send output_config.format"),
    "service_tier": _ABOUT_CLIENT,
    "speed": _ABOUT_CLIENT,
    "stop": Unused("send stop_sequences"),
    "thread": Unused("the server keeps no conversation; send all messages"),
    "user_profile_id": _ABOUT_CLIENT,
    "workspace_id": _ABOUT_CLIENT,
}
MESSAGES_BODY = OpenDecoder(MessagesFields, UNUSED)
_OF_ANSWERS = Unused("nothing is generated", accepted=None)
COUNT_BODY = OpenDecoder(
    ConversationFields, UNUSED | {"max_tokens": _OF_ANSWERS, "stop_sequences": _OF_ANSWERS}
)


def set_options(sent: Sent[MessagesFields], *, can_limit_thoughts: bool) -> None:
    """Takes the dialect's options into the sampling options.

    Args:
        can_limit_thoughts: whether the server has a reasoning parser, which limits need.

    Raises:
        InvalidRequest: the body has two forms of one option, or a limit that cannot be kept.
    """
    fields, options = sent.fields, sent.options
    options.max_tokens, options.stop = fields.max_tokens, fields.stop_sequences
    budget = fields.thinking.budget_tokens if fields.thinking else None
    # One that leaves no token for the answer limits nothing: harnesses send it as "no limit".
    if budget is not None and budget < fields.max_tokens - 1:
        if not can_limit_thoughts:
            raise InvalidRequest(
                f"thinking.budget_tokens: expected none, or at least max_tokens - 1, got {budget}, as this "
                "server has no reasoning parser; start it with --reasoning-parser, or send type adaptive",
                param="thinking",
            )
        options.thinking_token_budget = budget
    if fields.output_config is not None and (form := fields.output_config.format) is not None:
        if options.structured_outputs is not None:
            raise InvalidRequest(
                "output_config: expected either output_config.format or structured_outputs, got both; "
                "leave one out",
                param="output_config",
            )
        options.structured_outputs = StructuredOutputs(json=form.schema)
