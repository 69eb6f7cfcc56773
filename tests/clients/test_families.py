"""Rollouts with the templates of model families, as their packages ship them; completions are written by
the tests, as the models write.

    TITOPOOL_TEMPLATES=FOLDER pytest tests/clients/test_families.py     # with FOLDER/NAME.jinja of its table
"""

import datetime
import sys
import time
from typing import Any

import numpy as np
import pytest
from tokenizers import normalizers
from transformers.utils import chat_template_utils

from harness.servers import REPOSITORY
from tests.kit.models.families import FAMILIES, HERE, Family, new_tokenizer, tokenizer_of
from tests.kit.models.family_cases import (
    ANSWER,
    NEXT,
    SYSTEM,
    THOUGHT,
    TOOL,
    USER,
    Case,
    answer_of,
    cases_of,
    render,
)
from tests.kit.peers.rollout_client import WritingClient, Written, written
from titopool import Rollout, run_rollouts
from titopool.conversations import templates as templates_module
from titopool.conversations.interface import (
    HistoryRewritten,
    MessageDropped,
    TemplateRefused,
)
from titopool.conversations.turns import squeezed
from titopool.errors import InvalidRequest
from titopool.rollouts.tools import calls_of, schemas_of

KEEP: dict[str, Any] = {"on_rewrite": "keep"}
families = pytest.mark.parametrize("family", HERE, ids=lambda family: family.name)


def of(names: tuple[str, ...]) -> Any:
    chosen = [family for family in HERE if family.name in names]
    return pytest.mark.parametrize("family", chosen, ids=lambda family: family.name)


def start(family: Family, *texts: str | Written, messages: Any = (USER,), **options: Any) -> Any:
    tokenizer = options.pop("tokenizer", None) or tokenizer_of(family)
    completions = [one if isinstance(one, Written) else written(tokenizer, one) for one in texts]
    client = WritingClient(completions)
    return Rollout(client, messages=list(messages), tokenizer=tokenizer, **options), client


def with_ids(case: Case, rollout: Rollout) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The case's turn and its answers, with the ids that the rollout has given its calls."""
    said = rollout.last_said
    calls = said.message.get("tool_calls") if said is not None else None
    if not calls:
        return case.message, case.new
    message = dict(case.message)
    if "tool_calls" in message:
        pairs = zip(message["tool_calls"], calls, strict=True)
        message["tool_calls"] = [{**one, "id": call["id"]} for one, call in pairs]
    pairs = zip(case.new, calls, strict=True)
    return message, [{**one, "tool_call_id": call["id"]} for one, call in pairs]


def decoded(rollout: Rollout, ids: Any) -> str:
    text: str = rollout._renderer.template.decode(np.asarray(ids, np.int32))
    return text


def check_authors(rollout: Rollout, client: WritingClient) -> None:
    """The mask is 1 on exactly what was sampled, and every prompt begins with all ids before it."""
    ids, expected = [], []
    for prompt, turn in zip(client.prompts, client.sampled, strict=True):
        assert prompt[: len(ids)] == ids
        expected += [0] * (len(prompt) - len(ids)) + [1] * len(turn)
        ids = [*prompt, *turn]
    arrays = rollout.arrays()
    assert arrays.ids[: len(ids)].tolist() == ids
    assert arrays.loss_mask.tolist() == expected + [0] * (len(arrays.ids) - len(ids))


@families
def test_what_follows_a_turn_is_what_the_template_writes(family: Family):
    """After an answer, one call and several, and each after a thought. One end of the turn stands."""
    for name, case in cases_of(family).items():
        prompt = render(family, [USER], case.tools)
        rollout, client = start(family, case.text + case.end, ANSWER, tools=case.tools)
        rollout.generate()
        message, new = with_ids(case, rollout)
        whole = render(family, [USER, message, *new], case.tools)
        if case.tools:
            read = [dict(call.arguments) for call in calls_of(rollout.last_said, rollout.last_text)]
            numbers = [41, 42][: len(new)] if family.reads_calls else []
            assert read == [{"number": number} for number in numbers], name
        branched = rollout.branch()
        is_rewritten = name in family.rewrites
        if is_rewritten:
            with pytest.raises(HistoryRewritten, match="keep"):
                rollout.add(new)
            rollout.on_rewrite = "keep"
        appended = decoded(rollout, rollout.add(new))
        before = whole.removesuffix(appended)
        assert before != whole, (name, appended, whole)
        assert before.endswith((case.end, family.end_within or case.end)), (name, before[-80:])
        assert squeezed(decoded(rollout, rollout.ids)) == squeezed(
            prompt + case.text + case.end + appended
        )
        if not is_rewritten and not family.end_within:
            assert squeezed(prompt + case.text + case.end + appended) == squeezed(whole), name
        rollout.generate()
        check_authors(rollout, client)
        branched.on_rewrite = "branch"
        branched.add(new)
        assert len(branched.sequences()) == 1 + is_rewritten, name
        if is_rewritten:
            assert branched.arrays().loss_mask.sum() == 0
            assert squeezed(decoded(branched, branched.ids)) == squeezed(whole), name
        renderer = family.renderers[bool(case.tools)]
        assert rollout.info["rendering"] == ("renderers" if renderer else "difference")
        assert rollout.info["family"] == renderer
        assert rollout.info["why"]


