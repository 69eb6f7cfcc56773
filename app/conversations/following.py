"""What the template writes after a sampled turn, with messages that stand for the conversation before it."""

import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from app.conversations.matching import SYSTEM_ROLES
from app.inputs.chat_template import MAX_RENDER_S, Chat
from app.inputs.turns import within
from app.route.fields import Message
from titopool.conversations.chat_template import call_with_arguments, complete
from titopool.conversations.families import or_none
from titopool.conversations.templates import LocalTemplate
from titopool.conversations.turns import SENTINEL, Following, Turn, TurnRenderer, squeezed

logger = logging.getLogger(__name__)

# Of a text in the history, its first and last characters: templates ask how a text begins or ends.
SHORT = 32
# Rounds of one form that stand for all of that form, at either end of the history.
ROUNDS = 2
# The last tokens of a prompt, in which a generation prompt may begin a thought.
PROMPT_END = 64
# A text that no template has.
MARK = "titopoolmark"
# Renderers for combinations of tools and variables of the template.
MAX_RENDERERS = 64


def as_read(message: Message) -> Message:
    """A sampled message as `read_conversation` gives one that a client sends back."""
    read = dict(message)
    complete(read)
    if calls := message.get("tool_calls"):
        read["tool_calls"] = [call_with_arguments(call)[0] for call in calls]
    return read


def short_of(message: Message, *, is_head_short: bool = False) -> Message:
    """A message that stands for a known one in renders of what follows: a template decides by roles, calls
    and how texts begin and end. The system's is shortened with `is_head_short` only."""
    if message["role"] in SYSTEM_ROLES and not is_head_short:
        return message
    short = dict(message)
    for name in ("content", "reasoning", "reasoning_content", "thinking"):
        value = message.get(name)
        if isinstance(value, str):
            short[name] = _short(value)
        elif isinstance(value, list):
            short[name] = [
                {**part, "text": _short(part["text"])} if part.get("type") == "text" else part
                for part in value
            ]
    if calls := message.get("tool_calls"):
        short["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {}}}
            if "function" in call
            else call
            for call in calls
        ]
    return short


def _short(text: str) -> str:
    return text if len(text) <= 2 * SHORT else f"{text[:SHORT]} {text[-SHORT:]}"


def follow_turn(
    tokenizer: Any,
    chat: Chat,
    history: Sequence[Message],
    prompt: np.ndarray,
    sampled: np.ndarray,
    message: Message,
    new: Sequence[Message],
    num_images: int,
) -> Following | None:
    """What the template writes after a turn; None: it does not go on from the turn's ids.

    Args:
        history: messages that stand for those before the turn (`short_of`).
        prompt: the ids before the turn.
        message: the turn, as vLLM's parsers have read it (`as_read`).
    """
    renderer, has_late_head, counts = _known_of(tokenizer, chat, is_short=True)
    if has_late_head:
        renderer, *_ = _known_of(tokenizer, chat, is_short=False)
    else:
        history = [
            short_of(one, is_head_short=True) if one["role"] in SYSTEM_ROLES else one
            for one in history
        ]
    if not counts:
        history = without_repeats(history)
    template = renderer.template

    def written() -> str:
        return squeezed(template.text(history, ()))

    turn = Turn(prompt[-PROMPT_END:], sampled, history, written, message=message)
    images = [""] * num_images
    try:
        found = within(MAX_RENDER_S, lambda: renderer.follow(turn, new, images))
    except Exception as error:
        # Templates raise arbitrary errors; the whole conversation may still be rendered.
        logger.info("a session begins a branch: %s: %s", type(error).__name__, str(error)[:300])
        return None
    return None if found.ids is None else found


class Known(NamedTuple):
    """What is known of a template with certain tools and variables."""

    renderer: TurnRenderer
    has_late_head: bool
    # Whether what it writes depends on how many rounds there are.
    counts_rounds: bool


