"""One turn of a chat: the prompt as the model's chat template writes messages, tools and images, and
what was sampled.

Protocols other than OpenAI's chats translate their bodies to a `TranslatedChat`.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from app.call.call import Call
from app.call.jobs import Prompt, check_prompt
from app.inputs.chat_messages import read_conversation
from app.inputs.images import EncodedImages, read_images
from app.inputs.tools import ChatRequest, Tools, make_chat, read_tools
from app.outputs.token_arrays import sampled_logprobs
from app.pool.request import Request
from app.route.fields import Message, StreamedFields
from titopool.settings.sampling import SamplingOptions, check_sampling
from titopool.wire.messages import Completion


@dataclass
class TranslatedChat:
    """A body of another protocol with the fields of OpenAI's chats (`ChatRequest`)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    cache_salt: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    tokens: list[int] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True


def prompt_of_chat(call: Call, fields: ChatRequest, tools: Tools) -> Prompt:
    """The prompt of a checked body, which then only keeps the last message's role.

    Raises:
        InvalidRequest: a message, a part or an image is malformed, or the template refuses them.
        PromptTooLong: the prompt leaves no room for a token.
    """
    facts = call.facts
    # With `tokens`, no template renders the messages: malformed tool calls of the model may stay.
    conversation = read_conversation(fields.messages, "messages", is_rendered=fields.tokens is None)
    encoded = EncodedImages(
        "messages", "messages: image", conversation.images, True, fields.mm_processor_kwargs or {}
    )
    images = read_images(encoded, facts, call.config)
    if fields.tokens is None:
        chat = make_chat(fields, conversation.messages, tools)
        # The objects of a message take ten times the memory of the prompt.
        # Answers need the last one's role.
        fields.messages = [{"role": one["role"]} for one in fields.messages[-1:]]
        (ids,) = call.render([chat])
        return check_prompt(ids, "messages", facts, images, fields.cache_salt)
    prompt = check_prompt(fields.tokens, "tokens", facts, images, fields.cache_salt)
    call.drift.compare(fields, tools)
    return prompt


class Turn(NamedTuple):
    """A checked request for the next message of a `TranslatedChat`."""

    call: Call
    fields: StreamedFields
    prompt: Prompt
    options: SamplingOptions
    # The name of a LoRA adapter; "": the base model.
    adapter: str

    @property
    def model(self) -> str:
        """The name that answers have."""
        return self.adapter or self.call.facts.model


def make_turn(
    call: Call, fields: StreamedFields, chat: TranslatedChat, options: SamplingOptions
) -> tuple[Turn, Request]:
    """Checks a chat and makes the request for its next message, not yet submitted.

    Raises:
        TitopoolError: as `prompt_of_chat`, `check_sampling`, `read_tools` and `Call.make_request`.
    """
    call.identify(fields.request_id, fields.session_id)
    adapter = call.adapter_named(fields.model)
    if fields.return_token_ids:
        options.logprobs = options.logprobs or 0
    check_sampling(options, call.facts)
    tools = read_tools(chat, call.facts)
    turn = Turn(call, fields, prompt_of_chat(call, chat, tools), options, adapter)
    request = call.make_request(
        [turn.prompt],
        options,
        is_streamed=fields.stream,
        adapter=adapter,
        chat=tools.parsing,
        min_weight_version=fields.min_weight_version,
    )
    return turn, request


class Sampled:
    """What a turn has sampled, piece by piece in a stream, or whole."""

    def __init__(self) -> None:
        self._ids, self._logprobs = bytearray(), bytearray()
        self._weight_versions: list[tuple[int, int]] = []
        self.finish_reason = ""
        # The stop string or stop token.
        self.stop_reason: int | str | None = None

    def add(self, piece: Completion) -> None:
        self._ids += piece.token_ids
        if piece.logprobs is not None:
            self._logprobs += sampled_logprobs(piece).tobytes()
        self._weight_versions = piece.weight_versions or self._weight_versions
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason

    @property
    def num_tokens(self) -> int:
        return len(self._ids) // 4

    def fields(
        self, turn: Turn, prompt_ids: np.ndarray, adapter_version: int | None
    ) -> dict[str, Any]:
        """The fields of `SampledFields`; {} if the client does not ask for them."""
        if not turn.fields.return_token_ids:
            return {}
        values = np.frombuffer(self._logprobs, np.float32)
        found = {
            "prompt_token_ids": prompt_ids.tolist(),
            "token_ids": np.frombuffer(self._ids, np.int32).tolist(),
            "token_logprobs": [one if np.isfinite(one) else None for one in values.tolist()],
            "weight_versions": self._weight_versions,
        }
        return found | ({"lora_version": adapter_version} if turn.adapter else {})
