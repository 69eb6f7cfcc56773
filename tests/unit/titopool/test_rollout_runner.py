"""Many rollouts at once; completions are written by the tests."""

import asyncio
import copy
import datetime
import functools
import json
import os
import signal
import threading
import time

import numpy as np
import pytest
from tokenizers import normalizers
from transformers.utils import chat_template_utils

from harness.servers import wait_until
from tests.kit.models.chat_templates import tokenizer_of
from tests.kit.peers.rollout_client import Answer, WritingClient, Written, written
from tests.kit.peers.trl_client import TRL_FOLDER
from titopool import Rollout, run_rollouts
from titopool.conversations import templates as templates_module
from titopool.conversations.interface import HistoryRewritten, MessageDropped
from titopool.conversations.templates import LocalTemplate
from titopool.conversations.turns import TurnRenderer
from titopool.errors import InvalidRequest, NoReadyWorker, PromptTooLong
from titopool.rollouts.rollout import derived_seed
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


@pytest.mark.parametrize("opening", ["<think>\n", ""])
def test_calls_that_a_thought_considers_are_not_run(opening: str):
    thought = f"{opening}I could {CALL.removesuffix(END)}, but no.\n</think>\n\n"
    (rollout,) = play(texts(thought + "I do not." + END), tools=[multiply])
    assert rollout.stop_reason == "answered"
    text = thought + CALL
    assert [one.name for one in hermes_calls(text)] == ["multiply"]
    assert len(hermes_calls(text, in_thoughts=True)) == 2
    assert hermes_calls("<think>" + CALL) == []
    for tag in ("<think>", "</think>"):
        inside = call_of(json.dumps({"name": "f", "arguments": {"s": tag}}))
        for before in ("", "<think>a</think>"):
            assert [one.arguments for one in hermes_calls(before + inside)] == [{"s": tag}]
    interleaved = f"{CALL}<think>again: {CALL}</think>{CALL}"
    assert len(hermes_calls(interleaved)) == 2


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("half \ud83d", "half \ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ({"a": {1, 2}}, '{"a": "{1, 2}"}'),
    ],
)
def test_any_answer_of_a_tool_is_a_text(answer: object, read: str):
    def look() -> object:
        """Looks."""
        return answer

    client = texts(call_of('{"name": "look"}'), "Oh." + END)
    (rollout,) = play(client, tools=[look])
    assert rollout.error is None
    assert rollout.messages[2]["content"] == read


def test_coroutine_functions_are_refused_by_name():
    async def ask() -> str:
        """Asks."""
        return ""

    class Asking:
        async def __call__(self, rollout):
            pass

    wrapped = [functools.partial(ask), Asking()]
    for options in ({"tools": [ask]}, *({"environment": one} for one in (ask, *wrapped))):
        with pytest.raises(ValueError, match=r"function .*; use run_rollouts_async"):
            play(texts(), **options)


def test_a_name_that_no_tokenizer_takes_is_told_to_the_model():
    client = texts(call_of(r'{"name": "f\ud83d", "arguments": {}}'), "Oh." + END)
    (rollout,) = play(client, tools=[multiply])
    assert rollout.error is None
    assert rollout.messages[2] == {
        "role": "tool", "name": "f\ufffd", "content": "Error: expected one of multiply, got f\ufffd",
    }  # fmt: skip


def test_a_tool_that_is_cancelled_stops_the_other_rollouts():
    class Server(Groups):
        num_calls = 0

        def generate(self, prompts, **options):
            self.num_calls += 1
            return super().generate(prompts, seed=1, **options)

    def environment(rollout):
        if rollout.prompt_index == 0:
            raise asyncio.CancelledError
        return USER

    server, max_turns = Server(), 1000
    with pytest.raises(asyncio.CancelledError):
        run_rollouts(
            server, [[1], [2], [4]], tokenizer=QWEN, environment=environment, max_turns=max_turns
        )
    wait_until(lambda: not any(one.name.startswith("rollout") for one in threading.enumerate()), 60)
    # Each of the other rollouts would have sent so many.
    assert server.num_calls < max_turns


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


