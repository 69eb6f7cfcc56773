"""One turn of a chat: the prompt as the model's chat template writes messages, tools and images, and
what was sampled.

Protocols other than OpenAI's chats translate their bodies to a `TranslatedChat`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from app.call.call import Call
from app.call.jobs import Prompt, check_prompt
from app.inputs.chat_messages import read_conversation
from app.inputs.images import EncodedImages, read_images
from app.inputs.tools import ChatRequest, Tools, make_chat, read_tools
from app.outputs.token_arrays import sampled_logprobs
from app.pool.request import Request
from app.route.fields import Message, StreamedFields
from titopool.errors import GenerationFailed
from titopool.settings.sampling import SamplingOptions, check_sampling
from titopool.wire.messages import ID_BYTES, Completion


@dataclass
class TranslatedChat:
    """A body of another protocol with the fields of OpenAI's chats (`ChatRequest`)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    cache_salt: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    tokens: list[int] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True


def prompt_of_chat(call: Call, fields: ChatRequest, tools: Tools) -> Prompt:
    """The prompt of a chat, whose `messages` then only have the last one's role.

    Raises:
        InvalidRequest: a message, a part or an image is malformed, or the template refuses them.
        PromptTooLong: the prompt leaves no room for a token.
    """
    facts = call.facts
    call.templates.check(fields.chat_template)
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
        if call.turn is not None:
            return check_prompt(
                call.turn.prompt_of_chat(call, chat, images),
                "messages",
                facts,
                images,
                fields.cache_salt,
            )
        (ids,) = call.render([chat])
        return check_prompt(ids, "messages", facts, images, fields.cache_salt)
    prompt = check_prompt(fields.tokens, "tokens", facts, images, fields.cache_salt)
    call.drift.compare(fields, tools)
    return prompt


class ChatTurn(NamedTuple):
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
) -> tuple[ChatTurn, Request]:
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
    turn = ChatTurn(call, fields, prompt_of_chat(call, chat, tools), options, adapter)
    request = call.make_request(
        [turn.prompt],
        options,
        is_streamed=fields.stream,
        adapter=adapter,
        chat=tools.parsing,
        min_weight_version=fields.min_weight_version,
    )
    return turn, request


@dataclass
class Part:
    """A thought, a text or a call of a tool, as vLLM's parsers found it in what was sampled."""

    kind: Literal["reasoning", "content", "call"]
    # Of a call: which one it is, its id and its tool.
    number: int = 0
    call_id: str = ""
    name: str = ""
    # The text, or the arguments of a call, usually JSON.
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Sampled:
    """What a turn has sampled, piece by piece in a stream, or whole."""

    def __init__(self) -> None:
        # In their order; only the last one grows.
        self.parts: list[Part] = []
        self.finish_reason = ""
        # The stop string or stop token.
        self.stop_reason: int | str | None = None
        self._calls = set[int]()
        self._ids, self._logprobs = bytearray(), bytearray()
        self._weight_versions: list[tuple[int, int]] = []
        self._parsing_error = ""

    def add(self, piece: Completion) -> list[tuple[Part, str]]:
        """Returns the parts that have grown, and by which text.

        Raises:
            GenerationFailed: a call goes on after another part has begun.
        """
        self._ids += piece.token_ids
        if piece.logprobs is not None:
            self._logprobs += sampled_logprobs(piece).tobytes()
        self._weight_versions = piece.weight_versions or self._weight_versions
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        message = {"content": piece.text} if piece.message is None else piece.message
        self._parsing_error = message.get("parsing_error") or self._parsing_error
        gained = []
        for kind in ("reasoning", "content"):
            if text := message.get(kind):
                gained.append((self._last(Part(kind)), text))
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or {}
            part = Part(
                "call", call.get("index", number), call.get("id") or "", function.get("name") or ""
            )
            gained.append((self._last(part), function.get("arguments") or ""))
        for part, text in gained:
            part.pieces.append(text)
        return gained

    def _last(self, part: Part) -> Part:
        """The part that grows; `part`, unless it is a piece of the last one."""
        last = self.parts[-1] if self.parts else None
        if last is not None and (last.kind, last.number) == (part.kind, part.number):
            return last
        if part.kind == "call":
            if part.number in self._calls:
                raise GenerationFailed(
                    f"expected that a call of a tool ends before the next part begins, got more of call "
                    f"{part.number} from the tool call parser; ask without stream"
                )
            self._calls.add(part.number)
        self.parts.append(part)
        return part

    @property
    def num_tokens(self) -> int:
        return len(self._ids) // ID_BYTES

    def fields(
        self, turn: ChatTurn, prompt_ids: np.ndarray, adapter_version: int | None
    ) -> dict[str, Any]:
        """The fields of `SampledFields` that there are."""
        found: dict[str, Any] = {}
        if self._parsing_error:
            found["parsing_error"] = self._parsing_error
        if not turn.fields.return_token_ids:
            return found
        found |= {
            "finish_reason": self.finish_reason,
            "prompt_token_ids": prompt_ids,
            "token_ids": np.frombuffer(self._ids, np.int32),
            "token_logprobs": np.frombuffer(self._logprobs, np.float32),
            "weight_versions": self._weight_versions,
        }
        return found | ({"lora_version": adapter_version} if turn.adapter else {})
