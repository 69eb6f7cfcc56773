"""Tool calls and reasoning: vLLM's own parsers on a model that writes a known text."""

import json
import re

import openai
import pytest
from transformers import AutoTokenizer

from harness.servers import START_TIMEOUT_S, Server, wait_until
from tests.clients.published import run_client
from tests.clients.scripts import ROLLOUT
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models.scripted_model import CALL, SCRIPT, TALK, THOUGHT
from tests.kit.peers.scripted_server import ARGUMENTS, LOOK_UP, QUESTION, Scripted
from tests.kit.peers.trl_client import TRL_FOLDER, run_trl
from titopool import Client, run_rollouts
from titopool.rollouts.tools import schemas_of

STRICT = {"type": "function", "function": {**LOOK_UP["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "look_up"}}


def check_call(calls):
    (call,) = calls
    assert call.type == "function"
    assert call.id
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments) == ARGUMENTS


def test_a_call_and_the_reasoning_before_it_are_separated(scripted: Scripted):
    answer = scripted.chat(extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    assert choice.token_ids == scripted.ids
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning.strip() == THOUGHT
    assert choice.message.content.strip() == TALK.strip()
    check_call(choice.message.tool_calls)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_has_the_same_call_and_reasoning(scripted: Scripted, n: int):
    temperature = 0 if n == 1 else 0.1
    stream = scripted.chat(
        stream=True, n=n, temperature=temperature, extra_body={"return_token_ids": True}
    )
    streamed = [
        {"content": "", "reasoning": "", "arguments": "", "names": [], "ids": []} for _ in range(n)
    ]
    ends = {}
    for chunk in stream:
        for choice in chunk.choices:
            one, delta = streamed[choice.index], choice.delta
            one["content"] += delta.content or ""
            one["reasoning"] += getattr(delta, "reasoning", None) or ""
            one["ids"] += getattr(choice, "token_ids", None) or []
            for call in delta.tool_calls or []:
                one["names"] += [call.function.name] if call.function.name else []
                one["arguments"] += call.function.arguments or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert ends == dict.fromkeys(range(n), "tool_calls")
    for one in streamed:
        assert one["ids"] == scripted.ids
        assert one["reasoning"].strip() == THOUGHT
        assert one["content"].strip() == TALK.strip()
        assert one["names"] == ["look_up"]
        assert json.loads(one["arguments"]) == ARGUMENTS


def test_token_ids_in_give_tool_calls_out(scripted: Scripted):
    tokenizer = AutoTokenizer.from_pretrained(scripted.model)
    ids = tokenizer("anything at all<|assistant|>")["input_ids"]
    body = {"messages": QUESTION, "tokens": ids, "tools": [LOOK_UP], "temperature": 0}
    answer = scripted.server.post("/v1/chat/completions/tokens", body).json()
    assert answer["prompt_token_ids"] == ids
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"].strip() == THOUGHT
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS


def test_the_template_receives_tools_in_vllm_s_key_order(scripted: Scripted):
    answer = scripted.chat(extra_body={"return_token_ids": True}, max_tokens=1)
    text = AutoTokenizer.from_pretrained(scripted.model).decode(answer.prompt_token_ids)
    (tool,) = json.loads(text.partition("<|im_start|>")[0])
    assert tool == LOOK_UP
    assert list(tool["function"]) == ["name", "description", "parameters"]
    body = {"messages": QUESTION, "tools": [LOOK_UP]}
    assert scripted.server.post("/tokenize", body).json()["tokens"] == answer.prompt_token_ids


def test_calls_are_not_parsed_when_tools_are_off(scripted: Scripted):
    for fields in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        (choice,) = scripted.chat(**fields).choices
        assert choice.finish_reason == "stop"
        assert not choice.message.tool_calls
        assert choice.message.reasoning.strip() == THOUGHT
        assert "".join(CALL).strip() in choice.message.content


def test_reasoning_can_be_excluded(scripted: Scripted):
    (choice,) = scripted.chat(extra_body={"include_reasoning": False}).choices
    assert not hasattr(choice.message, "reasoning")
    assert THOUGHT not in choice.message.content
    check_call(choice.message.tool_calls)


@pytest.mark.parametrize("stream", [False, True])
def test_excluded_reasoning_is_not_streamed(scripted: Scripted, stream: bool):
    body = {
        "messages": QUESTION, "tools": [LOOK_UP], "temperature": 0, "stream": stream,
        "include_reasoning": False,
    }  # fmt: skip
    answer = scripted.server.post("/v1/chat/completions", body)
    assert answer.ok
    assert THOUGHT not in answer.text
    assert "look_up" in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_lone_surrogate_in_a_call_is_accepted(scripted: Scripted, stream: bool):
    call = r'<tool_call>\n\{"name": "look_up", "arguments": \{"word": "\\ud800"\}\}\n</tool_call>'
    # In a stream, vLLM's parser knows the tag by its id; spelt with other tokens, it is reasoning.
    tag = scripted.ids[SCRIPT.index("<tool_call>")]
    body = {
        "messages": QUESTION, "tools": [LOOK_UP], "stream": stream, "include_reasoning": False,
        "structured_outputs": {"regex": call}, "logit_bias": {str(tag): 100},
    }  # fmt: skip
    answer = scripted.server.post("/v1/chat/completions", body)
    assert answer.ok, answer.text
    assert "look_up" in answer.text
    # A stream sends the escape in pieces.
    assert stream or "ud800" in answer.text
    check_call(scripted.chat().choices[0].message.tool_calls)


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": {"name": "look_up", "arguments": {"word": "a"}}},
        {"type": "function", "function": {"name": "look_up", "arguments": "{"}},
    ],
)
def test_earlier_calls_may_have_any_form(scripted: Scripted, call):
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    check_call(scripted.chat(messages=messages).choices[0].message.tool_calls)


def test_odd_numbers_and_halves_of_pairs_in_earlier_calls_are_rendered(scripted: Scripted):
    arguments = r'{"word": NaN, "size": 1e400, "half": "\ud800"}'
    call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ids = scripted.server.post("/tokenize", {"messages": messages}).json()["tokens"]
    text = scripted.server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    for part in ("NaN", "Infinity", "ud800"):
        assert part in text


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_need_no_message(scripted: Scripted, stream: bool):
    body = {
        "messages": [], "tokens": [5], "max_tokens": 2, "add_generation_prompt": False,
        "stream": stream,
    }  # fmt: skip
    answer = scripted.server.post("/v1/chat/completions/tokens", body)
    assert answer.ok, answer.text
    assert "error" not in answer.text


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_required_call_follows_its_schema(scripted: Scripted, choice):
    # The scripted text has no boolean: the grammar forces one, and the call ends as soon as it may.
    (made,) = scripted.chat(
        tools=[STRICT], tool_choice=choice, parallel_tool_calls=False, max_tokens=200,
        logit_bias={"0": 90},
    ).choices  # fmt: skip
    (call,) = made.message.tool_calls
    assert isinstance(json.loads(call.function.arguments)["word"], bool)
    expected = "tool_calls" if choice == "required" else "stop"
    assert made.finish_reason == expected


WORD = "[a-z]{3,6}"
WORDS = {"max_tokens": 12, "temperature": 0, "structured_outputs": {"regex": WORD}}


def ids_with_grammar(server: Server, route: str, prompt: list[int]) -> list[int]:
    """What follows `prompt`, whose grammar is `WORD`, on a route without a parser."""
    if route == "/generate/":
        body = {"prompts": [prompt], "max_tokens": 12, "structured_outputs_regex": WORD}
        body["temperature"] = 0
        return server.post(route, body).json()["completion_ids"][0]
    if route == "/v1/completions":
        body = {"prompt": prompt, "return_token_ids": True, **WORDS}
        return server.post(route, body).json()["choices"][0]["token_ids"]
    if route == "/inference/v1/generate":
        body = {"token_ids": prompt, "sampling_params": WORDS}
        return server.post(route, body).json()["choices"][0]["token_ids"]
    sampling = {"max_new_tokens": 12, "temperature": 0, "regex": WORD}
    body = {"input_ids": prompt, "sampling_params": sampling}
    return server.post("/generate", body).json()["output_ids"]


@pytest.mark.parametrize(
    "route", ["/generate/", "/v1/completions", "/inference/v1/generate", "/generate"]
)
def test_a_grammar_holds_from_the_first_token_where_no_thought_is_open(
    scripted: Scripted, route: str
):
    tokenizer = AutoTokenizer.from_pretrained(scripted.model)
    think, end, eos = scripted.ids[0], scripted.ids[2], scripted.ids[-1]
    # The thought of an earlier turn has ended with the turn.
    for prompt in ([42, 1393, 14], [42, think, end, 14], [42, think, 5, eos, 14]):
        ids = ids_with_grammar(scripted.server, route, prompt)
        assert re.fullmatch(WORD, tokenizer.decode(ids, skip_special_tokens=True)), ids
    ids = ids_with_grammar(scripted.server, route, [42, think])
    assert ids[:2] == scripted.ids[1:3]
    assert re.fullmatch(WORD, tokenizer.decode(ids[2:], skip_special_tokens=True)), ids


def test_a_grammar_of_a_conversation_holds_from_the_first_token(scripted: Scripted):
    tokenizer = AutoTokenizer.from_pretrained(scripted.model)
    body = {"messages": [QUESTION], "max_tokens": 12, "structured_outputs_regex": WORD}
    (ids,) = scripted.server.post("/chat/", body).json()["completion_ids"]
    assert re.fullmatch(WORD, tokenizer.decode(ids, skip_special_tokens=True))


def message_of(server: Server, path: str, body: dict) -> tuple[str, str]:
    """Content and reasoning of an answer, or of a stream's deltas together."""
    answer = server.post(path, body)
    assert answer.ok, answer.text
    if not body["stream"]:
        parts = [answer.json()["choices"][0]["message"]]
    else:
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [one for event in events for one in json.loads(event)["choices"]]
        parts = [one["delta"] for one in choices]
    return tuple("".join(one.get(name) or "" for one in parts) for name in ("content", "reasoning"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [[], [LOOK_UP]], ids=["plain", "tools"])
def test_a_grammar_of_a_chat_holds_with_and_without_a_thought(
    scripted: Scripted, tools, stream: bool
):
    think, end = scripted.ids[0], scripted.ids[2]
    forbidden = {"bad_words": ["<think>"]}
    path = "/v1/chat/completions"
    body = {"messages": QUESTION, "temperature": 0, "stream": stream, "tools": tools, **WORDS}

    def ask(path: str = path, **fields) -> tuple[str, str]:
        return message_of(scripted.server, path, {**body, **fields})

    # This model opens a thought, and the grammar follows it.
    content, reasoning = ask()
    assert reasoning.strip() == THOUGHT
    assert re.fullmatch(WORD, content)
    # A model that opens none, and ones that may not, or have ended theirs in the prompt.
    for fields in (
        {"include_reasoning": False},
        forbidden,
        {"path": path + "/tokens", "tokens": [42, think, 5, end], **forbidden},
    ):
        content, reasoning = ask(**fields)
        assert (reasoning, bool(re.fullmatch(WORD, content))) == ("", True), (fields, content)
    # The prompt opens it.
    content, reasoning = ask(path + "/tokens", tokens=[42, think])
    assert reasoning.strip() == THOUGHT
    assert re.fullmatch(WORD, content)


def test_a_conversation_continues_after_a_call(scripted: Scripted):
    first = scripted.chat(extra_body={"return_token_ids": True})
    (choice,) = first.choices
    call = choice.message.tool_calls[0].model_dump()
    messages = [
        *QUESTION,
        {"role": "assistant", "content": choice.message.content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "token in, token out"},
    ]
    second = scripted.chat(messages=messages)
    check_call(second.choices[0].message.tool_calls)
    body = {
        "messages": messages, "tools": [LOOK_UP], "temperature": 0,
        "tokens": [*first.prompt_token_ids, *choice.token_ids, scripted.ids[0]],
    }  # fmt: skip
    answer = scripted.server.post("/v1/chat/completions/tokens", body).json()
    assert answer["prompt_token_ids"] == body["tokens"]


# trl 0.29's client raises NotImplementedError for tools.
@pytest.mark.parametrize(
    "version, tools",
    [
        pytest.param("0.29.1", None, marks=pytest.mark.variant),
        pytest.param("1.9.2", [LOOK_UP], marks=pytest.mark.variant),
        ("1.16.0", [LOOK_UP]),
    ],
)
def test_trl_client_chats_with_tools(scripted: Scripted, version: str, tools):
    tokenizer = AutoTokenizer.from_pretrained(scripted.model)
    script = f"""
answer(client.chat(
    [{QUESTION!r}, {QUESTION!r}], n=2, temperature=0.1, max_tokens=20, tools={tools!r},
    chat_template_kwargs={{}},
))
"""
    answer = run_trl(version, scripted.server.url, script)
    if version == "1.16.0":
        # It calls OpenAI's route, whose tools templates get in vLLM's order.
        function = LOOK_UP["function"]
        in_order = {key: function[key] for key in ("name", "description", "parameters")}
        tools = [{"type": "function", "function": in_order}]
    text = tokenizer.apply_chat_template(
        QUESTION, tools=tools, add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert answer["prompt_ids"] == [ids, ids]
    assert answer["completion_ids"] == [scripted.ids] * 4
    assert [len(one) for one in answer["logprobs"]] == [len(scripted.ids)] * 4


def test_verifiers_training_client_calls_tools_between_turns(scripted: Scripted):
    sampling = {"temperature": 0.1, "max_tokens": 20}
    script = f"""
answer(asyncio.run(rollouts(2, {sampling}, 3, tools=[{LOOK_UP}], renderer="Qwen3")))
"""
    for turns in run_client("verifiers", scripted.server.url, ROLLOUT + script, scripted.model):
        assert [turn["bridged"] for turn in turns] == [False, True, True]
        seen: list[int] = []
        for turn in turns:
            assert turn["prompt_ids"][: len(seen)] == seen
            assert turn["completion_ids"] == scripted.ids
            assert len(turn["logprobs"]) == len(scripted.ids)
            assert turn["finish_reason"] == "tool_calls"
            assert turn["message"]["reasoning_content"].strip() == THOUGHT
            (call,) = turn["message"]["tool_calls"]
            assert call["function"]["name"] == "look_up"
            assert json.loads(call["function"]["arguments"]) == ARGUMENTS
            seen = turn["prompt_ids"] + turn["completion_ids"]


@pytest.mark.parametrize(
    "fields, part",
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{**LOOK_UP, "type": "code"}]}, "tools[0].type"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"maximum": 10**20}},
                    }
                ]
            },
            "64 bits",
        ),
        (
            {
                "extra_body": {"chat_template_kwargs": {"enable_thinking": {"a": 1}}},
                "tools": openai.NOT_GIVEN,
            },
            "chat_template_kwargs",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "nobody"),
        ({"tools": openai.NOT_GIVEN, "tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"reasoning_effort": "heroic"}}, "reasoning_effort"),
    ],
)
def test_malformed_tools_are_bad_requests(scripted: Scripted, fields, part):
    with pytest.raises(openai.BadRequestError) as caught:
        scripted.chat(**fields)
    assert part in caught.value.message
    check_call(scripted.chat().choices[0].message.tool_calls)


