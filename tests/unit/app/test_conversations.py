"""Chat messages before rendering have the fields that templates expect."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat, render_all, template_of_file
from tests.kit.models.chat_templates import tokenizer_of
from tests.kit.peers.trl_client import TRL_FOLDER
from titopool.conversations.chat_template import merge_developer_into_system
from titopool.errors import ConfigError

TRL_TEMPLATES = TRL_FOLDER / "1.16.0" / "trl" / "chat_templates"


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


# Templates that TRL ships, and how each reads the arguments of a past call.
CALLING_TEMPLATES = {
    "deepseek_r1_distill": str, "deepseekv3": str, "gemma4_v5": dict, "glm4moe": dict,
    "gptoss": dict, "lfm2_v2": dict, "llama3_1": dict, "muse_glimmer": dict,
    "nemotron_3_nano": dict, "qwen2_5": dict, "qwen3": dict, "qwen3_5_think": dict,
    "qwen3_vl": dict,
}  # fmt: skip


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("name", CALLING_TEMPLATES)
def test_a_past_call_is_rendered_as_transformers_does(name: str, content: str | None):
    """Clients send what OpenAI's server answers: the content null and the arguments as text."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = (TRL_TEMPLATES / f"{name}.jinja").read_text()
    sent = '{"city":  "Oslo"}'

    def messages_with(content: str | None, arguments: object) -> list[dict[str, Any]]:
        function = {"name": "weather", "arguments": arguments}
        call = {"id": "callcall1", "type": "function", "function": function}
        return [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "callcall1", "name": "weather", "content": "rain"},
        ]

    read = read_conversation(messages_with(content, sent), "messages").messages
    (ids,) = render_all(tokenizer, [Chat(read, "messages", None, {})], 4096)
    # Templates that read objects refuse null, or take it for "".
    as_read = (None, sent) if CALLING_TEMPLATES[name] is str else ("", {"city": "Oslo"})
    expected = tokenizer.apply_chat_template(
        messages_with(*as_read), tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(ids) == expected
    assert "weather" in expected
    assert "Oslo" in expected


def test_arguments_that_are_no_json_stay_as_they_were_sent_where_a_template_reads_text():
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = (
        "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.name + '(' + "
        "m.tool_calls[0].function.arguments + ')' }}{% endfor %}"
    )
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a'}}]
    read = read_conversation([{"role": "assistant", "tool_calls": calls}], "messages").messages
    (ids,) = render_all(tokenizer, [Chat(read, "messages", None, {})], 4096)
    assert tokenizer.decode(ids) == 'f({"a)'


@pytest.mark.parametrize("content, expected", [
    ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", ""),
    ("{% for m in messages %}", "expected a file with a Jinja template, got "),
    (" \n", "got an empty file"),
    (b"\xff", "expected a file with a Jinja template, got "),
    (None, "No such file"),
])  # fmt: skip
def test_a_file_that_is_no_template_ends_the_start(
    tmp_path: Path, content: str | bytes | None, expected: str
):
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    if not expected:
        assert template_of_file(str(file)) == content
        return
    with pytest.raises(ConfigError, match="chat_template: ") as caught:
        template_of_file(str(file))
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)


def test_every_template_of_trl_is_a_template():
    files = sorted(TRL_TEMPLATES.glob("*.jinja"))
    assert len(files) > 50
    assert all(template_of_file(str(file)) for file in files)
