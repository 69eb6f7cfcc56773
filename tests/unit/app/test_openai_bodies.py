"""Bodies that today's clients send to OpenAI's routes, without workers."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from app.openai.bodies import CHAT_COMPLETIONS_BODY, COMPLETIONS_BODY, ChatFields, CompletionsFields
from app.outputs.token_arrays import weight_spans
from app.route.decoding import decode_body
from app.route.unused_fields import CHAT_ONLY, UNUSED, UNUSED_OF_GENERATE, UNUSED_SAMPLING, Unused
from app.vllm.bodies import GENERATE_BODY, TOKENIZE_BODY, GenerateFields
from app.weights.bodies import LoadAdapterBody
from titopool.errors import InvalidRequest
from titopool.wire.messages import Completion

CHAT = {"messages": [{"role": "user", "content": "a"}]}
IDS: dict[str, Any] = {"prompt": [1, 2]}


def decoded(body: dict[str, Any]) -> Any:
    decoder = CHAT_COMPLETIONS_BODY if "messages" in body else COMPLETIONS_BODY
    return decode_body(json.dumps(body).encode(), decoder)  # type: ignore[type-var]


@pytest.mark.parametrize(
    "fields, num_logprobs",
    [
        ({}, None),
        ({"logprobs": None}, None),
        ({"logprobs": False}, None),
        ({"logprobs": 0}, 0),
        ({"logprobs": True}, 1),
        ({"logprobs": True, "top_logprobs": 0}, 1),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": 3}, 3),
    ],
)
def test_logprobs_of_completions_may_be_a_chats(fields, num_logprobs):
    body, _ = decoded(IDS | fields)
    assert body.num_logprobs == num_logprobs


@pytest.mark.parametrize(
    "body, field",
    [
        (IDS | {"top_logprobs": 2}, "top_logprobs"),
        (IDS | {"logprobs": 2, "top_logprobs": 2}, "top_logprobs"),
        (IDS | {"logprobs": "true"}, "logprobs"),
        (IDS | {"max_completion_tokens": 0}, "max_completion_tokens"),
        (IDS | {"use_beam_search": True}, "use_beam_search"),
        (IDS | {"echo": True, "stream": True}, "echo"),
        (CHAT | {"echo": True}, "echo"),
        (IDS | {"request_id": 3}, "request_id"),
        (CHAT | {"add_special_tokens": True}, "add_special_tokens"),
        (CHAT | {"session_id": []}, "session_id"),
        ({"prompt": "a", "tool_choice": "none"}, "tool_choice"),
        ({"prompt": ["a"], "reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_what_has_no_effect_here_is_refused_by_name(body, field):
    with pytest.raises(InvalidRequest) as caught:
        decoded(body)
    assert caught.value.param == field
    assert caught.value.message.startswith(field)


def decoded_ids(**fields: Any) -> Any:
    body = {"token_ids": [1], "sampling_params": {}, **fields}
    return decode_body(json.dumps(body).encode(), GENERATE_BODY)


# By route: its struct, whose fields have an effect, the table of others, and a body with one of them.
WITH_FIELD: dict[str, tuple[Any, dict[str, Unused], Callable[[str, Any], Any]]] = {
    "chat": (ChatFields, UNUSED, lambda name, value: decoded(CHAT | {name: value})),
    "completions": (CompletionsFields, UNUSED, lambda name, value: decoded(IDS | {name: value})),
    "generate": (
        GenerateFields, UNUSED_OF_GENERATE, lambda name, value: decoded_ids(**{name: value}),
    ),
    "sampling_params": (
        GenerateFields, UNUSED_SAMPLING,
        lambda name, value: decoded_ids(sampling_params={name: value}),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "route, name",
    [
        (route, name)
        for route, (struct, unused, _) in WITH_FIELD.items()
        for name in sorted(unused.keys() - struct.__struct_fields__)
    ],
)
def test_an_unused_field_has_values_that_pass(route, name):
    _, table, decode = WITH_FIELD[route]
    reason, accepted, may_be_empty = table[name]
    for value in ({"a": [1]}, "x", 7) if accepted is None else (*accepted, None):
        decode(name, value)
    if may_be_empty:
        for value in ([], {}, ""):
            decode(name, value)
    elif accepted is not None:
        for value in ([], {}, ""):
            with pytest.raises(InvalidRequest):
                decode(name, value)
    if accepted is not None:
        with pytest.raises(InvalidRequest) as caught:
            decode(name, {"a": [1]})
        expected = " or ".join([*map(json.dumps, accepted), "no value"])
        assert caught.value.message.endswith(
            f'{name}: expected {expected}, got {{"a": [1]}}: {reason}'
        )
        assert caught.value.param == ("sampling_params" if route == "sampling_params" else name)


def test_tokenize_takes_null_and_what_asks_for_nothing():
    body = {"messages": [{"role": "user", "content": "a"}]}
    nothing = {"chat_template": None, "media_io_kwargs": {}, "documents": [], "tools": None,
               "add_generation_prompt": None, "return_token_strs": None}  # fmt: skip
    read = decode_body(json.dumps(body | nothing).encode(), TOKENIZE_BODY)
    assert read == decode_body(json.dumps(body).encode(), TOKENIZE_BODY)
    assert read.add_generation_prompt is True
    for name, value in (("chat_template", 7), ("documents", [{}]), ("nobody", 1)):
        with pytest.raises(InvalidRequest) as caught:
            decode_body(json.dumps(body | {name: value}).encode(), TOKENIZE_BODY)
        assert name in caught.value.message


def test_an_adapter_may_say_that_it_has_no_3d_weights():
    decoder = msgspec.json.Decoder(LoadAdapterBody)
    body = {"lora_name": "a", "lora_path": "/a", "is_3d_lora_weight": False, "load_inplace": False}
    assert decode_body(json.dumps(body).encode(), decoder).lora_name == "a"
    body["is_3d_lora_weight"] = True
    with pytest.raises(InvalidRequest, match="is_3d_lora_weight"):
        decode_body(json.dumps(body).encode(), decoder)


@pytest.mark.parametrize("prompt", [[1, 2], [[1], [2, 3]]])
def test_completions_of_ids_take_the_fields_of_the_chat_that_they_were_made_of(prompt):
    body = {"prompt": prompt, **dict.fromkeys(CHAT_ONLY, "any"), "nvext": {"a": 1}}
    decoded(body)
    assert decoded(body | {"max_completion_tokens": 7})[0].max_completion_tokens == 7


@pytest.mark.parametrize(
    "versions, num_tokens, spans",
    [
        ([(3, 0)], 4, [("v3", 0, 4)]),
        ([(3, 0), (4, 2)], 5, [("v3", 0, 2), ("v4", 2, 5)]),
        ([(3, 0)], 0, []),
        ([], 0, []),
    ],
)
def test_weight_versions_in_vllms_form(versions, num_tokens, spans):
    found = weight_spans(Completion(b"", "stop", None, versions), num_tokens, "v{}".format)
    assert found == [dict(zip(("version", "start", "end"), one, strict=True)) for one in spans]


# ---- routes that are refused ---------------------------------------------------------------