def test_a_server_without_parsers_refuses_tools(server: Server):
    body = {"messages": QUESTION, "tools": [LOOK_UP], "max_tokens": 1}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "--tool-call-parser" in answer.json()["error"]["message"]
    assert server.post("/v1/chat/completions", {**body, "tool_choice": "none"}).status_code == 200


@pytest.mark.parametrize(
    "option, value", [("tool_call_parser", "nobody"), ("reasoning_parser", "nobody")]
)
def test_an_unknown_parser_ends_the_start(tiny_model: str, start_forked, option, value):
    flag = "--" + option.replace("_", "-")
    server = start_forked(tiny_model, flag, value, *ENGINE_OPTIONS)
    wait_until(lambda: server.process.poll() is not None, START_TIMEOUT_S, lambda: server.log)
    assert server.process.returncode != 0
    assert f"{option}: expected one of" in server.log


def test_drift_is_counted_but_ids_are_unchanged(scripted: Scripted):
    def counted() -> list[float]:
        names = ("compared_prompts_total", "drifted_prompts_total")
        return [scripted.server.metrics(name)["0"] for name in names]

    before = counted()
    same = scripted.server.post("/tokenize", {"messages": QUESTION}).json()["tokens"]
    for number, tokens in enumerate((same, [*same[:-1], 5, same[-1]])):
        body = {"messages": QUESTION, "tokens": tokens, "max_tokens": 1}
        answer = scripted.server.post("/v1/chat/completions/tokens", body).json()
        assert answer["prompt_token_ids"] == tokens
        # One conversation is compared at a time.
        expected = [before[0] + number + 1, before[1] + number]
        wait_until(lambda: counted() == expected, 20, lambda: str(counted()))  # noqa: B023