@families
def test_a_turn_without_an_end_gets_the_template_s(family: Family):
    """One that was cut, that a stop string ended, or in which nothing was sampled."""
    prompt = render(family, [USER])
    begin = family.thinking(None, prompt) + family.answer
    appended = {}
    for name, text, reason in [
        ("ended", begin + ANSWER + family.end, "stop"),
        ("cut", begin + ANSWER, "length"),
        ("stopped", begin + ANSWER + "\n\nUser:", "stop"),
        ("only an end", begin + family.end, "stop"),
        ("nothing but a header", begin, "abort"),
    ]:
        turn = written(tokenizer_of(family), text, reason)
        rollout, client = start(family, turn, ANSWER, **KEEP)
        rollout.generate()
        appended[name] = decoded(rollout, rollout.add(NEXT))
        rollout.generate()
        check_authors(rollout, client)
    ended = (family.end_within or family.end) + appended["ended"]
    assert appended["only an end"] == appended["ended"]
    assert [appended[name] for name in ("cut", "stopped", "nothing but a header")] == [ended] * 3
    assert NEXT["content"] in ended


@families
def test_turns_go_on_after_a_system_s_message_and_calls(family: Family):
    """Of the first turn, the second prompt and all later ones keep each id."""
    tools = [TOOL] if family.call else None
    for name, calls in [("several", False), ("several with tools", True)][
        : 2 if family.call else 1
    ]:
        prompt = render(family, [SYSTEM, USER], tools if calls else None)
        begin = family.thinking(None, prompt)
        ended = begin + family.answer + ANSWER + family.end
        called = begin + family.calling(41) + family.call_ends
        turns = [called, ended, ended] if calls else [ended, ended]
        rollout, client = start(
            family, *turns, messages=[SYSTEM, USER], tools=tools if calls else None
        )
        is_rewritten = False
        for index in range(len(turns)):
            rollout.generate()
            new = [answer_of(family, 0)] if calls and index == 0 else [NEXT]
            said = rollout.last_said.message.get("tool_calls")
            if said:
                new = [{**new[0], "tool_call_id": said[0]["id"]}]
            try:
                rollout.add(new)
            except HistoryRewritten:
                is_rewritten = True
                rollout.on_rewrite = "keep"
                rollout.add(new)
        assert is_rewritten == (name in family.rewrites), name
        check_authors(rollout, client)


@families
@pytest.mark.parametrize("normalizes", [False, pytest.param(True, marks=pytest.mark.variant)])
def test_ids_that_no_tokenizer_writes_stay(family: Family, normalizes: bool):
    """A model may sample a word in bytes, and a text in any form of Unicode."""
    tokenizer = new_tokenizer(family)
    text = "cafe\u0301 \u0958 東京 🙂\u200d🔥 5\u212b"
    prompt = render(family, [USER])
    begin = encoded(tokenizer, family.thinking(None, prompt) + family.answer)
    spelled = [one for byte in text for one in encoded(tokenizer, byte)]
    end = encoded(tokenizer, family.end)
    assert encoded(tokenizer, text) != spelled
    if normalizes:
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    turn = Written(np.array(begin + spelled + end, np.int32))
    mode = "keep" if "plain" in family.rewrites else "raise"
    rollout, client = start(family, turn, ANSWER, tokenizer=tokenizer, on_rewrite=mode)
    rollout.generate()
    message = {"role": "assistant", "content": text}
    rollout.add(NEXT)
    rollout.generate()
    check_authors(rollout, client)
    assert rollout.arrays(tokenizer).num_drifted > 0
    assert text in decoded(rollout, rollout.ids)
    if family.end_within or "plain" in family.rewrites or family.unthought:
        return
    whole = tokenizer.apply_chat_template(
        [USER, message, NEXT], tokenize=False, add_generation_prompt=True
    )
    assert decoded(rollout, client.prompts[1]) == whole


def encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@of(("Llama 3.2", "gpt-oss", "Mistral Small 3.2"))
def test_a_conversation_keeps_its_date_over_midnight(
    family: Family, monkeypatch: pytest.MonkeyPatch
):
    class Clock(datetime.datetime):
        day = 26

        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, cls.day, 23, 59)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    monkeypatch.setattr(templates_module.datetime, "datetime", Clock)
    text = family.answer + ANSWER + family.end
    rollout, _ = start(family, text, text)
    before = decoded(rollout, rollout.ids)
    assert "26" in before
    for day in (27, 28):
        Clock.day = day
        rollout.generate()
        rollout.add(NEXT)
    assert decoded(rollout, rollout.ids).startswith(before)
    assert f"{Clock.now():%Y-%m-%d}" not in decoded(rollout, rollout.ids)


@families
def test_without_the_package_renderers_the_difference_renders(
    family: Family, monkeypatch: pytest.MonkeyPatch
):
    """The same follows a turn, or an error by name says that it cannot be told."""
    for name, case in cases_of(family).items():
        found = []
        for has_package in (True, False):
            with monkeypatch.context() as patch:
                if not has_package:
                    patch.setitem(sys.modules, "renderers", None)
                    patch.setitem(sys.modules, "renderers.parsing", None)
                rollout, _ = start(family, case.text + case.end, tools=case.tools, **KEEP)
                rollout.generate()
                _, new = with_ids(case, rollout)
                if not has_package:
                    assert rollout.info["rendering"] == "difference"
                    assert "renderers is not installed" in rollout.info["why"]
                    if name in family.needs_renderers:
                        with pytest.raises((MessageDropped, TemplateRefused), match="add ids"):
                            rollout.add(new)
                        continue
                found.append(decoded(rollout, rollout.add(new)))
        assert found == found[:1] * (1 if name in family.needs_renderers else 2), name


@families
def test_a_template_that_writes_no_answers_of_tools_says_so(family: Family):
    """And one that accepts no images."""
    text = family.thinking(None, render(family, [USER])) + family.answer + ANSWER + family.end
    rollout, _ = start(family, text, **KEEP)
    rollout.generate()
    if family.refuses_tools:
        errors = {"TemplateRefused": TemplateRefused, "MessageDropped": MessageDropped}
        with pytest.raises(errors[family.refuses_tools], match=r"template .*(role|'tool')"):
            rollout.add({"role": "tool", "content": "forty-two", "tool_call_id": "c00000001"})
    image = [{"type": "image", "image": b"png"}, {"type": "text", "text": "And this?"}]
    if family.image:
        assert family.image in decoded(rollout, rollout.add({"role": "user", "content": image}))
        assert len(rollout.arrays().images) == 1
    else:
        with pytest.raises((InvalidRequest, TemplateRefused), match="no images"):
            rollout.add({"role": "user", "content": image})


@of(tuple(one.name for one in HERE if one.keeps_with))
def test_a_variable_of_the_template_keeps_thoughts(family: Family):
    kwargs = dict(family.keeps_with)
    case = cases_of(family, **kwargs)["thought"]
    rollout, client = start(family, case.text + case.end, ANSWER, chat_template_kwargs=kwargs)
    rollout.generate()
    rollout.add(case.new)
    rollout.generate()
    whole = render(family, [USER, case.message, NEXT], **kwargs)
    assert squeezed(decoded(rollout, client.prompts[1])) == squeezed(whole)
    assert rollout.info["family"] in (family.renderers[0], "qwen3.6")


@families
def test_a_renderer_is_found_within_a_second(family: Family):
    rollout, _ = start(family, tokenizer=new_tokenizer(family), tools=[TOOL])
    # The package is imported.
    _ = start(family)[0].info
    began = time.process_time()
    _ = rollout.info
    assert time.process_time() - began < 3


def add_one(number: int) -> int:
    """Adds one.

    Args:
        number: The number.
    """
    return number + 1


