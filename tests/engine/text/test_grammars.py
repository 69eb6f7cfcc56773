"""Grammars against real vLLM: hostile ones are refused and hold up nobody, honest ones run."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings

from harness.hostile_grammars import NESTED, SLOW, regexes
from harness.servers import Server, worker_pids
from harness.tool_schemas import TOOL_SCHEMAS


def generate(server: Server, structured: dict, num: int = 1):
    return server.post(
        "/generate/",
        {"prompts": [[5, 6, 7]] * num, "max_tokens": 8, "generation_kwargs": {"structured_outputs": structured}},
    )  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_grammar_is_refused_and_holds_up_nobody(single_server: Server, name):
    structured, bound = SLOW[name]
    workers = worker_pids(single_server)
    with ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(generate, single_server, structured, 4)
        num_innocent = 0
        while not hostile.done():
            answer = single_server.post("/generate/", {"prompts": [[1, 2]], "max_tokens": 2})
            assert answer.status_code == 200, answer.text
            num_innocent += 1
    error = hostile.result().json()["error"]
    assert (hostile.result().status_code, error["param"]) == (400, "structured_outputs"), error
    assert error["message"].startswith("prompts[0]: structured_outputs: ")
    # vLLM gives up after 5 s, in which a busy machine may not give the trial its CPU time.
    assert bound in error["message"] or "Regex compilation timed out" in error["message"]
    assert num_innocent > 0
    began_s = time.monotonic()
    assert generate(single_server, structured).status_code == 400
    # Without another trial.
    assert time.monotonic() - began_s < 1
    assert worker_pids(single_server) == workers


@pytest.mark.parametrize("name", TOOL_SCHEMAS)
def test_tool_definitions_run(single_server: Server, name):
    answer = generate(single_server, {"json": TOOL_SCHEMAS[name]})
    assert answer.status_code == 200, answer.text


def test_required_tools_pass_through_a_trial(single_server: Server):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": TOOL_SCHEMAS[name]}}
        for name in ("weather", "search", "calendar")
    ]
    body = {
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "tools": tools,
        "tool_choice": "required",
    }  # fmt: skip
    answer = single_server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text


def test_every_name_of_a_grammar_is_bounded(single_server: Server):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": NESTED}}}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "a", "parameters": schema}}]
    for route, body in (
        ("/generate/", {"prompts": [[1]], "structured_outputs_regex": NESTED}),
        ("/v1/completions", {"prompt": [1], "response_format": response_format}),
        ("/v1/chat/completions", {**chat, "response_format": response_format}),
        ("/v1/chat/completions", {**chat, "tools": tools}),
        ("/generate", {"input_ids": [1], "sampling_params": {"json_schema": json.dumps(schema)}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"regex": NESTED}}),
        ("/generate", {"input_ids": [1], "sampling_params": {"ebnf": f"root ::= {NESTED}"}}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": NESTED}}}),
    ):  # fmt: skip
        answer = single_server.post(route, body)
        assert answer.status_code == 400, (route, answer.text)
        assert "counted repetitions inside each other, got 216000" in answer.text, (
            route,
            answer.text,
        )


def test_any_regex_is_answered_soon(single_server: Server):
    longest_s = 0.0

    @settings(max_examples=25)
    @given(regexes())
    def check(regex):
        nonlocal longest_s
        began_s = time.monotonic()
        answer = generate(single_server, {"regex": regex[0]})
        longest_s = max(longest_s, time.monotonic() - began_s)
        assert answer.status_code in (200, 400), answer.text

    check()
    # Of CPU time a trial takes at most 2 s.
    assert longest_s < 30
