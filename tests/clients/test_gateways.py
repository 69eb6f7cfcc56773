"""Sessions as the trainers of other gateways read them, over real vLLM.

rLLM's client is rllm-model-gateway 0.1.0. miles is not published as a package: the decoder here reads what
that of radixark/miles (`rollout/session/samples/codec.py`) reads, and is as strict.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import requests
import safetensors.numpy
from transformers import AutoTokenizer

from harness.servers import Server
from tests.clients.published import run_client

QUESTION = {"role": "user", "content": "What is 6 times 7?"}
MORE = {"role": "user", "content": "Go on."}
DTYPES = {
    "tokens": np.int64, "loss_mask": np.uint8, "rollout_log_probs": np.float64,
    "rollout_routed_experts": np.int32, "rollout_indexer_topk": np.int32,
}  # fmt: skip
FIELDS = {
    "response", "response_length", "status", "weight_versions", "prefix_cache_info", "metadata", "reward",
}  # fmt: skip


class Played(NamedTuple):
    url: str
    answers: list[dict[str, Any]]

    def ids(self, number: int) -> list[int]:
        """All that a turn was sent and sampled."""
        found = self.answers[number]
        return [*found["prompt_token_ids"], *found["choices"][0]["token_ids"]]


def ask(url: str, messages: Sequence[Any]) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
    answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.ok, answer.text
    found: dict[str, Any] = answer.json()
    return found


def played(server: Server, num_turns: int) -> Played:
    """A linear conversation."""
    url = f"{server.url}/sessions/{server.post('/sessions', {}).json()['session_id']}"
    answers, messages = [], [QUESTION]
    for _ in range(num_turns):
        answers.append(ask(url, messages))
        messages = [*messages, answers[-1]["choices"][0]["message"], MORE]
    return Played(url, answers)


def decoded(url: str, body: Any = None) -> tuple[list[dict[str, Any]], dict[str, Any], str | None]:
    """Samples, the session's metadata and why there are no samples."""
    answer = requests.post(f"{url}/samples", json=body or {}, timeout=120)
    assert answer.status_code == 200, answer.text
    tensors = safetensors.numpy.load(answer.content)
    meta = json.loads(tensors.pop("_samples_meta").tobytes())
    samples = []
    for index, sample in enumerate(meta["samples"]):
        nulls = set(sample.pop("nulls"))
        assert set(sample) == FIELDS
        assert nulls <= set(DTYPES)
        for name in set(DTYPES) - nulls:
            sample[name] = tensors.pop(f"{name}.{index}")
            assert sample[name].dtype == DTYPES[name]
        samples.append(sample)
    assert not tensors
    return samples, meta["session_metadata"], meta["empty_reason"]


def test_miles_reads_a_session_s_samples(server: Server, tiny_model: str):
    session = played(server, 2)
    first = session.answers[0]
    # The client sends its second request again, and goes on from the second answer.
    messages = [QUESTION, first["choices"][0]["message"], MORE]
    third = ask(session.url, messages)
    fourth = ask(session.url, [*messages, third["choices"][0]["message"], MORE])
    (sample,), metadata, empty = decoded(
        session.url, {"metadata": {"reward": 0.5, "task": 17, "leaf": "mine"}}
    )
    assert empty is None
    whole = [*fourth["prompt_token_ids"], *fourth["choices"][0]["token_ids"]]
    start = len(first["prompt_token_ids"])
    assert sample["tokens"].tolist() == whole == metadata["accumulated_token_ids"]
    assert metadata["max_trim_tokens"] == 0
    assert sample["response_length"] == len(whole) - start == len(sample["loss_mask"])
    sampled = [one["choices"][0]["token_ids"] for one in (first, third, fourth)]
    trained = sample["tokens"][start:][sample["loss_mask"] == 1]
    assert trained.tolist() == [token for ids in sampled for token in ids]
    assert len(sample["rollout_log_probs"]) == len(sample["loss_mask"])
    assert np.array_equal(sample["rollout_log_probs"] < 0, sample["loss_mask"] == 1)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert sample["response"] == tokenizer.decode(whole[start:])
    assert sample["status"] == "truncated"
    assert sample["weight_versions"] == ["0"] * 3
    prompts = sum(len(one["prompt_token_ids"]) for one in (first, third, fourth))
    assert sample["prefix_cache_info"]["total_prompt_tokens"] == prompts
    assert sample["reward"] == 0.5
    leaf = {"node_id": 3, "parent": 2, "path_node_ids": [0, 2, 3], "response_id": fourth["id"]}
    assert sample["metadata"] == {
        "reward": 0.5, "task": 17, "tito_session_mismatch": [], "leaf": leaf,
    }  # fmt: skip