def play(family: Family, *texts: str | Written, **options: Any) -> tuple[Rollout, WritingClient]:
    tokenizer = tokenizer_of(family)
    completions = [one if isinstance(one, Written) else written(tokenizer, one) for one in texts]
    client = WritingClient(completions)
    settings = {"tools": [add_one], "rollout_options": KEEP, **options}
    (rollout,) = run_rollouts(client, [[USER]], tokenizer=tokenizer, **settings)
    assert rollout.error is None, rollout.error
    check_authors(rollout, client)
    return rollout, client


RUN = ("Qwen 3.5", "Gemma 4", "GLM 4.5", "gpt-oss", "Mistral")


def schema() -> Any:
    """As the server gives it to a template, which may print what the function returns, too."""
    (tool,) = schemas_of([add_one])
    names = ("name", "description", "parameters")
    return [{**tool, "function": {name: tool["function"][name] for name in names}}]


@of(RUN)
def test_a_run_calls_tools_answers_and_goes_on(family: Family):
    """A thought and a call, the tool's answer, the model's, and another question: the whole text."""
    tools = schema()
    prompt = render(family, [USER], tools)
    thought = family.thinking(THOUGHT, prompt) if family.thought else ""
    called = thought + family.calling(41) + family.call_ends
    # No header precedes what Gemma 4 says after an answer of a tool.
    answered = family.thinking(None, prompt) + family.answer + ANSWER + family.end
    questions = [[NEXT], None]
    rollout, client = play(
        family, called, answered, answered, environment=lambda rollout: questions.pop(0)
    )
    assert rollout.stop_reason == "environment"
    call = next(one for one in rollout._state.history if one.get("tool_calls"))
    (call,) = call["tool_calls"]
    assert call["function"] == {"name": "add_one", "arguments": {"number": 41}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    calling |= dict.fromkeys(["reasoning_content", "thinking"], THOUGHT) if thought else {}
    result = answer_of(family, 0, "42") | {"tool_call_id": call["id"]}
    first = render(family, [USER, calling, result], tools)
    second = render(
        family, [USER, calling, result, {"role": "assistant", "content": ANSWER}, NEXT], tools
    )
    after_call = decoded(rollout, client.prompts[1])[len(prompt + called) :]
    assert first.endswith(after_call)
    after_answer = decoded(rollout, client.prompts[2]).removeprefix(
        decoded(rollout, client.prompts[1]) + answered
    )
    assert second.endswith(after_answer)
    assert NEXT["content"] in after_answer
    assert decoded(rollout, rollout.ids) == (
        prompt + called + after_call + answered + after_answer + answered
    )


@of(RUN)
def test_a_run_answers_a_call_that_cannot_be_read_with_what_is_wrong(family: Family):
    text = family.thinking(None, render(family, [USER], schema()))
    broken = family.calling(41).replace("41", '{"a": [4')
    unknown = family.calling(41).replace("add_one", "add_two")
    for call in (broken, unknown):
        rollout, client = play(
            family, text + call + family.call_ends, family.answer + ANSWER + family.end
        )
        assert rollout.stop_reason == "answered"
        assert "Error" in decoded(rollout, client.prompts[1])


THINKING = ("Qwen 3.5", "GLM 4.5")


@of(THINKING)
def test_a_call_within_a_thought_is_not_run(family: Family):
    prompt = render(family, [USER], schema())
    text = family.thinking(f"I may write {family.calling(41)} later.", prompt)
    rollout, client = play(family, text + family.answer + ANSWER + family.end)
    assert rollout.stop_reason == "answered"
    assert len(client.prompts) == 1


@of(THINKING)
def test_a_thought_that_was_cut_ends_a_run_or_is_closed(family: Family):
    prompt = render(family, [USER], schema())
    cut = written(
        tokenizer_of(family), family.thinking(THOUGHT, prompt).partition("</think>")[0], "length"
    )
    rollout, client = play(family, cut)
    assert (rollout.stop_reason, len(client.prompts)) == ("length", 1)
    answer = ANSWER + family.end
    rollout, client = play(family, cut, answer, closes_thoughts=True)
    assert rollout.stop_reason == "answered"
    closed = decoded(rollout, client.prompts[1])
    assert closed == prompt + decoded(rollout, cut.ids) + "\n</think>\n\n"
    assert decoded(rollout, rollout.ids) == closed + answer


def test_the_document_has_what_these_tests_show_of_each_family():
    text = (REPOSITORY / "docs" / "models.md").read_text().partition("\n| family |")[2]
    lines = text.partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[:-1] for row in rows] == [family.cells for family in FAMILIES]
    assert all(row[-1] for row in rows)