@pytest.mark.parametrize("family, begun", [("qwen3", "<think>\nHm"), ("r1", "Hm")])
def test_a_cut_thought_ends_its_rollout(family: str, begun: str):
    """The generation prompt of R1's template has begun the thought."""
    tokenizer = tokenizer_of(family)
    for text, stop_reason in ((begun, "length"), (begun + "\n</think>\n\nIt", "environment")):
        client = WritingClient([Written(written(tokenizer, text).ids, "length")])
        (rollout,) = run_rollouts(
            client, [[USER]], tokenizer=tokenizer, environment=lambda rollout: None
        )
        assert rollout.is_thinking == (stop_reason == "length")
        assert (rollout.stop_reason, rollout.error) == (stop_reason, None)
    about = [{"role": "user", "content": "Think first, in <think> tags."}]
    client = WritingClient([Written(written(QWEN, "Hm").ids, "length")])
    (rollout,) = play(client, prompts=(about,), environment=lambda rollout: None)
    assert rollout.stop_reason == "environment"


def trl_tokenizer(name: str, *special: str):
    """With the template that TRL ships for a family, and its special tokens."""
    tokenizer = copy.deepcopy(QWEN)
    tokenizer.add_tokens([*special, "<think>", "</think>"], special_tokens=True)
    folder = TRL_FOLDER / "1.16.0" / "trl" / "chat_templates"
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
    return tokenizer


@pytest.mark.parametrize("names_its_ends", [False, True])
@pytest.mark.parametrize("role, end", [("user", "<|user|>"), ("tool", "<|observation|>")])
def test_the_end_of_a_turn_that_begins_the_next_message_stands_once(
    names_its_ends: bool, role: str, end: str
):
    """GLM's: its model stops at `<|user|>` and `<|observation|>`."""
    glm = trl_tokenizer(
        "glm4moe", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "[gMASK]", "<sop>"
    )
    ends = glm.convert_tokens_to_ids(["<|user|>", "<|observation|>"]) if names_its_ends else ()
    client = WritingClient([written(glm, "<think>x</think>\n42." + end)])
    rollout = Rollout(
        client, messages=[USER], tokenizer=glm, on_rewrite="keep", end_of_turn_ids=ends
    )
    rollout.generate(stop=["</answer>"])
    assert rollout.last_text == "<think>x</think>\n42."
    new = rollout.add({"role": role, "content": "Indeed."})
    text = glm.decode(rollout.ids)
    assert text.count(end) == (2 if role == "user" else 1)
    assert f"42.{end}" in text
    assert "Indeed." in glm.decode(new)
    assert rollout.messages[1]["content"] == "<think>x</think>\n42."


def test_a_failure_of_the_server_is_no_answer_about_its_template():
    class Failing(LocalTemplate):
        has_failed = False

        def text(self, messages, images, *, is_prompt=True):
            if messages[-1]["role"] == "tool" and not self.has_failed:
                self.has_failed = True
                raise NoReadyWorker("gone")
            return super().text(messages, images, is_prompt=is_prompt)

    glm = trl_tokenizer("glm4moe", "<|user|>", "<|assistant|>", "<|observation|>")
    renderer = TurnRenderer(Failing(glm))
    with pytest.raises(NoReadyWorker):
        _ = renderer.openings
    ends = glm.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    assert renderer.openings == set(ends)


def test_a_message_that_the_template_leaves_out_is_an_error_by_name():
    """Gemma 4's template writes an answer of a tool only after a structured call."""
    gemma = trl_tokenizer("gemma4", "<bos>", "<turn|>", "<|turn>")
    gemma.bos_token = "<bos>"
    client = WritingClient([written(gemma, "call" + "<turn|>")])
    rollout = Rollout(client, messages=[USER], tokenizer=gemma, on_rewrite="keep")
    rollout.generate()
    before = rollout.ids.tolist()
    for content in ("SUNNY and warm", "1"):
        with pytest.raises(MessageDropped, match="nothing of the one of 'tool'"):
            rollout.add({"role": "tool", "content": content})
    assert rollout.ids.tolist() == before
    rollout.add({"role": "user", "content": "SUNNY and warm"})
    assert "SUNNY and warm" in gemma.decode(rollout.ids)


def test_an_image_that_the_template_leaves_out_is_refused():
    """GLM 4.5's template reads parts, and writes the texts among them."""
    glm = trl_tokenizer("glm4moe", "<|user|>", "<|assistant|>", "<|observation|>")
    content = [{"type": "text", "text": "What is it?"}, {"type": "image", "image": b"png"}]
    rollout = Rollout(WritingClient([]), messages=[{**USER, "content": content}], tokenizer=glm)
    with pytest.raises(InvalidRequest, match="accepts no images"):
        _ = rollout.ids
    (text,) = content[:1]
    rollout = Rollout(WritingClient([]), messages=[{**USER, "content": [text]}], tokenizer=glm)
    assert "What is it?" in glm.decode(rollout.ids)


