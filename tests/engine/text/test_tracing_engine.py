"""Traces and `GET /requests` over real vLLM, whose own span is in the trace."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.servers import Server, running_server, wait_until
from tests.conftest import ENGINE_OPTIONS
from tests.kit.peers.collector import Collector, running_collector

# Must not be in any span, nor in a line of a log.
MARKED = "zebra-quartz"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with running_collector(tmp_path_factory.mktemp("collector") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def server(
    tiny_model: str, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    options = ("--num-workers", "1", "--num-front-ends", "1", "--max-model-len", "2048")
    log = tmp_path_factory.mktemp("engine") / "log"
    with running_server(
        tiny_model, *ENGINE_OPTIONS, *options, "--otlp-endpoint", collector.url, log=log
    ) as running:
        yield running


def test_the_engines_own_span_is_in_the_trace(server, collector):
    # The tokenizer has loaded, and the engine has compiled its code.
    server.generate([MARKED], max_tokens=2)
    answer = server.post(
        "/generate/", {"prompts": [f"{MARKED} jumps"], "max_tokens": 24,
              "generation_kwargs": {"ignore_eos": True}},
        headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
    )  # fmt: skip
    names = {"POST /generate", "check", "queue", "generate", "job", "engine", "prefill", "decode"}
    spans = collector.wait_for(TRACE, {*names, "llm_request"}, 20)
    named = {one.name: one for one in spans}
    parents = {one.name: one.parent for one in spans}
    assert parents["llm_request"] == parents["prefill"] == parents["decode"] == named["engine"].id
    assert parents["engine"] == named["job"].id
    assert parents["job"] == named["POST /generate"].id
    assert parents["POST /generate"] == "b7ad6b7169203331"
    engine, prefill, decode = (named[name] for name in ("engine", "prefill", "decode"))
    # vLLM's clock is the worker's.
    assert engine.begin <= prefill.begin <= prefill.end
    assert decode.begin < decode.end <= engine.end
    # One reading of vLLM's clock, made into Unix time twice.
    assert abs(decode.begin - prefill.end) < 1_000_000
    # 23 steps.
    assert decode.end - decode.begin > prefill.end - prefill.begin
    facts, of_engine = named["job"].attributes, named["llm_request"].attributes
    num_prompt = len(answer.json()["prompt_ids"][0])
    assert facts["gen_ai.usage.input_tokens"] == num_prompt
    assert facts["gen_ai.usage.output_tokens"] == 24
    assert of_engine["gen_ai.usage.completion_tokens"] == 24
    for text in (collector.text, server.log):
        assert MARKED not in text
        assert "zebra" not in text


def test_tokens_of_a_request_that_runs_are_counted(server):
    with ThreadPoolExecutor() as threads:
        body = {
            "prompts": [[1, 2, 3]],
            "n": 8,
            "max_tokens": 2000,
            "generation_kwargs": {"ignore_eos": True},
        }
        headers = {"X-Request-Id": "long"}
        begun = threads.submit(server.post, "/generate/", body, headers=headers)
        counts = [0]

        def grows() -> bool:
            shown = server.get("/requests").json()["requests"]
            counts.extend(one["tokens_out"] for one in shown if one["id"] == "long")
            return len({one for one in counts if one}) >= 3

        wait_until(grows, 20)
        assert counts == sorted(counts)
        assert server.post("/abort_requests", {"request_ids": ["long"]}).json()["aborted"] == 1
        answer = begun.result(30).json()
    assert answer["finish_reasons"] == ["abort"] * 8
    num_tokens = sum(map(len, answer["completion_ids"]))
    assert counts[-1] <= num_tokens < 16_000
