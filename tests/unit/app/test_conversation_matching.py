"""Which messages of a session are taken for those of a turn before."""

import json
from typing import Any

import pytest

from app.conversations.matching import context_of, link_of_turn, links_of, says, system_of
from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 6 × 7?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def turn(said: str = "I add.", name: str = "c1", **arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": json.dumps(arguments or {"a": 6, "b": [7, 8]})}
    call = {"id": name, "type": "function", "function": function}
    return {"role": "assistant", "content": said, "tool_calls": [call]}


def result(name: str = "c1", content: Any = "42") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": content}


def links(
    *messages: dict[str, Any],
    tools: Any = (TOOL,),
    kwargs: dict[str, Any] | None = None,
    images: tuple[bytes, ...] = (),
) -> list[bytes]:
    read = read_conversation([dict(one) for one in messages], "messages").messages
    chat = Chat(read, "messages", list(tools), kwargs or {})
    return links_of(context_of(chat, {}, "tiny"), says(read, images))


KNOWN = (SYSTEM, USER, turn(), result())


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param((SYSTEM, USER, {**turn(), "reasoning": "Hm."}, result()), id="thought in a field"),
        pytest.param((SYSTEM, USER, turn("<think>Hm.</think>\n\nI add."), result()), id="thought in the text"),
        pytest.param((SYSTEM, USER, turn("<think>Other</think>I add."), result()), id="another thought"),
        pytest.param((SYSTEM, USER, turn(b=[7, 8], a=6), result()), id="order of keys"),
        pytest.param((SYSTEM, USER, turn(b=[7.0, 8e0], a=6.0), result()), id="numbers of JavaScript"),
        pytest.param((SYSTEM, USER, turn("I should.</think>\nI add."), result()), id="thought that the prompt opens"),
        pytest.param((SYSTEM, USER, turn("  I  add.\n"), result()), id="blanks of the assistant"),
        pytest.param((SYSTEM, {**USER, "content": " What is 6 × 7?\n"}, turn(), result()), id="blanks around a text"),
        pytest.param((SYSTEM, USER, turn(name="toolu_9"), result("toolu_9")), id="ids of calls"),
        pytest.param((SYSTEM, {**USER, "content": [{"type": "text", "text": "What is 6 × 7?"}]}, turn(), result()), id="parts"),
        pytest.param((SYSTEM, USER, turn(), result(content=[{"type": "text", "text": "42"}])), id="parts of a result"),
    ],
)  # fmt: skip
def test_what_harnesses_change_is_the_same_conversation(sent: tuple[dict[str, Any], ...]):
    assert links(*sent) == links(*KNOWN)


@pytest.mark.parametrize(
    ("sent", "num_equal"),
    [
        pytest.param(({**SYSTEM, "content": "Be long."}, USER, turn(), result()), 0, id="system prompt"),
        pytest.param(({**SYSTEM, "role": "user"}, USER, turn(), result()), 0, id="role"),
        pytest.param((SYSTEM, {**USER, "content": "What is 6 × 8?"}, turn(), result()), 1, id="user's text"),
        pytest.param((SYSTEM, {**USER, "content": "What is  6 × 7?"}, turn(), result()), 1, id="blanks within a user's text"),
        pytest.param((SYSTEM, {**USER, "name": "Eve"}, turn(), result()), 1, id="name"),
        pytest.param((SYSTEM, USER, turn("I subtract."), result()), 2, id="assistant's text"),
        pytest.param((SYSTEM, USER, turn(a=6, b=[8, 7]), result()), 2, id="arguments of a call"),
        pytest.param((SYSTEM, USER, {"role": "assistant", "content": "I add."}, result()), 2, id="no call"),
        pytest.param((SYSTEM, USER, turn(), result(content="43")), 3, id="result"),
        pytest.param((SYSTEM, USER, turn(), result("another")), 3, id="result of no call"),
    ],
)  # fmt: skip
def test_what_says_something_else_is_another_conversation(
    sent: tuple[dict[str, Any], ...], num_equal: int
):
    equal = [one == other for one, other in zip(links(*sent), links(*KNOWN), strict=True)]
    assert equal == [True] * num_equal + [False] * (len(KNOWN) - num_equal)


