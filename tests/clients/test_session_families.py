"""What follows a turn of a session, for the templates of model families: messages that stand for a long
history give the same ids as the history."""

import json
from typing import Any

import numpy as np
import pytest

from app.conversations.following import as_read, follow_turn, short_of, without_repeats
from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat
from tests.kit.models.families import HERE, Family, tokenizer_of
from tests.kit.models.family_cases import SYSTEM, TOOL, USER, Case, cases_of, render
from titopool.conversations.templates import LocalTemplate
from titopool.conversations.turns import Turn, TurnRenderer, squeezed

LONG = " It goes on for a while, so that nobody wants to write it again." * 20
NUM_ROUNDS = 7
# As tools of harnesses, whose descriptions are longer than most conversations.
DESCRIBED = {
    "type": "function",
    "function": {**TOOL["function"], "description": "Adds one." + LONG},  # type: ignore[dict-item]
}


def histories(family: Family, case: Case) -> list[list[dict[str, Any]]]:
    """Conversations before the turn, which begin with long texts, or have many rounds."""
    long_user = {**USER, "content": USER["content"] + LONG}
    answered = [long_user, {"role": "assistant", "content": "Yes." + LONG}, long_user]
    cases = cases_of(family)
    rounds = [long_user, *[cases["plain"].message, *cases["plain"].new] * NUM_ROUNDS]
    if case.tools and "tool" in cases:
        called = [cases["tool"].message, *cases["tool"].new]
        rounds += [*called * NUM_ROUNDS, cases["plain"].message, USER, *called]
    found = [[long_user], answered, rounds]
    if "system" in family.name or family.name.startswith("gemma"):
        return found
    return [[{**SYSTEM, "content": SYSTEM["content"] + LONG}, *one] for one in found]


@pytest.mark.parametrize("family", HERE, ids=lambda family: family.name)
def test_a_history_needs_not_be_rendered_again(family: Family):
    tokenizer, num_compared = tokenizer_of(family), 0
    for name, case in cases_of(family).items():
        tools = None if case.tools is None else [DESCRIBED]
        for messages in histories(family, case):
            try:
                text = render(family, messages, tools)
            except Exception:
                continue
            prompt, sampled = (
                np.array(tokenizer(one, add_special_tokens=False)["input_ids"], np.int32)
                for one in (text, case.text + case.end)
            )
            renderer = TurnRenderer(LocalTemplate(tokenizer, tools))
            read = read_conversation([*messages, *case.new], "messages").messages
            history, new = read[: len(messages)], read[len(messages) :]
            turn = Turn(
                prompt, sampled, history, lambda text=text: squeezed(text), frozenset()  # type: ignore[misc]
            )  # fmt: skip
            try:
                expected = renderer.follow(turn, new, []).ids
            except Exception:
                expected = None
            chat = Chat(read, "messages", tools, {})
            short = [short_of(json.loads(json.dumps(one))) for one in history]
            parsed, text = as_read(case.message), {"role": "assistant", "content": case.text}
            found, by_text = (
                follow_turn(tokenizer, chat, short, prompt, sampled, message, new, 0)
                for message in (parsed, text)
            )
            if expected is None:
                assert found is None, (name, found)
                continue
            assert found is not None, name
            assert found.ids.tolist() == expected.tolist(), (name, len(messages))
            # A server without parsers may begin a branch.
            assert by_text is None or by_text.ids.tolist() == expected.tolist(), name
            num_compared += 1
    assert num_compared


def test_rounds_of_one_form_are_rendered_a_few_times_only():
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "b"}
    plain = [{"role": "assistant", "content": "c"}, user]
    call = {"id": "c00000000", "type": "function", "function": {"name": "f", "arguments": {}}}
    called = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "d"},
    ]
    history = [system, user, *(plain + called) * 9, *plain]
    first, last = (plain + called) * 2, called + plain
    assert without_repeats(history) == [system, user, *first, *last * 2]
    pictured = [plain[0], {"role": "user", "content": [{"type": "image"}]}]
    for kept in ([system, user, *plain * 4], [system, user, *pictured * 9], [user], []):
        assert without_repeats(kept) == kept
