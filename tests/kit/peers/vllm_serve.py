"""vLLM's own server, and request bodies that are sent to both servers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.processes import engine_environment, running
from benchmarks.targets import Engine, VllmServe
from titopool.settings.gpus import visible_gpus

# For log-probabilities: the two servers use different batch sizes.
TOLERANCE = 1e-3
IDS = [42, 1393, 14]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, ü!"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
END_OF_MESSAGE = 2
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
# Letters of two to four bytes that the tokenizer was not trained on.
BIRDS = "é\U0001f99c…\u0436a"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": true}'}}


@contextmanager
def vllm_server(model: str, log: Path, **more: Any) -> Iterator[str]:
    """Starts vLLM's server of `model` with titopool's engine settings; yields its URL.

    `more`: further options of vLLM.
    """
    options: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "enforce_eager": True,
        "gpu_memory_utilization": 0.3, "max_logprobs": 128,
        # As titopool's default; vLLM's default ignores temperature and penalties.
        "logprobs_mode": "processed_logprobs", **more,
    }  # fmt: skip
    environ = engine_environment(on_cpu=not visible_gpus())
    with running(VllmServe(), Engine(model, options), environ, log) as server:
        yield server.url


class Greedy:
    """The model's greedy output, from which tests cut stop strings.

    The output changes with the source files, on which the tokenizer is trained.
    """

    def __init__(self, url: str):
        answer = post(url, COMPLETIONS, {"prompt": IDS, "logprobs": 0, **GREEDY})
        choice = answer.json()["choices"][0]
        self.ids: list[int] = choice["token_ids"]
        self.tokens: list[str] = choice["logprobs"]["tokens"]

    def inside(self) -> str:
        """A text that begins in one token and ends inside a later one, before its last letter."""
        for first, second in zip(self.tokens[1:], self.tokens[2:], strict=False):
            found = first[-1:] + second[:-1]
            if len(second) > 1 and "\ufffd" not in found and found not in self.tokens[0]:
                return found
        pytest.fail(f"no token to stop inside of: {self.tokens}")


GREEDY = {"temperature": 0, "max_tokens": 12, "return_token_ids": True, "ignore_eos": True}
Body = dict[str, Any] | Callable[[Greedy], dict[str, Any]]
# Each is merged over GREEDY.
COMPLETION_BODIES: dict[str, Body] = {
    "text": {"prompt": "Hello, world"},
    "ids": {"prompt": IDS},
    "texts": {"prompt": ["Hello, world", "a"]},
    "lists-of-ids": {"prompt": [IDS, [5, 6]]},
    "special-tokens-in-text": {"prompt": "<|im_start|>user\nHi<|im_end|>"},
    "no-special-tokens": {"prompt": "Hello", "add_special_tokens": False},
    "stop-inside-a-token": lambda greedy: {"prompt": IDS, "stop": [greedy.inside()]},
    "stop-text-kept": lambda greedy: {
        "prompt": IDS, "stop": greedy.inside(), "include_stop_str_in_output": True,
    },
    "stop-with-logprobs": lambda greedy: {"prompt": IDS, "stop": [greedy.inside()], "logprobs": 1},
    "stop-with-min-tokens": lambda greedy: {"prompt": IDS, "stop": [greedy.inside()], "min_tokens": 9},
    "stop-token": lambda greedy: {"prompt": IDS, "stop_token_ids": [greedy.ids[4]]},
    "stop-token-kept": lambda greedy: {
        "prompt": IDS, "stop_token_ids": [greedy.ids[4]], "include_stop_str_in_output": True,
    },
    "min-tokens": lambda greedy: {"prompt": IDS, "stop_token_ids": [greedy.ids[2]], "min_tokens": 6},
    "end-of-text": {"prompt": IDS, "logit_bias": {"0": 100}, "ignore_eos": False},
    "end-of-text-after-min-tokens": {
        "prompt": IDS, "logit_bias": {"0": 100}, "ignore_eos": False, "min_tokens": 3,
    },
    "special-tokens-shown": {
        "prompt": IDS, "logit_bias": {"2": 100}, "skip_special_tokens": False,
    },
    "special-tokens-hidden": {"prompt": IDS, "logit_bias": {"2": 100}, "max_tokens": 3},
    "one-token": {"prompt": IDS, "max_tokens": 1},
    "seeded": {"prompt": IDS, "n": 2, "seed": 3, "temperature": 0.8, "top_p": 0.9},
    "seeded-batch": {"prompt": [IDS, [5, 6]], "n": 2, "seed": 5, "temperature": 1.0},
    "penalties": {
        "prompt": IDS, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2,
        "logprobs": 2,
    },
    "logprobs-0": {"prompt": IDS, "logprobs": 0},
    "logprobs-3": {"prompt": "Hello, world", "logprobs": 3},
    "logprobs-seeded": {"prompt": IDS, "logprobs": 2, "seed": 7, "temperature": 0.7},
    "logprobs-of-a-hidden-token": {"prompt": IDS, "logprobs": 1, "logit_bias": {"2": 100}},
    "logprobs-as-ids": {"prompt": IDS, "logprobs": 2, "return_tokens_as_token_ids": True},
    "bad-words": lambda greedy: {"prompt": IDS, "bad_words": [greedy.tokens[1]]},
    "allowed": {"prompt": IDS, "allowed_token_ids": [70, 71, 72], "logprobs": 5},
    "schema": {
        "prompt": IDS, "max_tokens": 40,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "structured": {"prompt": IDS, "structured_outputs": {"choice": ["yes", "no"]}},
    "letters-over-tokens": {"prompt": IDS, "structured_outputs": {"choice": [BIRDS]}, "logprobs": 2},
}  # fmt: skip
CHAT_BODIES: dict[str, Body] = {
    "plain": {},
    "max-completion-tokens": {"max_tokens": None, "max_completion_tokens": 3},
    "no-ids": {"return_token_ids": False},
    "parts": {
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    },
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "logprobs-without-top": {"logprobs": True},
    "logprobs-as-ids": {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
    "seeded": {"n": 2, "seed": 3, "temperature": 0.8, "logprobs": True},
    "end-of-message": {"stop_token_ids": [END_OF_MESSAGE], "logit_bias": {"2": 100}},
    "end-of-text": {"logit_bias": {"0": 100}, "ignore_eos": False},
    "template-kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "no-generation-prompt": {"add_generation_prompt": False},
    "continued": {
        "messages": [*CHAT, {"role": "assistant", "content": "The answer"}],
        "add_generation_prompt": False, "continue_final_message": True,
    },
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 20},
    "schema": {
        "max_tokens": 40,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "letters-over-tokens": {
        "structured_outputs": {"choice": [BIRDS]}, "logprobs": True, "top_logprobs": 2,
    },
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, CHAT[1]]},
    "developers-amid": {
        "messages": [*CHAT, {"role": "developer", "content": [{"type": "text", "text": "Stop."}]}],
    },
    "call-without-content": {
        "messages": [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    },
    "no-content": {"messages": [CHAT[1], {"role": "assistant", "tool_calls": []}]},
    "tool-answers-in-parts": {
        "messages": [
            CHAT[1], {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": [
                {"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        ],
    },
    "format-text": {"response_format": {"type": "text"}},
    "tools-not-to-be-called": {"tools": TOOLS, "tool_choice": "none"},
    "tool-call-in-messages": {
        "messages": [
            *CHAT,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ],
    },
}  # fmt: skip


# Bodies that cannot be streamed.
WHOLE_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt-logprobs": (COMPLETIONS, {"prompt": IDS, "prompt_logprobs": 2}),
    "prompt-logprobs-0": (COMPLETIONS, {"prompt": f"A {BIRDS}.", "prompt_logprobs": 0}),
    "prompt-logprobs-as-ids": (
        COMPLETIONS, {"prompt": IDS, "prompt_logprobs": 1, "return_tokens_as_token_ids": True},
    ),
    "prompt-logprobs-of-several": (COMPLETIONS, {"prompt": [IDS, [7]], "prompt_logprobs": 1}),
    "echo": (COMPLETIONS, {"prompt": IDS, "echo": True, "return_token_ids": False}),
    "echo-logprobs": (
        COMPLETIONS,
        {"prompt": f"A {BIRDS}.", "echo": True, "return_token_ids": False, "logprobs": 2},
    ),
    "echo-logprobs-of-several": (
        COMPLETIONS,
        {"prompt": [IDS, [7]], "echo": True, "return_token_ids": False, "logprobs": 1},
    ),
    "prompt-logprobs-of-a-chat": (CHATS, {"prompt_logprobs": 1}),
}  # fmt: skip


def body_of(body: Body, greedy: Greedy, path: str) -> dict[str, Any]:
    own = body(greedy) if callable(body) else body
    return GREEDY | ({"messages": CHAT} if path == CHATS else {}) | own


def invalid_utf8(tokenizer: Any, path: str) -> dict[str, Any]:
    """A body whose completion repeats the first bytes of a letter."""
    first = tokenizer("\U0001f99c", add_special_tokens=False)["input_ids"][0]
    prompt = {"messages": CHAT} if path == CHATS else {"prompt": IDS}
    logprobs = {"logprobs": True, "top_logprobs": 1} if path == CHATS else {"logprobs": 1}
    return GREEDY | prompt | logprobs | {"logit_bias": {str(first): 100}, "max_tokens": 3}


def post(url: str, path: str, body: dict[str, Any]) -> requests.Response:
    return requests.post(url + path, json=body, timeout=120)


def as_merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """`ours` as vLLM's server shows it, which keeps the last of several tokens without text.

    Each is an entry here, from the second one on by its id.
    """
    more = [key for key in ours if key.startswith("token_id:") and key not in theirs]
    return {
        key: ours[more[-1]] if more and not key else ours[key] for key in ours if key not in more
    }


def assert_same(ours: Any, theirs: Any, location: str = "") -> None:
    """Equal except for the last digits of floats."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        ours = as_merged(ours, theirs)
        assert ours.keys() == theirs.keys(), location
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{location}.{key}")
    elif isinstance(theirs, list) and isinstance(ours, list):
        assert len(ours) == len(theirs), f"{location}: {ours} {theirs}"
        for index, value in enumerate(theirs):
            assert_same(ours[index], value, f"{location}[{index}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=TOLERANCE), location
    else:
        assert ours == theirs, location
