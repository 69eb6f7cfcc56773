"""Many rollouts at once; completions are written by the tests."""

import threading
import time

import numpy as np
import pytest

from tests.kit.models.chat_templates import tokenizer_of
from tests.kit.peers.rollout_client import Answer, WritingClient, Written, written
from titopool import run_rollouts
from titopool.rollouts.tools import hermes_calls, schemas_of

USER = {"role": "user", "content": "6 times 7?"}
END = "<|im_end|>"


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def call_of(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>{END}"


CALL = call_of('{"name": "multiply", "arguments": {"a": 6, "b": 7}}')
QWEN = tokenizer_of("qwen2.5")


def play(client, prompts=([USER],), **options):
    return run_rollouts(client, list(prompts), tokenizer=QWEN, **options)


def texts(*completions: str | Written) -> WritingClient:
    return WritingClient(
        [one if isinstance(one, Written) else written(QWEN, one) for one in completions]
    )


def test_a_tool_runs_between_the_turns():
    client = texts(CALL, "It is 42." + END)
    (rollout,) = play(client, tools=[multiply], max_tokens=50)
    assert rollout.error is None
    assert rollout.stop_reason == "answered"
    assert [one["role"] for one in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.messages[2]["content"] == "42"
    # The model gets the tool's schema, and the call as it wrote it.
    text = QWEN.decode(client.prompts[1])
    assert '"description": "Multiplies two numbers."' in text
    assert CALL + "\n<|im_start|>user\n<tool_response>\n42" in text
    assert all(one["session_id"] == rollout.session_id for one in client.calls)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("{", "Error: the call is not JSON"),
        ("[1]", 'Error: expected {"name"'),
        ('{"name": 3}', 'Error: expected {"name"'),
        ('{"name": "multiply", "arguments": [1]}', 'Error: expected {"name"'),
        ('{"name": "divide"}', "Error: expected one of multiply, got divide"),
        ('{"name": "multiply", "arguments": {"a": 1}}', "Error: TypeError: "),
        ('{"name": "multiply", "arguments": {"a": "x", "b": "y"}}', "Error: TypeError: "),
    ],
)
def test_the_model_is_told_what_is_wrong_with_its_call(call: str, answer: str):
    (rollout,) = play(texts(call_of(call), "Oh." + END), tools=[multiply])
    assert rollout.error is None
    assert rollout.messages[2]["content"].startswith(answer)


def test_calls_are_found_in_hermes_form():
    found = hermes_calls(f"I call. {CALL} and\n<tool_call>" + '{"name": "b"}')
    assert [(one.name, one.arguments) for one in found] == [
        ("multiply", {"a": 6, "b": 7}),
        ("b", {}),
    ]
    assert hermes_calls("no call") == []


def test_schemas_are_transformers_own():
    (schema,) = schemas_of([multiply])
    assert schema["function"]["parameters"]["properties"]["a"] == {
        "type": "integer", "description": "The first number.",
    }  # fmt: skip


def test_an_environment_answers_until_it_ends_the_rollout():
    def environment(rollout):
        num_turns = sum(one["role"] == "assistant" for one in rollout.messages)
        return {"role": "user", "content": f"More {num_turns}."} if num_turns < 3 else None

    client = texts("a" + END, "b" + END, "c" + END)
    (rollout,) = play(client, environment=environment)
    assert rollout.stop_reason == "environment"
    assert "".join(one["content"] for one in rollout.messages) == "6 times 7?aMore 1.bMore 2.c"


@pytest.mark.parametrize("has_environment", [False, True])
def test_a_cut_turn_calls_no_tool(has_environment: bool):
    client = texts(Written(written(QWEN, CALL).ids, "length"), "b" + END)
    seen = []

    def environment(rollout):
        seen.append(rollout.last_turn.finish_reason)
        return {"role": "user", "content": "Go on."} if len(seen) == 1 else None

    (rollout,) = play(
        client, tools=[multiply], environment=environment if has_environment else None
    )
    assert seen == (["length", "stop"] if has_environment else [])
    assert rollout.stop_reason == ("environment" if has_environment else "length")
    assert not any(one["role"] == "tool" for one in rollout.messages)


def test_a_rollout_ends_at_its_last_turn_without_an_answer():
    (rollout,) = play(texts(CALL, CALL, CALL), tools=[multiply], max_turns=3)
    assert rollout.stop_reason == "max_turns"
    assert rollout.messages[-1]["role"] == "assistant"
    assert rollout.arrays().loss_mask[-1] == 1


def test_a_full_context_ends_a_rollout():
    length = len(play(texts("x" + END))[0].ids)
    (rollout,) = play(
        texts(CALL, "y"), tools=[multiply], rollout_options={"max_context": length + 40},
    )  # fmt: skip
    assert (rollout.stop_reason, rollout.error) == ("context", None)


class Groups:
    """Answers with the seed; some prompts fail. Counts the calls that run at once."""

    def __init__(self):
        self.lock = threading.Lock()
        self.num_running = self.most_running = 0

    def generate(self, prompts, *, seed, **options):
        with self.lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        time.sleep(0.02)
        with self.lock:
            self.num_running -= 1
        if prompts[0][0] == 3:
            raise ConnectionError("gone")
        return [Answer(np.asarray(prompts[0]), (Written(np.array([seed, 2], np.int32)),))]


def test_groups_are_in_order_and_a_failure_stops_only_its_rollout(capfd: pytest.CaptureFixture):
    client = Groups()
    prompts = [[index, 9] for index in range(1, 7)]
    rollouts = run_rollouts(
        client, prompts, tokenizer=QWEN, n=4, seed=100, concurrency=5, progress=True
    )
    for index, rollout in enumerate(rollouts):
        prompt = prompts[index // 4]
        if prompt[0] == 3:
            assert isinstance(rollout.error, ConnectionError)
            assert rollout.ids.tolist() == prompt
        else:
            assert rollout.error is None
            assert rollout.ids.tolist() == [*prompt, 100 + index % 4, 2]
    assert 2 <= client.most_running <= 5
    assert len({one.session_id for one in rollouts}) == 24
    assert "24/24" in capfd.readouterr().err


def test_an_environment_s_error_keeps_the_tokens_so_far():
    def environment(rollout):
        raise RuntimeError("no world")

    (rollout,) = play(texts("a" + END), environment=environment)
    assert str(rollout.error) == "no world"
    assert rollout.stop_reason == "error"
    assert rollout.arrays().loss_mask.sum() == 2


def test_wrong_arguments_are_refused_before_anything_runs():
    for options in ({"n": 0}, {"max_turns": 0}, {"concurrency": 0}):
        with pytest.raises(ValueError, match="expected at least 1"):
            play(texts(), **options)
    with pytest.raises(ValueError, match="images"):
        play(texts("a"), prompts=([USER], [{"role": "user", "content": [{"type": "image"}]}]))
    assert play(texts(), prompts=()) == []