@pytest.mark.parametrize(
    "text", ["cafe\u0301", "\u0958\u0932\u092e", "5 \u212b", "\u1112\u1161\u11ab"]
)
def test_a_tokenizer_that_normalizes_rewrites_no_history(text: str):
    """As Qwen's; the model samples bytes, of which no form of Unicode is asked."""
    tokenizer = copy.deepcopy(QWEN)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    sampled = written(QWEN, text + END)
    client = WritingClient([sampled])
    rollout = Rollout(client, messages=[USER], tokenizer=tokenizer)
    num_prompt = len(rollout.ids)
    rollout.generate()
    rollout.add(USER)
    assert rollout.messages[1]["content"] == text
    assert rollout.ids[num_prompt:][: len(sampled.ids)].tolist() == sampled.ids.tolist()


def test_a_conversation_that_the_server_finds_too_long_is_a_full_context():
    class Server(WritingClient):
        def render(self, messages, **options):
            if len(messages) > 2:
                raise PromptTooLong("messages: expected at most 7 tokens, got 9")
            text = QWEN.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=options["add_generation_prompt"]
            )
            return QWEN(text, add_special_tokens=False)["input_ids"]

        def detokenize(self, ids):
            return QWEN.decode(ids)

    client = Server([written(QWEN, "a" + END)])
    (rollout,) = run_rollouts(client, [[USER]], environment=lambda rollout: USER)
    assert (rollout.stop_reason, rollout.error) == ("context", None)


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


