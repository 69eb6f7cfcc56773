"""verifiers, unmodified: interleaved rollouts that pass on token ids, with real vLLM."""

import itertools
import json

import pytest
from transformers import AutoTokenizer

from harness.servers import Server
from tests.kit.models import reference
from tests.kit.models.reference import TOLERANCE
from tests.kit.peers.verifiers_rollouts import rollouts

END_OF_TEXT, END_OF_MESSAGE = 0, 2
# The random model seldom ends a message; this bias makes about half of the turns end by themselves.
BIAS = 4.0
# As prime-rl's trainer sets them.
SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "max_tokens": 16, "logprobs": True,
    "extra_body": {
        "return_token_ids": True, "top_k": -1, "min_p": 0.0, "min_tokens": 0,
        "repetition_penalty": 1.0, "logit_bias": {str(END_OF_MESSAGE): BIAS},
        "stop_token_ids": [END_OF_MESSAGE],
    },
}  # fmt: skip
TURNS = 4
# The random model writes a tool call only when a grammar forces it.
CALL = r'<tool_call>\n\{"name": "look", "arguments": \{"at": "[a-z]{1,4}"\}\}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def played(server: Server) -> list[dict]:
    return rollouts(server.url, sampling=SAMPLING, max_turns=TURNS, reply="Turn", with_tools=False)


def test_each_turn_starts_with_all_ids_of_the_turn_before(played: list[dict], tokenizer):
    assert len(played) == 6
    for rollout in played:
        assert rollout["error"] is None
        assert rollout["stop_condition"] == "max_turns_reached"
        turns = rollout["turns"]
        assert len(turns) == TURNS
        for index, (before, after) in enumerate(itertools.pairwise(turns), 1):
            seen = before["prompt_ids"] + before["completion_ids"]
            assert after["prompt_ids"][: len(seen)] == seen
            # Between two turns stands what the template writes there, and nothing else.
            expected = between(tokenizer, seen[-1], "user", f"Turn {index}")
            assert after["prompt_ids"][len(seen) :] == expected


def between(tokenizer, last_id: int, role: str, text: str) -> list[int]:
    end = "" if last_id == END_OF_MESSAGE else "<|im_end|>"
    message = f"<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"
    # verifiers tokenizes each piece separately.
    return tokenizer(end + "\n")["input_ids"] + tokenizer(message)["input_ids"]


def test_turns_end_by_stop_and_by_length_with_drift(played: list[dict], tokenizer):
    turns = [turn for rollout in played for turn in rollout["turns"]]
    assert {turn["finish_reason"] for turn in turns} == {"stop", "length"}
    for turn in turns:
        ended = turn["completion_ids"][-1] in (END_OF_TEXT, END_OF_MESSAGE)
        assert ended == (turn["finish_reason"] == "stop")
        assert turn["is_truncated"] == (not ended)
    later = [turn for rollout in played for turn in rollout["turns"][1:]]
    # At least one prompt must differ from its rendered messages, or the tests could not detect that
    # messages were rendered again.
    assert any(rendered(tokenizer, turn["messages"]) != turn["prompt_ids"] for turn in later)


def rendered(tokenizer, messages: list[dict]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_logprobs_follow_from_the_exact_prompt_ids(played: list[dict], tiny_model: str):
    for turn in played[0]["turns"] + played[-1]["turns"]:
        ids = turn["completion_ids"]
        rows = reference.logprobs(tiny_model, turn["prompt_ids"], ids)
        rows = rows.clone()
        rows[:, END_OF_MESSAGE] += BIAS
        expected = rows.log_softmax(-1)[range(len(ids)), ids].tolist()
        assert turn["completion_logprobs"] == pytest.approx(expected, abs=TOLERANCE)


def test_a_conversation_that_is_too_long_ends_its_rollout(server: Server):
    ended = rollouts(
        server.url, sampling=SAMPLING, max_turns=9, reply="word " * 180, with_tools=False
    )
    for rollout in ended:
        # verifiers recognises the refusal by its message, and does not count it as a model's error.
        assert (rollout["stop_condition"], rollout["error"]) == ("prompt_too_long", None)
        assert 1 <= len(rollout["turns"]) < 9


def test_tools_are_called_between_turns(single_server: Server, tokenizer):
    body = {**SAMPLING["extra_body"], "structured_outputs": {"regex": CALL}}
    played = rollouts(
        single_server.url, sampling={**SAMPLING, "max_tokens": 90, "extra_body": body},
        max_turns=3, reply="Seen:", with_tools=True,
    )  # fmt: skip
    assert len(played) == 6
    for rollout in played:
        assert (rollout["stop_condition"], rollout["error"]) == ("max_turns_reached", None)
        for before, after in itertools.pairwise(rollout["turns"]):
            seen = before["prompt_ids"] + before["completion_ids"]
            assert after["prompt_ids"][: len(seen)] == seen
            asked, answered = after["messages"][-2:]
            (call,) = asked["tool_calls"]
            at = json.loads(call["function"]["arguments"])["at"]
            assert answered["content"] == f"Seen: {at}"
            expected = between(tokenizer, seen[-1], "tool", f"Seen: {at}")
            assert after["prompt_ids"][len(seen) :] == expected