def test_a_rollout_answers_the_calls_of_its_model_s_family(scripted: Scripted):
    """The template is Qwen3's, and the package's renderer writes what it does after a call."""

    def look_up(word: str) -> str:
        """Looks a word up.

        Args:
            word: The word.
        """
        return f"{word}: a pool 水"

    tokenizer = AutoTokenizer.from_pretrained(scripted.model)
    tokenizer.chat_template = (TRL_FOLDER / "1.16.0/trl/chat_templates/qwen3.jinja").read_text()
    with Client(scripted.server.url) as client:
        (rollout,) = run_rollouts(
            client, [QUESTION], tools=[look_up], tokenizer=tokenizer, max_turns=2, max_tokens=40,
            temperature=0, rollout_options={"end_of_turn_ids": [tokenizer.eos_token_id]},
        )  # fmt: skip
    assert (rollout.error, rollout.stop_reason) == (None, "max_turns")
    assert (rollout.info["rendering"], rollout.info["family"]) == ("renderers", "qwen3")
    called = rollout.messages[1]
    assert called["reasoning_content"] == THOUGHT
    (call,) = called["tool_calls"]
    assert call["function"]["arguments"] == ARGUMENTS
    assert rollout.messages[2]["tool_call_id"] == call["id"]
    arrays = rollout.arrays()
    assert arrays.ids[arrays.loss_mask == 1].tolist() == scripted.ids * 2
    # What stands between the two turns is the template's own.
    turn = tokenizer.decode(scripted.ids)
    before, between, _ = tokenizer.decode(arrays.ids).split(turn)
    (schema,) = schemas_of([look_up])
    # vLLM's server gives templates no type of what a tool returns.
    del schema["function"]["return"]
    whole = tokenizer.apply_chat_template(
        [*QUESTION, called, rollout.messages[2]], tools=[schema], tokenize=False,
        add_generation_prompt=True,
    )  # fmt: skip
    assert whole.startswith(before + "<think>")
    assert whole.endswith("</tool_call><|im_end|>" + between)
