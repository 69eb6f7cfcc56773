"""`/inference/v1/…` without an engine: bodies, shapes of answers, ids, aborts, labels and keys."""

import importlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import TypeAdapter

from app.call import openai_logprobs
from app.outputs.json_parts import as_lists
from app.route.decoding import decode_body
from app.vllm import bodies as inference
from harness.hostile_requests import nested
from harness.servers import Server, forked_server, stub_worker, wait_until
from harness.stub_worker import Fault
from tests.conftest import StartServer, StartStub
from tests.kit.peers.vllm_protocol import ABORT, GENERATE, read_by_vllm, vllm_protocol
from tests.kit.workers.pools import FACTS
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions, check_sampling
from titopool.wire.messages import Completed, Completion, Logprobs

IDS = [7, 8, 9, 10]


def decoded(**fields: Any) -> tuple[inference.GenerateFields, SamplingOptions]:
    body = {"token_ids": IDS, "sampling_params": {}, **fields}
    return decode_body(msgspec.json.encode(body), inference.GENERATE_BODY)


# ---- bodies ------------------------------------------------------------------------------


def test_no_limit_means_to_the_end_of_the_context():
    assert decoded()[1].max_tokens is None
    assert decoded(sampling_params={"max_tokens": None})[1].max_tokens is None
    assert decoded(sampling_params={"max_tokens": 3})[1].max_tokens == 3


def test_what_the_server_sets_has_no_effect():
    _, plain = decoded()
    _, options = decoded(sampling_params={"output_kind": 2, "detokenize": True, "seed": None})
    assert options == plain


def test_null_means_left_out():
    body = vllm_protocol().GenerateRequest(token_ids=IDS, sampling_params={}).model_dump()
    nulls = {name: None for name, value in body.items() if value is None}
    assert {"features", "content_parts", "kv_transfer_params", "model"} <= nulls.keys()
    fields, _ = decoded(**nulls, stream=False, priority=0, output_mode="tokens", session_id="a")
    assert fields.token_ids == IDS


