"""Chat messages before rendering have the fields that templates expect."""

import json

import pytest

from app.inputs.chat_messages import merge_developer_into_system, read_conversation


def read(message: dict) -> dict:
    (found,) = read_conversation([message], "messages").messages
    return found


def test_reasoning_is_passed_under_both_names():
    for name in ("reasoning", "reasoning_content"):
        found = read({"role": "assistant", "content": "a", name: "why"})
        assert (found["reasoning"], found["reasoning_content"]) == ("why", "why")
    assert read({"role": "assistant", "content": "a"}).keys() == {"role", "content"}


def test_an_empty_assistant_message_has_empty_content_and_no_calls():
    assert read({"role": "assistant", "content": None, "tool_calls": []}) == {
        "role": "assistant", "content": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"a": NaN, "b": -Infinity}', '{"a": NaN, "b": -Infinity}'),
        ('{"a": 1e400}', '{"a": Infinity}'),
        (r'{"a\ud83d": ["\ude00", "\ud83d\ude00"]}', r'{"a\\ud83d": ["\\ude00", "\ud83d\ude00"]}'),
        ("{", "{}"),
        ("[NaN]", "{}"),
    ],
)
def test_arguments_of_a_call_are_what_the_model_wrote(text: str, expected: str):
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    (found,) = read({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    # As text: NaN is not equal to itself.
    assert json.dumps(found["function"]["arguments"]) == expected


def test_the_parts_of_a_tool_message_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"role": "tool", "content": parts})["content"] == "a\nb"


def test_developer_messages_are_merged_into_the_system_message():
    user = {"role": "user", "content": "u"}
    developer = {"role": "developer", "content": [{"type": "text", "text": "d"}]}
    system = {"role": "system", "content": "s"}
    assert merge_developer_into_system([system, user]) == [system, user]
    assert merge_developer_into_system([developer, user]) == [{**developer, "role": "system"}, user]
    merged = {"role": "system", "content": "s\n\nd"}
    assert merge_developer_into_system([system, user, developer]) == [merged, user]
