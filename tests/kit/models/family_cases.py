"""Turns of model families, as the models write them, and as messages of trainers."""

import json
from dataclasses import dataclass
from typing import Any

from tests.kit.models.families import Family, tokenizer_of

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 6 × 7? café 東京"}
NEXT = {"role": "user", "content": "And 7 times 8, naïve 🙂?"}
ANSWER = "It is 42."
THOUGHT = "Six sevens, 六七."
TOOL = {
    "type": "function",
    "function": {
        "name": "add_one",
        "description": "Adds one.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
        },
    },
}


@dataclass
class Case:
    """A turn, and what answers it."""

    # As it is sampled.
    text: str
    end: str
    # As a message; its calls have the ids of INDEX.
    message: dict[str, Any]
    new: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def render(
    family: Family, messages: Any, tools: Any = None, *, is_prompt: bool = True, **kwargs: Any
) -> str:
    """What the template writes of messages as trainers have them."""
    text: str = tokenizer_of(family).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=is_prompt, **kwargs
    )
    return text


def call_of(family: Family, number: int, index: int) -> dict[str, Any]:
    arguments: Any = {"number": number}
    function = {"name": "add_one", "arguments": arguments}
    if family.arguments_are_text:
        function["arguments"] = json.dumps(arguments)
    return {"id": f"c0000000{index}", "type": "function", "function": function}


def answer_of(family: Family, index: int, content: str = "forty-two") -> dict[str, Any]:
    return {
        "role": family.tool_role, "tool_call_id": f"c0000000{index}", "name": "add_one",
        "content": content,
    }  # fmt: skip


def cases_of(family: Family, **kwargs: Any) -> dict[str, Case]:
    prompt = render(family, [USER], **kwargs)
    thoughts = {"": None, "thought": THOUGHT} if family.thought else {"": None}
    found = {}
    for name, thought in thoughts.items():
        begin = family.thinking(thought, prompt)
        message = {"role": "assistant", "content": ANSWER}
        if family.thoughts_are_text:
            message["content"] = family.thinking(thought, "") + ANSWER
        elif thought:
            message |= dict.fromkeys(["reasoning_content", "thinking"], thought)
        found[name or "plain"] = Case(begin + family.answer + ANSWER, family.end, message, [NEXT])
        for numbers in [(41,), (41, 42)] if family.call else []:
            if len(numbers) > 1 and (thought or not family.is_parallel):
                continue
            text = begin + family.calling(*numbers)
            calls = [call_of(family, number, index) for index, number in enumerate(numbers)]
            calling = {**message, "content": "", "tool_calls": calls}
            if family.calls_are_text:
                calling = {
                    "role": "assistant",
                    "content": family.thinking(thought, "") + family.calling(*numbers),
                }
            new = [answer_of(family, index, f"answer {index}") for index in range(len(numbers))]
            name_of_calls = "tool" if len(numbers) == 1 else "tools"
            key = f"{name}+{name_of_calls}" if name else name_of_calls
            found[key] = Case(text, family.call_ends, calling, new, [TOOL])
    return found
