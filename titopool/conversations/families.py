"""What the package `renderers` knows of model families: what a turn says, and what follows it.

https://github.com/PrimeIntellect-ai/renderers, whose renderers write and parse the tokens of about
thirty families. A name says nothing about a template, so a renderer is used where it writes the ids that
the tokenizer's own template does after the turns of `_PROBES`.
"""

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from titopool.conversations.interface import Ids, Message
from titopool.conversations.templates import LocalTemplate

# Threads of a run share a tokenizer.
_PROVING = threading.Lock()
# Loads OpenAI's vocabulary over the network. Where that is not to be had, templates are enough.
_LOADS_FILES = "gpt-oss"
_SYSTEM = {"role": "system", "content": "Be brief."}
_USER = {"role": "user", "content": "What is 6 × 7? Écris-le en 中文 🙂"}
_ANSWER = {"role": "assistant", "content": "It is 42."}
_FUNCTION = {"name": "add_one", "arguments": {"number": 41, "text": "é"}}
_CALL = {"id": "titopool1", "type": "function", "function": _FUNCTION}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "titopool1", "name": "add_one", "content": '{"is": 42}'}
_THOUGHT = {"reasoning_content": "6 * 7"}
_Conversation = Sequence[dict[str, Any]]
# History, a turn, what follows it.
_PROBES: list[tuple[_Conversation, dict[str, Any], _Conversation]] = [
    ([_USER], _ANSWER, [_USER]),
    ([_SYSTEM, _USER, _ANSWER, _USER], {**_ANSWER, "content": ""}, [_USER]),
    ([_USER], {**_ANSWER, **_THOUGHT}, [_USER]),
]
_TOOL_PROBES: list[tuple[_Conversation, dict[str, Any], _Conversation]] = [
    ([_SYSTEM, _USER], _CALLING, [_RESULT]),
    ([_USER], {**_CALLING, **_THOUGHT}, [_RESULT]),
    ([_USER, _CALLING, _RESULT], _ANSWER, [_USER]),
    ([_USER], {**_CALLING, "tool_calls": [_CALL, {**_CALL, "id": "titopool2"}]},
     [_RESULT, {**_RESULT, "tool_call_id": "titopool2"}]),
]  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "add_one",
        "description": "Adds one.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}, "text": {"type": "string"}},
            "required": ["number"],
        },
    },
}
# What a generation prompt may begin that the template does not write in a past turn.
_BEGUN = ("", "<think>", "<think></think>")


class _Proof(NamedTuple):
    """The renderer that a tokenizer's template agrees with; without a config: none."""

    name: str = ""
    # Keeps thoughts in what follows a turn.
    config: Any = None
    # The ids that ended the turns.
    ends: frozenset[int] = frozenset()
    why: str = ""


class _Probe(NamedTuple):
    """What the template writes around a turn."""

    prompt: list[int]
    turn: dict[str, Any]
    # What it writes from the turn on, and the ids that stand before it in a thought that the prompt begins.
    written: list[int]
    thought: list[int]
    new: _Conversation
    tools: list[dict[str, Any]] | None


class Said(NamedTuple):
    """What a turn says."""

    # With `reasoning_content` and `tool_calls` if there are any.
    message: Message
    # The text of each call, and what is wrong with it (None: nothing). None: calls were not looked for.
    calls: Sequence[tuple[str, str | None]] | None = None
    # Whether the turn ends within a thought.
    is_thinking: bool = False


class Family:
    """A renderer of the package.

    Args:
        tools: schemas, by which arguments without quotes are read.
        ends: ids that end turns as the template writes them.
    """

    def __init__(
        self,
        name: str,
        renderer: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        ends: frozenset[int],
    ):
        self.name, self._ends = name, ends
        self._renderer = renderer
        self._tools = list(tools or ()) or None

    def read(self, prompt: Ids, turn: Ids, call_ids: Iterator[str]) -> Said:
        """What the model said after a prompt."""
        parsed = self._renderer.parse_response(
            turn.tolist(), tools=self._tools, prompt_ids=prompt.tolist()
        )
        return said_of(parsed, call_ids)

    def follow(
        self, prompt: Ids, turn: Ids, new: Sequence[Message], ends: frozenset[int]
    ) -> Ids | None:
        """The ids of new messages after a turn, and a generation prompt; None: it cannot tell.

        Args:
            ends: further ids that end a turn in the place of the template's.
        """
        stops = set(self._renderer.get_stop_token_ids())
        if stops.intersection(turn.tolist()) and int(turn[-1]) not in self._ends | ends:
            # Renderers take any end of a text for a turn's, after which the template writes its own.
            return None
        bridged = self._renderer.bridge_to_next_turn(
            prompt.tolist(), turn.tolist(), [dict(one) for one in new], tools=self._tools
        )
        before = [*prompt.tolist(), *turn.tolist()]
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        return np.array(bridged.token_ids[len(before) :], np.int32)