def sampled_seed(seed: int, index: int) -> int:
    """The id for which `Groups` answers, of the rollout at `index`."""
    return derived_seed(seed, index // 4, index % 4) % 1000


class Groups:
    """Answers with the seed modulo 1000; some prompts fail. Counts the calls that run at once."""

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
        return [Answer(np.asarray(prompts[0]), (Written(np.array([seed % 1000, 2], np.int32)),))]


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
            assert rollout.ids.tolist()[::2] == [prompt[0], sampled_seed(100, index)]
    assert 2 <= client.most_running <= 5
    assert len({one.session_id for one in rollouts}) == 24
    assert "24/24" in capfd.readouterr().err


def test_a_seed_draws_other_numbers_at_each_place():
    client = texts(*["a" + END] * 12)
    play(
        client, prompts=([USER], [USER]), n=2, max_turns=3, seed=7, concurrency=1,
        environment=lambda rollout: USER,
    )  # fmt: skip
    seeds = [one["seed"] for one in client.calls]
    assert seeds[0] == 7
    assert len(set(seeds)) == 12
    assert all(-(2**63) <= one < 2**62 for one in seeds)
    with pytest.raises(ValueError, match="seed: expected an integer"):
        play(texts(), seed=0.5)


def test_an_interrupt_ends_all_rollouts_on_the_server_too():
    class Server:
        """Completions end when they are aborted; the third request interrupts the process."""

        def __init__(self) -> None:
            self.aborted, self.num_calls = threading.Event(), 0

        def generate(self, prompts, **options):
            self.num_calls += 1
            if self.num_calls == 3:
                os.kill(os.getpid(), signal.SIGINT)
            assert self.aborted.wait(60)
            return [Answer(np.asarray(prompts[0]), (written(QWEN, "a", "abort"),))]

        def abort(self, request_ids):
            self.aborted.set()

    server = Server()
    # A shell starts what runs in its background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            play(server, prompts=([USER],) * 3, environment=lambda rollout: USER, max_turns=50)
    finally:
        signal.signal(signal.SIGINT, before)
    assert server.aborted.is_set()
    time.sleep(0.5)
    assert server.num_calls == 3


def test_what_counts_tokens_goes_on_over_an_abort():
    parts = [written(QWEN, "Be", "abort"), written(QWEN, "cause." + END)]
    num_first = len(parts[0].ids)
    client = texts(*parts)
    rollout = Rollout(client, messages=[USER], tokenizer=QWEN)
    options = {"min_tokens": num_first + 3, "thinking_token_budget": num_first, "num_resumes": 5}
    assert rollout.generate(max_tokens=50, **options).finish_reason == "stop"
    assert [one["min_tokens"] for one in client.calls] == [num_first + 3, 3]
    assert [one["thinking_token_budget"] for one in client.calls] == [num_first, 0]


@pytest.mark.parametrize(
    "options", [{"structured_outputs": {"regex": "a*"}}, {"presence_penalty": 0.5}]
)
def test_what_no_other_request_can_go_on_with_ends_as_an_abort(options):
    client = texts(written(QWEN, "a", "abort"), "b" + END)
    (rollout,) = play(client, **options)
    assert rollout.stop_reason == "abort"
    assert len(client.calls) == 1


def test_ids_without_messages_are_shown_as_ids():
    client = texts("One." + END, "Two." + END)
    begun = QWEN("Hello", add_special_tokens=False)["input_ids"]
    rollout = Rollout(client, ids=begun, tokenizer=QWEN, on_rewrite="branch")
    rollout.generate()
    rollout.add(ids=begun)
    rollout.generate()
    rollout.add(USER)
    assert [(one["role"], one["content"]) for one in rollout.messages] == [
        ("ids", "Hello"), ("assistant", "One."), ("ids", "Hello"), ("assistant", "Two."),
        ("user", USER["content"]),
    ]  # fmt: skip


def test_a_conversation_of_many_ids_is_shown():
    rollout = Rollout(texts(), ids=[5], tokenizer=QWEN)
    for _ in range(1200):
        rollout.add(ids=[6])
    assert len(rollout.messages) == 1201


def test_the_check_of_new_messages_renders_once_for_each_role():
    class Counting(TurnRenderer):
        num_renders = 0

        def write(self, messages, images):
            Counting.num_renders += 1
            return super().write(messages, images)

    renderer = Counting(LocalTemplate(QWEN))
    client = texts(*["a" + END] * 4)
    rollout = Rollout(client, messages=[USER], renderer=renderer)
    counts = []
    for _ in range(4):
        rollout.generate()
        before = Counting.num_renders
        rollout.add([{"role": "tool", "content": str(number)} for number in range(8)])
        counts.append(Counting.num_renders - before)
    # Of a tool's answer after a turn, and of one after another one.
    assert counts == [3, 1, 1, 1]


def test_content_that_only_the_template_understands_is_passed_on():
    tokenizer = copy.deepcopy(QWEN)
    tokenizer.chat_template = QWEN.chat_template.replace("m.content", "(m.content | string)")
    client = WritingClient([written(QWEN, "a" + END)])
    rollout = Rollout(client, messages=[USER], tokenizer=tokenizer)
    rollout.generate()
    rollout.add({"role": "tool", "content": {"temp": 7}})
    assert "{'temp': 7}" in tokenizer.decode(rollout.ids)


def test_no_branch_begins_with_an_invented_message():
    """The template drops thoughts; the prompt came as ids, which nothing can render again."""
    qwen3 = tokenizer_of("qwen3")
    client = WritingClient([written(qwen3, "<think>\nHm.\n</think>\n\nOne." + END)])
    rollout = Rollout(client, ids=[5, 6], tokenizer=qwen3, on_rewrite="branch")
    rollout.generate()
    with pytest.raises(HistoryRewritten, match="expected messages for the ids"):
        rollout.add(USER)


def test_a_conversation_keeps_its_date_over_midnight(monkeypatch: pytest.MonkeyPatch):
    class Clock(datetime.datetime):
        day = 26

        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, cls.day, 23, 59)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    monkeypatch.setattr(templates_module.datetime, "datetime", Clock)
    dated = copy.deepcopy(QWEN)
    dated.chat_template = "{{ strftime_now('%d %b %Y') }}\n" + QWEN.chat_template
    client = WritingClient([written(QWEN, "a" + END)])
    rollout = Rollout(client, messages=[USER], tokenizer=dated)
    rollout.generate()
    Clock.day = 27
    rollout.add(USER)
    assert "26 Nov 2026" in dated.decode(rollout.ids)


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


def test_a_stop_string_across_an_abort_ends_the_turn_where_it_ends():
    """Each part is a request of its own, in which the engine sees a half of it."""
    first = written(QWEN, "One. EN", "abort")
    second = written(QWEN, "D OF IT and more", "length", weight_versions=((3, 0),))
    client = texts(first, second)
    rollout = Rollout(client, messages=[USER], tokenizer=QWEN)
    turn = rollout.generate(max_tokens=50, num_resumes=1, stop=["END OF IT"])
    assert turn.finish_reason == "stop"
    assert QWEN.decode(turn.ids) == rollout.last_text == "One. END OF IT"
    assert len(turn.ids) == len(turn.logprobs) == len(turn.weight_versions)
    arrays = rollout.arrays()
    assert arrays.ids[-len(turn.ids) :].tolist() == turn.ids.tolist()
    assert arrays.loss_mask.sum() == len(turn.ids)
    rollout.add(USER)
    assert "END OF IT<|im_end|>" in QWEN.decode(rollout.ids)