def _known_of(tokenizer: Any, chat: Chat, *, is_short: bool) -> Known:
    """`is_short`: with the tools' names only, which stand for them unless the template has a late head."""
    all_known: OrderedDict[bytes, Known] | None = getattr(tokenizer, "titopool_renderers", None)
    if all_known is None:
        all_known = tokenizer.titopool_renderers = OrderedDict()
    tools = chat.tools
    if is_short:
        names = [one["function"]["name"] for one in chat.tools or ()]
        tools = [
            {"type": "function", "function": {"name": name, "description": MARK}} for name in names
        ]
    key = blake2b(json_of([is_short, tools, chat.template_kwargs])).digest()
    if key not in all_known:
        template = LocalTemplate(tokenizer, tools, chat.template_kwargs)
        all_known[key] = Known(
            TurnRenderer(template, finds_family=False),
            not is_short or _has_late_head(template),
            is_short and counts_rounds(template),
        )
        if len(all_known) > MAX_RENDERERS:
            all_known.popitem(last=False)
    all_known.move_to_end(key)
    return all_known[key]


def _end_of(template: LocalTemplate, messages: Sequence[Message]) -> str | None:
    """What a template writes after the sentinel; None: it refuses the messages, as some do a system's or calls."""
    found = or_none(template.text, messages, ())
    return None if found is None else str(found).rpartition(SENTINEL)[2]


def _has_late_head(template: LocalTemplate) -> bool:
    """Whether the template writes the system prompt or the tools after later messages, as Mistral's does, so
    that their texts count."""
    system, user = {"role": "system", "content": MARK}, {"role": "user", "content": "a"}
    turn = {"role": "assistant", "content": "b" + SENTINEL}
    ends = (_end_of(template, [*head, user, turn, user]) for head in ([system], []))
    return MARK in next((one for one in ends if one is not None), MARK)


def counts_rounds(template: LocalTemplate) -> bool:
    """Whether a template writes something else after a turn that has more rounds before it."""
    question = {"role": "user", "content": "a"}
    answered = [{"role": "assistant", "content": "b"}, question]
    function = {"name": "c", "arguments": {}}
    # Mistral's template demands nine letters and digits.
    call = {"id": "c00000000", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": call["id"], "name": "c", "content": "d"}
    called = [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    last = [{"role": "assistant", "content": "b" + SENTINEL}, question]
    numbers = (2 * ROUNDS, 4 * ROUNDS + 1)
    return any(
        len({_end_of(template, [question, *one * number, *last]) for number in numbers}) > 1
        for one in (answered, called)
    )


def without_repeats(history: Sequence[Message]) -> list[Message]:
    """A history of short messages without the rounds that have at least `ROUNDS` of the same form both before
    and after them. A round is a message of the assistant and those up to the next one."""
    starts = [index for index, one in enumerate(history) if one["role"] == "assistant"]
    if len(starts) <= 2 * ROUNDS:
        return list(history)
    rounds = [history[begin:end] for begin, end in pairwise([*starts, len(history)])]
    forms = [_form_of(one) for one in rounds]
    before, after = Counter[Hashable](), Counter(forms)
    kept = [history[: starts[0]]]
    for form, one in zip(forms, rounds, strict=True):
        after[form] -= 1
        if form is None or min(before[form], after[form]) < ROUNDS:
            kept.append(one)
        before[form] += 1
    return list(chain.from_iterable(kept))


def _form_of(messages: Sequence[Message]) -> Hashable:
    """What a template may ask of a round; None: it has images."""
    form = []
    for one in messages:
        content = one.get("content") or ""
        if isinstance(content, list):
            if any(part.get("type") != "text" for part in content):
                return None
            content = "".join(part["text"] for part in content)
        # Texts that begin with markup may stand for results of tools.
        begin = content[:1] if content[:1] in ("<", "[", "{") else bool(content)
        form.append((one["role"], sorted(one), len(one.get("tool_calls") or ()), begin))
    return repr(form)


def json_of(value: Any) -> bytes:
    """JSON, also of numbers that orjson refuses, as models write them."""
    return json.dumps(value).encode()