def test_results_belong_to_the_calls_that_they_name():
    calls = [*turn()["tool_calls"], *turn(name="c2", a=1)["tool_calls"]]
    asked = {**turn(), "tool_calls": calls}
    swapped = {**asked, "tool_calls": [{**calls[0], "id": "c2"}, {**calls[1], "id": "c1"}]}
    assert links(USER, asked, result("c2")) == links(USER, swapped, result("c1"))
    assert links(USER, asked, result("c1")) != links(USER, asked, result("c2"))


def test_tools_and_variables_of_the_template_belong_to_the_conversation():
    known = links(*KNOWN)
    described = {**TOOL, "function": {**TOOL["function"], "description": "Adds."}}
    for other in (
        links(*KNOWN, tools=()),
        links(*KNOWN, tools=(described,)),
        links(*KNOWN, kwargs={"enable_thinking": False}),
    ):
        assert not set(known) & set(other)


def test_an_image_is_known_by_its_digest():
    sent = {**USER, "content": [IMAGE, {"type": "text", "text": "What is it?"}]}
    known = links(sent, images=(b"one",))
    assert links(sent, images=(b"one",)) == known
    assert links(sent, images=(b"two",)) != known
    assert links({**sent, "content": sent["content"][1:]}) != known
    # Of two images, each stands at its place.
    assert links(sent, sent, images=(b"one", b"two")) != links(sent, sent, images=(b"two", b"one"))


def test_what_was_sampled_is_found_in_the_next_request():
    sampled = {"role": "assistant", "content": "<think>Hm.</think>\nIt is 42. ", "reasoning": "Hm."}
    before = links(SYSTEM, USER)
    after = links(SYSTEM, USER, {"role": "assistant", "content": "It is 42."}, USER)
    assert link_of_turn(before[-1], sampled) == after[2]


@pytest.mark.parametrize("written", ["", "{}", " {} ", "null", "[1]", "no JSON"])
def test_arguments_that_are_no_object_count_as_they_were_written(written: str):
    def called(text: str) -> bytes:
        message = turn()
        message["tool_calls"][0]["function"]["arguments"] = text
        return links(USER, message)[-1]

    assert called(written) == called(f"{written}\n")
    assert (called(written) == called("{}")) == (written.strip() in ("", "{}"))


def test_the_system_prompt_is_what_stands_before_all_others():
    developer = {"role": "developer", "content": "And kind."}
    assert system_of([SYSTEM, developer, USER]) != system_of([SYSTEM, USER])
    assert system_of([SYSTEM, USER]) == system_of([SYSTEM, turn(), developer])
    assert system_of([USER]) == system_of([USER, SYSTEM])


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("Wrap it in `<think>` and keep all.", "Wrap it in `<think>` and delete all."),
        ("Run A, then close with `</think>`.", "Run B, then close with `</think>`."),
    ],
)
def test_marks_of_thoughts_within_a_text_hide_nothing(text: str, other: str):
    assert links(USER, turn(text)) != links(USER, turn(other))


def test_texts_and_images_count_in_their_order():
    def asked(*kinds: str) -> dict[str, Any]:
        parts = {"text": {"type": "text", "text": "a"}, "image": {"type": "image", "image": "aGk="}}
        return {"role": "user", "content": [parts[kind] for kind in kinds]}

    one, two = (b"one",), (b"one", b"two")
    assert links(asked("image", "text"), images=one) != links(asked("text", "image"), images=one)
    assert links(asked("text", "image", "image"), images=two) != links(
        asked("image", "text", "image"), images=two
    )