@pytest.mark.parametrize("num_resumes", [0, 1])
def test_a_stop_string_of_rare_characters_is_found_wherever_it_is_cut(num_resumes: int):
    """Each of its characters takes several tokens; a turn goes on by itself, or by another call."""
    ids = written(QWEN, "東🙂京🙃 more").ids
    (end,) = written(QWEN, "🙃").ids[-1:]
    for cut in range(1, ids.tolist().index(end)):
        client = texts(Written(ids[:cut], "abort"), Written(ids[cut:], "length"))
        rollout = Rollout(client, messages=[USER], tokenizer=QWEN)
        turn = rollout.generate(max_tokens=50, num_resumes=num_resumes, stop="東🙂京🙃")
        if not num_resumes:
            turn = rollout.generate(max_tokens=50, stop="東🙂京🙃")
        assert (turn.finish_reason, rollout.last_text) == ("stop", "東🙂京🙃")


@pytest.mark.parametrize("stop", ["IT", "EN", "not there", []])
def test_a_stop_string_within_one_part_is_the_engine_s(stop: str | list):
    client = texts(written(QWEN, "One. EN", "abort"), written(QWEN, "D OF IT", "length"))
    rollout = Rollout(client, messages=[USER], tokenizer=QWEN)
    turn = rollout.generate(max_tokens=50, num_resumes=1, stop=stop)
    assert turn.finish_reason == "length"
    assert rollout.last_text == "One. END OF IT"


def test_an_abort_of_all_requests_by_hand_ends_a_rollout():
    class Aborted(WritingClient):
        num_aborts = 0

        def generate(self, prompts, **options):
            self.num_aborts += 1
            return super().generate(prompts, **options)

    client = Aborted([written(QWEN, "One", "abort"), written(QWEN, " two")])
    (rollout,) = play(client)
    assert (rollout.stop_reason, len(client.calls)) == ("abort", 1)


def test_a_cut_thought_can_be_closed_with_ids_that_do_not_count():
    qwen3 = tokenizer_of("qwen3")
    client = WritingClient([
        written(qwen3, "<think>\nHm", "length"), written(qwen3, "42." + END),
    ])  # fmt: skip
    (rollout,) = run_rollouts(client, [[USER]], tokenizer=qwen3, closes_thoughts=True)
    assert rollout.stop_reason == "answered"
    assert rollout.last_text == "<think>\nHm\n</think>\n\n42."
    arrays = rollout.arrays()
    assert qwen3.decode(arrays.ids[arrays.loss_mask == 1]) == "<think>\nHm42." + END
    assert rollout.last_turn.ids.tolist() == written(qwen3, "42." + END).ids.tolist()
    with pytest.raises(ValueError, match="expected a turn within a thought"):
        rollout.close_thought()


@pytest.mark.parametrize("begins_with_ids", [True, False])
def test_an_image_after_ids_is_its_message_s(begins_with_ids: bool):
    """The route gets the image of the message, and not that of the ids."""

    seen: list[str] = []

    class Server(WritingClient):
        def render(self, messages, **options):
            seen.extend(part["image"] for one in messages if isinstance(one["content"], list)
                          for part in one["content"] if part["type"] == "image")  # fmt: skip
            flat = [{**one, "content": str(one["content"])} for one in messages]
            return LocalTemplate(QWEN).render(flat, (), is_prompt=options["add_generation_prompt"])

        def tokenize(self, text, **_):
            return LocalTemplate(QWEN).encode(text)

        def detokenize(self, ids):
            return QWEN.decode(ids)

    def picture(name: str) -> dict:
        return {"role": "user", "content": [{"type": "image", "image": name}]}

    client = Server([written(QWEN, "a" + END) for _ in range(3)])
    if begins_with_ids:
        rollout = Rollout(client, ids=[5, 6], images=["AAAA"])
    else:
        rollout = Rollout(client, messages=[picture("AAAA")])
        rollout.generate()
        rollout.add(ids=[5, 6])
    rollout.generate()
    seen.clear()
    rollout.add(picture("BBBB"))
    assert set(seen) == {"BBBB"}
    rollout.generate()
    assert client.calls[-1]["images"] == [["AAAA", "BBBB"]]
