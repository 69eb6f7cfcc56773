"""What one choice has sampled: ids, and the parts that vLLM's parsers have found in them."""

from dataclasses import dataclass, field
from typing import Any, Literal

from app.outputs.token_arrays import sampled_logprobs
from titopool.wire.messages import ID_BYTES, Completion, RoutedExperts


@dataclass
class Part:
    """A thought, a text or a call of a tool."""

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
    """What one choice has sampled, piece by piece in a stream, or whole."""

    def __init__(self) -> None:
        # In the order in which they begin.
        self.parts: list[Part] = []
        self.finish_reason = ""
        # The stop string or stop token.
        self.stop_reason: int | str | None = None
        # int32, and float32 of the sampled tokens.
        self.ids, self.logprobs = bytearray(), bytearray()
        self.weight_versions: list[tuple[int, int]] = []
        self.kv_from: list[int] = []
        self.experts: RoutedExperts | None = None
        self.parsing_error = ""

    def add(self, piece: Completion) -> list[tuple[Part, str]]:
        """Returns the parts that have grown, and by which text."""
        self.ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs += sampled_logprobs(piece).tobytes()
        self.weight_versions = piece.weight_versions or self.weight_versions
        self.kv_from = piece.kv_from or self.kv_from
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop_reason = piece.stop_reason
        self.experts = piece.routed_experts or self.experts
        message = {"content": piece.text} if piece.message is None else piece.message
        self.parsing_error = message.get("parsing_error") or self.parsing_error
        gained = []
        for kind in ("reasoning", "content"):
            if text := message.get(kind):
                gained.append((self._grown(Part(kind)), text))
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or {}
            part = Part(
                "call", call.get("index", number), call.get("id") or "", function.get("name") or ""
            )
            gained.append((self._grown(part), function.get("arguments") or ""))
        for part, text in gained:
            part.pieces.append(text)
        return gained

    def _grown(self, part: Part) -> Part:
        """The part that grows: the same call, or the last one; `part`, if it is new."""
        for known in self.parts if part.kind == "call" else self.parts[-1:]:
            if (known.kind, known.number) == (part.kind, part.number):
                return known
        self.parts.append(part)
        return part

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // ID_BYTES

    def text_of(self, kind: str) -> str:
        """All texts of a kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    def message(self) -> dict[str, Any]:
        """As a message of OpenAI's chats."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text_of("content")}
        if thought := self.text_of("reasoning"):
            message["reasoning"] = thought
        calls = sorted(
            (one for one in self.parts if one.kind == "call"), key=lambda one: one.number
        )
        if calls:
            message["tool_calls"] = [
                {
                    "id": one.call_id,
                    "type": "function",
                    "function": {"name": one.name, "arguments": one.text},
                }
                for one in calls
            ]
        return message