FEATURES: dict[str, Any] = {"mm_hashes": {"image": []}, "mm_placeholders": {"image": []}}
PARTS = [{"type": "image_url", "url": "data:image/png;base64,AA=="}]
BAD = {
    # name of the case: (fields, start of the message, param)
    "no-ids": ({"token_ids": None}, "object missing required field `token_ids`", "token_ids"),
    "text": ({"token_ids": "a"}, "token_ids: expected `array`", "token_ids"),
    "bool-id": ({"token_ids": [1, True]}, "token_ids[1]: expected `int`", "token_ids"),
    "no-options": ({"sampling_params": None}, "object missing required field", "sampling_params"),
    "list-options": ({"sampling_params": []}, "sampling_params: expected `object`", "sampling_params"),
    "unknown": ({"token_id": 1}, "object contains unknown field `token_id`", "token_id"),
    "outside": ({"temperature": 1}, "object contains unknown field `temperature`", "temperature"),
    "unknown-option": ({"sampling_params": {"temprature": 1}}, "sampling_params: object contains unknown field `temprature`", "sampling_params"),
    "temperature": ({"sampling_params": {"temperature": 3}}, "sampling_params.temperature: expected", "sampling_params"),
    "experts": ({"sampling_params": {"routed_experts_prompt_start": -1}}, "sampling_params.routed_experts_prompt_start: expected", "sampling_params"),
    "experts-format": ({"routed_experts_format": "list"}, "routed_experts_format: invalid enum value", "routed_experts_format"),
    "prompt-logprobs": ({"sampling_params": {"prompt_logprobs": -1}}, "sampling_params.prompt_logprobs: expected", "sampling_params"),
    "features": ({"features": {}}, "features: object missing required field `mm_hashes`", "features"),
    "content-parts": ({"content_parts": [{}]}, "content_parts[0]: object missing required field", "content_parts"),
    "images-twice": ({"features": FEATURES, "content_parts": PARTS}, "content_parts: expected none with features", "content_parts"),
    "priority": ({"priority": 1}, "priority: expected 0 or no value, got 1", "priority"),
    "reasoning": ({"reasoning_ended": True}, "reasoning_ended: expected no value, got true", "reasoning_ended"),
    "kv": ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params: expected no value, got {", "kv_transfer_params"),
    "text-mode": ({"output_mode": "text"}, 'output_mode: expected "tokens" or no value', "output_mode"),
    "salt": ({"cache_salt": ""}, "cache_salt: expected", "cache_salt"),
    "request-id": ({"request_id": 3}, "request_id: expected `str", "request_id"),
    "stream-options": ({"stream_options": {}}, "stream_options: expected none without stream", "stream_options"),
    "stream-of-prompt": ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs: expected none with stream", "prompt_logprobs"),
}  # fmt: skip


def test_the_answer_of_vllm_s_render_may_be_sent_on_as_it_is():
    fields, _ = decoded(parse_context={"tools": [{}]}, token_offsets=[[0, 1]])
    assert fields == decoded()[0]


@pytest.mark.parametrize("case", BAD)
def test_a_bad_field_is_refused_by_name(case: str):
    fields, message, param = BAD[case]
    with pytest.raises(InvalidRequest) as caught:
        decoded(**fields)
    assert caught.value.message.startswith(message)
    assert caught.value.param == param


@pytest.mark.parametrize("num_levels, is_refused", [(64, False), (65, True), (300, True)])
def test_extra_args_are_refused_if_nested_deeper_than_a_render_can_repeat(
    num_levels: int, is_refused: bool
):
    _, options = decoded(sampling_params={"extra_args": nested(num_levels - 1)})
    facts = msgspec.structs.replace(FACTS, sampling_fields=list(SamplingOptions.__struct_fields__))
    with pytest.raises(InvalidRequest) if is_refused else nullcontext() as caught:
        check_sampling(options, facts)
    if caught:
        assert caught.value.message.startswith("extra_args: expected at most 64 levels")
        assert caught.value.param == "extra_args"


# ---- log-probabilities -------------------------------------------------------------------


def array(kind: str, *numbers: float) -> bytes:
    return np.array(numbers, kind).tobytes()


def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {
        "token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob, "rank": rank,
        "bytes": None,
    }  # fmt: skip


# The second token is not among the two best ones.
SAMPLED = Completion(
    array("<i4", 5, 6), "stop",
    Logprobs(
        array("<f4", -0.5, -1, -0.25, -1, -4), array("<i4", 5, 9, 8, 9, 6), array("<i4", 2, 3),
        array("<i4", 1, 40),
    ),
    [(0, 0)],
)  # fmt: skip


def test_log_probabilities_are_in_both_of_vllm_s_forms():
    best = [[entry(5, -0.5, 1), entry(9, -1, 2)], [entry(8, -0.25, 1), entry(9, -1, 2)]]
    content = [
        {**entry(5, -0.5, 1), "top_logprobs": best[0]},
        {**entry(6, -4, 40), "top_logprobs": best[1]},
    ]
    found = as_lists(openai_logprobs.of_ids(SAMPLED, 2))
    assert found == {"content": content}
    # Up to vLLM 0.31 the route had the shape of a chat.
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    for model in (protocol.ChatCompletionLogProbs, vllm_protocol().GenerateResponse):
        whole = {
            "request_id": "a",
            "choices": [{"index": 0, "token_ids": [5, 6], "logprobs": found}],
        }
        data = found if model is protocol.ChatCompletionLogProbs else whole
        TypeAdapter(model).validate_json(json.dumps(data))


def test_only_the_sampled_token_has_a_rank_beside_chosen_ids():
    (first, second) = openai_logprobs.of_ids(SAMPLED, None)["content"]
    assert [first["rank"], second["rank"]] == [1, 40]
    assert first["top_logprobs"] == [entry(5, -0.5, None), entry(9, -1, None)]
    assert [one["token_id"] for one in second["top_logprobs"]] == [8, 9, 6]


def test_sampled_log_probabilities_alone():
    completion = Completion(array("<i4", 5), "", Logprobs(array("<f4", -0.5)), [(0, 0)])
    (only,) = openai_logprobs.of_ids(completion, 0)["content"]
    assert only == {**entry(5, -0.5, None), "top_logprobs": []}


def test_the_prompt_s_own_token_comes_first():
    packed = Logprobs(array("<f4", -3, -1, -2), array("<i4", 8, 9, 5), ranks=array("<i4", 7, 1, 2))
    result = Completed(1, 1, [], 0, prompt_logprobs=packed)
    rows = list(openai_logprobs.of_prompt(result, np.array([7, 8], np.int32), "token_ids", 2, None))
    assert rows[0] is None
    assert next(iter(rows[1].items())) == ("8", {"logprob": -3, "rank": 7, "decoded_token": None})
    assert list(rows[1]) == ["8", "9", "5"]


# ---- over HTTP ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A stub worker behind a gunicorn process."""
    folder = tmp_path_factory.mktemp("pool")
    endpoint = f"ipc://{folder}/worker-0"
    with (
        stub_worker(endpoint),
        forked_server("--endpoints", endpoint, log=folder / "log") as server,
    ):
        yield server


def good(server: Server, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    body = {"token_ids": IDS, "sampling_params": {}, **fields}
    answer = server.post(GENERATE, body, headers=headers)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_an_answer_has_vllm_s_shape(pool: Server):
    body = {
        "token_ids": IDS, "sampling_params": {"n": 3, "logprobs": 0, "max_tokens": 2},
        "return_token_ids": True, "request_id": "trl-1",
    }  # fmt: skip
    answer = pool.post(GENERATE, body)
    assert answer.status_code == 200, answer.text
    read_by_vllm("GenerateResponse", answer.content)
    found = answer.json()
    (model,) = (one["id"] for one in pool.get("/v1/models").json()["data"])
    assert (found["request_id"], found["model"], found["output_mode"]) == ("trl-1", model, "tokens")
    assert found["usage"] == {
        "prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert found["prompt_token_ids"] == IDS
    assert found["prompt_logprobs"] is None
    assert [one.pop("index") for one in found["choices"]] == [0, 1, 2]
    for choice in found["choices"]:
        assert choice.pop("logprobs")["content"] == [
            {**entry(one, -1.5, None), "top_logprobs": []} for one in (10, 9)
        ]
        assert choice == {
            "token_ids": [10, 9], "finish_reason": "length", "stop_reason": None,
            "weight_versions": [{"version": "0", "start": 0, "end": 2}],
            "routed_experts": None, "sampling_mask": None,
        }  # fmt: skip
    plain = good(pool)
    assert plain["prompt_token_ids"] is None
    assert plain["choices"][0]["logprobs"] is None
    assert plain["choices"][0]["token_ids"] == IDS[::-1]


def test_routed_experts_that_the_server_lacks(pool: Server):
    """verifiers sends the start to any server; a client that names a form needs the experts."""
    answer = good(pool, sampling_params={"routed_experts_prompt_start": 2})
    assert answer["choices"][0]["routed_experts"] is None
    body = {"token_ids": IDS, "sampling_params": {}, "routed_experts_format": "npy"}
    refused = pool.post(GENERATE, body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "routed_experts_format"
    assert "--enable-return-routed-experts" in error["message"]


def test_a_stream_has_vllm_s_events(pool: Server):
    body = {
        "token_ids": IDS, "sampling_params": {}, "stream": True, "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    answer = pool.post(GENERATE, body, headers={"X-Request-Id": "one"})
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    *events, done = answer.content.strip().split(b"\n\n")
    assert done == b"data: [DONE]"
    found = [json.loads(one.removeprefix(b"data: ")) for one in events]
    assert {(one["request_id"], one["output_mode"]) for one in found} == {("one", "tokens")}
    assert [one["usage"]["completion_tokens"] for one in found] == [1, 2, 3, 4, 4]
    assert [one.get("prompt_token_ids") for one in found] == [IDS, None, None, None, None]
    choices = [choice for one in found for choice in one["choices"]]
    assert [one["token_ids"] for one in choices] == [[10], [9], [8], [7]]
    assert [one["finish_reason"] for one in choices] == [None, None, None, "length"]
    ends = [one["weight_versions"][-1]["end"] for one in choices]
    assert ends == [1, 2, 3, 4]
    # A client that asks for no usage gets none.
    text = pool.post(GENERATE, {**body, "stream_options": None}).text
    assert text.count("data: ") == 5
    assert '"usage":{' not in text


@pytest.mark.parametrize(
    "fields, status, code, part",
    [
        ({"token_ids": []}, 400, "invalid_request", "token_ids: expected at least one token"),
        ({"token_ids": [1, 50_000]}, 400, "invalid_request", "token_ids[1]: expected a token id"),
        ({"token_ids": [-1]}, 400, "invalid_request", "token_ids[0]"),
        ({"token_ids": [1] * 4096}, 400, "prompt_too_long", "exceeds the model's context length"),
        ({"sampling_params": {"n": 2, "temperature": 0}}, 400, "invalid_request", "n: expected 1"),
        ({"sampling_params": {"n": 10**9}}, 400, "invalid_request", "n = 1000000000"),
        ({"sampling_params": {"logprobs": 21}}, 400, "invalid_request", "logprobs: expected at most"),
        ({"features": {"mm_hashes": {}}}, 400, "invalid_request", "features"),
        ({"content_parts": PARTS}, 400, "image_mismatch", "content_parts: expected no images"),
        ({"model": "none"}, 404, "model_not_found", "model: expected"),
        ({"token_ids": [Fault.FAIL]}, 500, "generation_failed", "token_ids: staged failure"),
        ({"token_ids": [Fault.FAIL], "stream": True}, 500, "generation_failed", "token_ids:"),
        ({"min_weight_version": -1}, 400, "invalid_request", "min_weight_version"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(pool: Server, fields, status, code, part):
    answer = pool.post(GENERATE, {"token_ids": IDS, "sampling_params": {}, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert part in error["message"]
    assert good(pool)["choices"][0]["token_ids"] == IDS[::-1]


def test_an_adapter_is_chosen_by_model(start_stub: StartStub, stub_server: StartServer, tmp_path):
    start_stub(0, TITOPOOL_WEIGHTS_ROOT=str(tmp_path))
    server = stub_server(1)
    folder = tmp_path / "style"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").touch()
    load = {"lora_name": "style", "lora_path": str(folder), "version": 4}
    answer = server.post("/v1/load_lora_adapter", load)
    assert answer.status_code == 200, answer.text
    found = good(server, model="style")
    assert (found["model"], found["choices"][0]["lora_version"]) == ("style", 4)
    assert "lora_version" not in good(server)["choices"][0]


def test_requests_are_aborted_by_their_ids(start_stub: StartStub, stub_server: StartServer):
    start_stub(0, "--delay-s", "60")
    server = stub_server(1, "--num-front-ends", "2")
    headers = {"X-Request-Id": "of-header"}
    calls: dict[str, dict[str, Any]] = {
        "of-body": {"request_id": "of-body"},
        "of-header": {"request_id": "hidden", "headers": headers},
        "prefixed": {"request_id": "prefixed"},
    }

    def num_running() -> float:
        return sum(server.metrics("sequences").values())

    with ThreadPoolExecutor() as threads:
        pending = {name: threads.submit(good, server, **one) for name, one in calls.items()}
        wait_until(lambda: num_running() == 3, 20)
        for ids in ([], ["hidden"], ["unknown"]):
            answer = server.post(ABORT, {"request_ids": ids, "reason": "none"})
            assert (answer.status_code, answer.content) == (200, b"")
        assert not any(one.done() for one in pending.values())
        for wanted in ("of-body", "of-header", "generate-tokens-prefixed"):
            assert server.post(ABORT, {"request_ids": [wanted]}).status_code == 200
            name = wanted.removeprefix("generate-tokens-")
            found = pending.pop(name).result(20)
            assert found["request_id"] == name
            (choice,) = found["choices"]
            assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
            assert not any(one.done() for one in pending.values())


@pytest.mark.parametrize("body", [{}, {"request_ids": None}, {"request_ids": "a"}, [], None])
def test_an_abort_without_ids_is_refused(pool: Server, body: Any):
    answer = pool.post(ABORT, body)
    assert answer.status_code == 400, answer.text


def test_versions_are_shown_by_their_labels(start_stub: StartStub, stub_server: StartServer):
    start_stub(0)
    server = stub_server(1, "--num-front-ends", "2")

    def shown() -> set[str]:
        answers = [good(server)["choices"][0]["weight_versions"] for _ in range(20)]
        return {span["version"] for spans in answers for span in spans}

    assert shown() == {"0"}
    answer = server.post("/update_weight_version", {"new_version": "step-0"})
    assert answer.status_code == 200, answer.text
    # The other front end learns of it from a heartbeat.
    wait_until(lambda: shown() == {"step-0"}, 20)


def test_the_routes_need_the_key_of_generation(start_stub: StartStub, stub_server: StartServer):
    start_stub(0)
    server = stub_server(1, TITOPOOL_API_KEY="user", TITOPOOL_ADMIN_KEY="trainer")
    user = {"Authorization": "Bearer user"}
    for path, body in (
        (GENERATE, {"token_ids": IDS, "sampling_params": {}}),
        (ABORT, {"request_ids": ["a"]}),
    ):
        assert server.post(path, body).status_code == 401
        assert server.post(path, body, headers=user).status_code == 200