def family_named(name: str) -> Family:
    (family,) = (one for one in HERE if one.name == name)
    return family


def play_turn(
    family: Family, text: str, *, tools: Any = None, reason: str = "stop", **options: Any
):
    tokenizer = tokenizer_of(family)
    client = WritingClient([written(tokenizer, text, reason), written(tokenizer, "x")])
    rollout = Rollout(client, messages=[USER], tokenizer=tokenizer, tools=tools, **options)
    rollout.generate()
    return rollout, client, tokenizer


def test_an_answer_of_a_tool_is_dropped_by_name_however_often_one_was_written():
    """Gemma 4's template writes it after a call only, and rollouts of a run share what is known."""
    gemma = family_named("Gemma 4")
    called, client, tokenizer = play_turn(gemma, gemma.calling(41) + gemma.call_ends, tools=[TOOL])
    called.add(answer_of(gemma, 0))
    client.completions = [written(tokenizer, "It is 42." + gemma.end)]
    called.generate()
    with pytest.raises(MessageDropped, match="'tool'"):
        called.add(answer_of(gemma, 0, "SUNNY and warm"))


@pytest.mark.parametrize(
    "content",
    [[{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}], {"a": 1}],
    ids=["parts", "object"],
)
@pytest.mark.parametrize("name", ["Qwen 2.5", "Qwen 3"])
def test_what_the_renderer_reads_in_another_way_is_the_template_s(name: str, content: Any):
    family = family_named(name)
    rollout, _, tokenizer = play_turn(family, family.calling(41) + family.end, tools=[TOOL])
    if isinstance(content, dict) and name == "Qwen 3":
        # Its template writes no content but texts.
        with pytest.raises(MessageDropped):
            rollout.add(answer_of(family, 0, content))
        return
    rollout.add(answer_of(family, 0, content))
    text = tokenizer.decode(rollout.ids)
    assert ("part one\npart two" in text) or ("{'a': 1}" in text) or ('{"a": 1}' in text)


def test_a_thought_that_the_template_drops_is_missed_where_the_answer_says_the_same():
    gemma = family_named("Gemma 4")
    rollout, _, _ = play_turn(gemma, gemma.thought.replace("{}", "42") + "It is 42." + gemma.end)
    with pytest.raises(HistoryRewritten):
        rollout.add(NEXT)


@pytest.mark.parametrize("name", ["Gemma 4", "gpt-oss"])
def test_a_hermes_call_in_another_family_s_thought_is_not_run(name: str):
    family = family_named(name)
    call = '<tool_call>{"name": "add_one", "arguments": {"number": 41}}</tool_call>'
    text = family.thought.replace("{}", f"I could {call}.") + family.answer + "No." + family.end

    def add_one(number: int) -> int:
        """Adds one.

        Args:
            number: The number.
        """
        raise AssertionError("the call was only considered")

    client = WritingClient([written(tokenizer_of(family), text)])
    (rollout,) = run_rollouts(client, [[USER]], tokenizer=tokenizer_of(family), tools=[add_one])
    assert (rollout.stop_reason, rollout.error) == ("answered", None)


def test_a_thought_ends_as_it_has_begun():
    gemma, harmony = family_named("Gemma 4"), family_named("gpt-oss")
    begun, _, _ = gemma.thought.partition("{}")
    rollout, _, tokenizer = play_turn(gemma, begun + "Hm", reason="length")
    assert tokenizer.decode(rollout.close_thought()) == "<channel|>"
    assert not rollout.is_thinking
    begun, _, _ = harmony.thought.partition("{}")
    rollout, _, _ = play_turn(harmony, begun + "Hm", reason="length")
    before = rollout.ids.tolist()
    with pytest.raises(ValueError, match="expected a text that ends the thought"):
        rollout.close_thought()
    assert rollout.ids.tolist() == before


def test_an_answer_in_json_is_no_call_where_there_are_no_tools():
    llama = next(one for one in HERE if one.name.startswith("Llama 3") and one.call)
    answer = '{"name": "Bob", "parameters": {"age": 7}}'
    rollout, _, _ = play_turn(llama, answer + llama.end)
    rollout.add(NEXT)
    assert rollout.messages[1] == {"role": "assistant", "content": answer}