def said_of(parsed: Any, call_ids: Iterator[str]) -> Said:
    """From the package's `ParsedResponse`."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or ""}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    calls: list[dict[str, Any]] = []
    texts: list[tuple[str, str | None]] = []
    for one in parsed.tool_calls:
        arguments = _arguments_of(one.arguments)
        is_read = one.status in ("ok", "unknown_tool") and arguments is not None
        # A call that cannot be read is one all the same, as templates write answers of calls only.
        function = {"name": one.name or "unknown", "arguments": arguments or {}}
        calls.append({"id": one.id or next(call_ids), "type": "function", "function": function})
        texts.append((one.raw, None if is_read else f"the call cannot be read: {one.status}"))
    if calls:
        message["tool_calls"] = calls
    return Said(message, texts, parsed.reasoning_complete is False)


def _arguments_of(arguments: Any) -> dict[str, Any] | None:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else {} if arguments is None else None


def find_family(template: LocalTemplate) -> tuple[Family | None, str]:
    """The renderer that writes what a template does after a turn, and why it or none is taken."""
    try:
        from renderers import base
    except ImportError as error:
        return None, f"the package renderers is not installed: {error}"
    tokenizer, tools = template.tokenizer, template.tools
    known = tokenizer.__dict__.setdefault("titopool_families", {})
    kwargs = sorted(template.template_kwargs.items())
    key = repr((str(tokenizer.chat_template), kwargs, bool(tools)))
    with _PROVING:
        if key not in known:
            known[key] = _proved(base, template)
    proof: _Proof = known[key]
    if proof.config is None:
        return None, proof.why
    renderer = base.create_renderer(tokenizer, proof.config)
    return Family(proof.name, renderer, tools, proof.ends), proof.why


def _proved(base: Any, template: LocalTemplate) -> _Proof:
    tokenizer, template_kwargs = template.tokenizer, template.template_kwargs
    without, with_one = (LocalTemplate(tokenizer, one, template_kwargs) for one in ([], [TOOL]))
    plain = [_probe(without, *probe) for probe in _PROBES]
    calling = [_probe(with_one, *probe) for probe in _TOOL_PROBES if template.tools]
    probes = [probe for probe in plain + calling if probe is not None]
    if not any(plain) or (template.tools and not any(calling)):
        return _Proof(why="the template writes no turn of the conversations that it was tried with")
    nearest, most = "", 0
    for name, config in _configs(base, tokenizer, template_kwargs):
        renderer = or_none(base.create_renderer, tokenizer, config)
        num_equal = next(
            (index for index, probe in enumerate(probes) if not or_none(_follows, renderer, probe)),
            len(probes),
        )
        if num_equal == len(probes):
            why = f"it writes the template's ids after {num_equal} turns"
            stops = set(renderer.get_stop_token_ids())
            ends = frozenset(one.written[_length(one, stops)] for one in probes)
            return _Proof(name, config, ends, why)
        if num_equal > most:
            nearest, most = f"; {name} does after the first {num_equal}", num_equal
    return _Proof(why=f"no renderer writes the template's ids after {len(probes)} turns{nearest}")


def _probe(
    template: LocalTemplate, history: _Conversation, turn: dict[str, Any], new: _Conversation
) -> _Probe | None:
    """None: the template refuses the conversation, or does not write the turn after its prompt."""
    rendered = [or_none(template.render, one, ()) for one in (history, [*history, turn, *new])]
    if any(one is None for one in rendered):
        return None
    common = num_equal(*rendered)
    prompt, whole = (one.tolist() for one in rendered)
    begun = "".join(template.tokenizer.decode(prompt[common:]).split())
    if begun not in _BEGUN:
        return None
    ids = template.encode("6 * 7\n</think>\n\n").tolist() if begun == "<think>" else []
    return _Probe(prompt, turn, whole[common:], ids, new, template.tools)


def _follows(renderer: Any, probe: _Probe) -> bool:
    """Whether a renderer writes what the template does after a turn, and reads the turn."""
    length = _length(probe, set(renderer.get_stop_token_ids()))
    turn = [*probe.thought, *probe.written[: length + 1]]
    bridged = renderer.bridge_to_next_turn(probe.prompt, turn, list(probe.new), tools=probe.tools)
    parsed = renderer.parse_response(turn, tools=probe.tools or [], prompt_ids=probe.prompt)
    calls = [(one.name, _arguments_of(one.arguments)) for one in parsed.tool_calls]
    functions = [call["function"] for call in probe.turn.get("tool_calls", ())]
    return (
        bridged.token_ids == [*probe.prompt, *probe.thought, *probe.written]
        and parsed.content.strip() == probe.turn["content"]
        and calls == [(one["name"], one["arguments"]) for one in functions]
    )


def _length(probe: _Probe, stops: Collection[int]) -> int:
    """The ids of a turn before its end."""
    return next(index for index, one in enumerate(probe.written) if one in stops)


def _configs(
    base: Any, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Renderers that might fit, the one of the model's name first."""
    from renderers.configs import _config_class_for

    base._populate_registry()
    by_name = base.MODEL_RENDERER_MAP.get(getattr(tokenizer, "name_or_path", ""))
    names = [name for name in base.RENDERER_REGISTRY if name not in ("default", _LOADS_FILES)]
    for name in sorted(names, key=lambda name: name != by_name):
        known = _config_class_for(name).template_field_names()
        # Models of one family differ in whether they think by default.
        variants: list[dict[str, Any]] = [{}]
        if "enable_thinking" in known and "enable_thinking" not in template_kwargs:
            variants += [{"enable_thinking": False}, {"enable_thinking": True}]
        for variant in variants:
            options = {"thinking_retention": "all", **variant, **template_kwargs}
            config = or_none(_config_class_for(name), **options)
            if config is not None:
                yield name, config