@pytest.mark.parametrize("over", [-3, -1, 0, 2, 4])
def test_miles_samples_end_at_max_seq_len(server: Server, over: int):
    """`over`: tokens beyond the second turn's first sampled one."""
    session = played(server, 3)
    starts = [len(one["prompt_token_ids"]) for one in session.answers]
    (sample,), _, _ = decoded(session.url, {"max_seq_len": starts[1] + over})
    # A turn of which not one sampled token is left is left out.
    length = starts[0] + 4 if over <= 0 else starts[1] + over
    assert sample["tokens"].tolist() == session.ids(1)[:length]
    assert sample["loss_mask"].sum() == (4 if over <= 0 else 4 + over)


def test_miles_hears_why_there_are_no_samples(server: Server):
    session = played(server, 1)
    length = len(session.answers[0]["prompt_token_ids"])
    assert decoded(session.url, {"max_seq_len": length})[::2] == ([], "all_truncated")
    assert decoded(played(server, 0).url)[::2] == ([], "no_records")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"metadata": [1]}, "metadata"),
        ({"max_length": 3}, "max_length"),
        ({"metadata": {"seed": 2**70}}, "metadata"),
    ],
)
def test_a_body_that_miles_does_not_send_is_refused(server: Server, body: Any, text: str):
    answer = requests.post(f"{played(server, 0).url}/samples", json=body, timeout=60)
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_records_have_what_miles_assembles_samples_of(server: Server):
    session = played(server, 2)
    read = requests.get(session.url, timeout=60).json()
    assert read["metadata"]["accumulated_token_ids"] == session.ids(1)
    for number, (record, answer) in enumerate(zip(read["records"], session.answers, strict=True)):
        assert (record["method"], record["path"]) == ("POST", "/v1/chat/completions")
        assert record["status_code"] == 200
        assert record["request"]["input_ids"] == answer["prompt_token_ids"]
        assert len(record["request"]["messages"]) == 2 * number + 1
        (choice,) = record["response"]["choices"]
        content = answer["choices"][0]["message"]["content"]
        assert choice["message"] == {"role": "assistant", "content": content}
        sampled = [token for _, token, _ in choice["meta_info"]["output_token_logprobs"]]
        assert sampled == answer["choices"][0]["token_ids"]
        assert choice["meta_info"]["weight_version"] == "0"
    short = requests.get(f"{session.url}?records=false", timeout=60).json()
    assert (short["records"], short["metadata"]) == ([], {})
    assert short["turns"] == read["turns"]
    refused = requests.get(f"{session.url}?records=maybe", timeout=60)
    assert (refused.status_code, "records" in refused.text) == (400, True)


def test_rllm_s_client_reads_traces(server: Server):
    script = """
import requests
from rllm_model_gateway.client import GatewayClient

gateway, answers = GatewayClient(url), []
name = gateway.create_session(metadata={"task": 17})
messages = [{"role": "user", "content": "What is 6 times 7?"}]
for _ in range(3):
    body = {"messages": messages, "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
    path = gateway.get_session_url(name) + "/chat/completions"
    answers.append(requests.post(path, json=body, timeout=120).json())
    messages = [*messages, answers[-1]["choices"][0]["message"], {"role": "user", "content": "Go on."}]
traces = [one.model_dump() for one in gateway.get_session_traces(name)]
later = gateway.get_session_traces(name, since=traces[1]["timestamp"], limit=1)
info = gateway.get_session_info(name)
answer([answers, traces, [one.trace_id for one in later], info["session_id"] == name, gateway.delete_session(name)])
"""
    answers, traces, later, is_named, num_deleted = run_client("rllm", server.url, script)
    assert (is_named, num_deleted, later) == (True, 3, [traces[1]["trace_id"]])
    for number, (trace, answer) in enumerate(zip(traces, answers, strict=True)):
        ids = answer["choices"][0]["token_ids"]
        assert trace["prompt_token_ids"] == answer["prompt_token_ids"]
        assert trace["completion_token_ids"] == ids
        assert len(trace["logprobs"]) == len(ids)
        assert max(trace["logprobs"]) < 0
        assert len(trace["messages"]) == 2 * number + 1
        assert trace["finish_reason"] == "length"
        assert trace["token_counts"] == {
            "prompt": len(answer["prompt_token_ids"]), "completion": len(ids),
        }  # fmt: skip
        assert trace["metadata"] == {"task": 17}
        assert trace["response_message"]["content"] == answer["choices"][0]["message"]["content"]


def test_rllm_hears_that_the_server_names_sessions(server: Server):
    script = """
from rllm_model_gateway.client import GatewayClient
try:
    GatewayClient(url).create_session("task-17:0")
except Exception as error:
    answer([error.response.status_code, error.response.json()["error"]["message"]])
"""
    status, text = run_client("rllm", server.url, script)
    assert status == 400
    assert "session_id" in text
    answer = requests.get(f"{played(server, 1).url}/traces?limit=none", timeout=60)
    assert (answer.status_code, "limit" in answer.text) == (400, True)