def num_equal(first: Ids, second: Ids) -> int:
    """The length of the common beginning."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def or_none(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """None for whatever templates and renderers raise over what they do not know."""
    try:
        return function(*arguments, **options)
    except Exception:
        return None


class Harmony(NamedTuple):
    """A tokenizer of gpt-oss. https://cookbook.openai.com/articles/openai-harmony"""

    tokenizer: Any
    # Of the special tokens, by the names that the parser of `renderers` has for them.
    ids: Mapping[str, int]


def find_harmony(tokenizer: Any) -> Harmony | None:
    """None: the tokenizer is another one, or the package is missing."""
    names = ("return", "call", "start", "end", "channel", "message", "constrain")
    vocabulary = tokenizer.get_vocab()
    if any(f"<|{name}|>" not in vocabulary for name in names) or not find_spec("renderers"):
        return None
    return Harmony(tokenizer, {f"{name}_id": vocabulary[f"<|{name}|>"] for name in names})


def read_harmony(harmony: Harmony, turn: Ids, call_ids: Iterator[str]) -> Said:
    """What a turn of gpt-oss says."""
    from renderers.parsing import parse_gpt_oss

    # The generation prompt ends within the header of the first message.
    role = harmony.tokenizer("assistant", add_special_tokens=False)["input_ids"]
    start = [harmony.ids["start_id"], *role]
    said = said_of(parse_gpt_oss(harmony.tokenizer, start + turn.tolist(), **harmony.ids), call_ids)
    message = dict(said.message)
    if thought := message.pop("reasoning_content", None):
        message["thinking"] = thought
    return said._replace(message=message)


def read_mistral(text: str, call_ids: Iterator[str]) -> Said | None:
    """What a text with calls of Mistral says; None: it has none.

    Their models write a list of calls as JSON, or each call's name before its arguments.
    """
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[dict[str, Any]] = []
    texts: list[tuple[str, str | None]] = []
    for part in parts:
        found = or_none(_mistral_calls, part)
        error = None if found else "the call cannot be read"
        for name, arguments, call_id in found or [("unknown", {}, None)]:
            function = {"name": name, "arguments": arguments}
            one = {"id": call_id or next(call_ids), "type": "function", "function": function}
            calls.append(one)
            texts.append((part, error))
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    return Said(message, texts) if calls else None


def _mistral_calls(part: str) -> list[tuple[str, dict[str, Any], str | None]]:
    head, mark, arguments = part.partition("[ARGS]")
    name, _, call_id = head.partition("[CALL_ID]")
    if mark:
        return [(name, {**json.loads(arguments)}, call_id)]
    return [(str(one["name"]), {**one["arguments"]}, one.get("id")) for one in json.loads(part)]
