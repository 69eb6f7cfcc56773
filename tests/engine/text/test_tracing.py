"""Traces from the client's span to the engine's, read back from a collector that is not titopool's."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import requests

from harness.servers import REPOSITORY, Server, environment, free_port, running_server, wait_until
from tests.kit.peers.collector import Collector, ReceivedSpan, running_collector
from titopool.errors import ConfigError
from titopool.settings.config import ServerConfig
from titopool.tracing import check_installed, traces_url

# Must not be in any span, nor in a line of a log.
MARKED_PROMPT, MARKED_KEY = 31_337, "a-marked-key"
FRONT_END = {"POST /generate", "read body", "check", "queue", "generate", "answer"}
WORKER = {"job", "engine", "prefill", "decode"}
PARENTS = {
    "rollout": "", "POST /generate": "rollout", "read body": "POST /generate",
    "check": "POST /generate", "queue": "POST /generate", "generate": "POST /generate",
    "answer": "POST /generate", "job": "POST /generate", "engine": "job", "prefill": "engine",
    "decode": "engine",
}  # fmt: skip
# Readings of two clocks become one time.
SLACK_NS = 1_000_000
# A process that has answered ends its span afterwards, while the one that asked goes on.
CALLED, CALLED_SLACK_NS = {"POST /generate", "job"}, 1_000_000_000
# A trainer that traces; prints the id of its trace.
TRAINER = """
import asyncio, inspect, sys
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
import titopool

name, prompt, url, collector, key = sys.argv[1:]
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(collector + "/v1/traces")))
trace.set_tracer_provider(provider)

async def main():
    with trace.get_tracer("trainer").start_as_current_span("rollout") as span:
        client = getattr(titopool, name)(url, api_key=key)
        results = client.generate([[int(prompt), 5, 6]], max_tokens=3, request_id="of-trainer")
        if inspect.isawaitable(results):
            results = await results
            await client.close()
        assert len(results) == 1
        print(f"{span.get_span_context().trace_id:032x}")

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with running_collector(tmp_path_factory.mktemp("collector") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two front ends and a stub worker, with JSON logs and a key."""
    command = f"{sys.executable} -m harness.stub_worker --delay-s 0.05"
    with running_server(
        "--num-workers", "1", "--num-front-ends", "2", "--worker-command", command,
        log=tmp_path_factory.mktemp("traced") / "log", TITOPOOL_OTLP_ENDPOINT=collector.url,
        TITOPOOL_LOG_FORMAT="json", TITOPOOL_API_KEY=MARKED_KEY,
    ) as running:  # fmt: skip
        yield running


def headers(**more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {MARKED_KEY}", **more}


def trace_of(client: str, prompt: int, server: Server, collector: Collector) -> str:
    """Runs a trainer with titopool's `client`; returns the id of its trace."""
    answer = subprocess.run(
        [sys.executable, "-c", TRAINER, client, str(prompt), server.url, collector.url, MARKED_KEY],
        capture_output=True, text=True, timeout=100, check=False, cwd=REPOSITORY, env=environment(),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def check_tree(spans: list[ReceivedSpan]) -> dict[str, str]:
    """Every span is within its parent's time; returns the names of the parents."""
    by_id = {one.id: one for one in spans}
    assert len(by_id) == len(spans)
    parents = {}
    for one in spans:
        assert one.begin <= one.end
        parent = by_id.get(one.parent)
        parents[one.name] = parent.name if parent else ""
        if parent is not None:
            assert one.begin >= parent.begin - SLACK_NS, (one, parent)
            slack_ns = CALLED_SLACK_NS if one.name in CALLED else SLACK_NS
            assert one.end <= parent.end + slack_ns, (one, parent)
    return parents


@pytest.mark.parametrize("client", ["Client", "AsyncClient"])
def test_a_trace_crosses_client_front_end_worker_and_engine(server, collector, client):
    trace = trace_of(client, MARKED_PROMPT, server, collector)
    spans = collector.wait_for(trace, set(PARENTS))
    named = {one.name: one for one in spans}
    assert len(spans) == len(named), [one.name for one in spans]
    waits = {"slot wait": "job"} if "slot wait" in named else {}
    assert check_tree(spans) == PARENTS | waits
    # The stub takes 50 ms.
    assert named["engine"].end - named["engine"].begin >= 50_000_000
    assert named["check"].end <= named["queue"].end <= named["generate"].end
    facts, of_job = named["POST /generate"].attributes, named["job"].attributes
    assert facts["titopool.request_id"] == of_job["titopool.request_id"] == "of-trainer"
    assert facts["http.response.status_code"] == 200
    assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (3, 3)
    assert facts["gen_ai.response.finish_reasons"] == ["length"]
    assert facts["titopool.workers"] == [of_job["titopool.worker"]] == ["0"]
    assert of_job["titopool.weight_versions"] == ["0"]


def test_without_a_parent_a_trace_begins_and_a_refusal_is_in_it(server, collector):
    before = {one.trace for one in collector.spans()}
    body = {"prompts": [[MARKED_PROMPT, -1]]}
    answer = server.post("/generate/", body, headers=headers(**{"X-Request-Id": "refused"}))
    assert answer.status_code == 400

    def found() -> list[ReceivedSpan]:
        return [
            one
            for one in collector.spans()
            if one.attributes.get("titopool.request_id") == "refused"
        ]

    wait_until(found, 10)
    (span,) = found()
    assert span.parent == ""
    assert span.trace not in before
    assert span.attributes["error.type"] == "invalid_request"


def test_the_client_decides_what_is_recorded(server, collector):
    for flag in ("00", "01"):
        header = f"00-0af7651916cd43dd8448eb211c8031{flag}-b7ad6b7169203331-{flag}"
        body = {"prompts": [[1, 2]], "max_tokens": 2}
        answer = server.post("/generate/", body, headers=headers(traceparent=header))
        assert answer.status_code == 200
    spans = collector.wait_for("0af7651916cd43dd8448eb211c803101", FRONT_END | WORKER)
    assert next(one for one in spans if one.name == "POST /generate").parent == "b7ad6b7169203331"
    assert collector.spans("0af7651916cd43dd8448eb211c803100") == []


def test_of_a_large_request_the_first_jobs_are_traced(server, collector):
    header = "00-1af7651916cd43dd8448eb211c803101-b7ad6b7169203331-01"
    body = {"prompts": [[1, 2]] * 40, "max_tokens": 2}
    assert server.post("/generate/", body, headers=headers(traceparent=header)).status_code == 200
    wait_until(
        lambda: sum(one.name == "decode" for one in collector.spans(header.split("-")[1])) == 32, 10
    )


def test_probes_make_no_spans_and_nothing_holds_prompts_or_keys(server, collector):
    for path in ("/health", "/live", "/ready", "/metrics", "/requests"):
        assert server.get(path, headers=headers()).status_code == 200
    body = {"prompts": [[MARKED_PROMPT, 8]], "max_tokens": 2}
    answer = server.post("/generate/", body, headers=headers(**{"X-Request-Id": "after-probes"}))
    assert answer.json()["completion_ids"] == [[8, MARKED_PROMPT]]
    wait_until(lambda: collector.text.count("after-probes") == 2, 10)
    assert not [one.name for one in collector.spans() if one.name.startswith("GET ")]
    for text in (collector.text, server.log):
        # A time in nanoseconds may have the same digits.
        assert not re.search(rf"(?<!\d){MARKED_PROMPT}(?!\d)", text)
        assert MARKED_KEY not in text


def test_a_dead_collector_costs_a_warning(tmp_path):
    command = f"{sys.executable} -m harness.stub_worker"
    with running_server(
        "--num-workers", "1", "--num-front-ends", "1", "--worker-command", command,
        log=tmp_path / "log", TITOPOOL_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}",
    ) as server:  # fmt: skip
        session, body = requests.Session(), {"prompts": [[1, 2]], "max_tokens": 2}
        slowest_s, end_s = 0.0, time.monotonic() + 3
        while time.monotonic() < end_s:
            began_s = time.monotonic()
            assert session.post(server.url + "/generate/", json=body, timeout=60).ok
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        # An export has 5 s.
        assert slowest_s < 3
        wait_until(lambda: "does not take traces" in server.log, 30)
    # At most one of each process.
    assert server.log.count("does not take traces") <= 2
    assert "Traceback" not in server.log


@pytest.mark.parametrize("given", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_the_path_of_traces_is_added(given):
    assert traces_url(given) == "http://c:4318/v1/traces"


def test_settings_that_cannot_work_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="otlp_endpoint: expected http"):
        ServerConfig(otlp_endpoint="collector:4318")
    with pytest.raises(ConfigError, match="trace_ratio"):
        ServerConfig(trace_ratio=1.5)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"titopool\[otel\]"):
        check_installed("http://c:4318")
    check_installed("")


def test_nothing_of_opentelemetry_is_imported_without_the_setting():
    code = (
        "import gevent.monkey; gevent.monkey.patch_all(); import sys\n"
        "from app import create_app; from titopool.settings.config import ServerConfig\n"
        "create_app(ServerConfig()); import workers.serving.server, titopool.client.sync_client\n"
        "print([one for one in sys.modules if one.startswith('opentelemetry')])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        cwd=REPOSITORY, env=environment(),
    )  # fmt: skip
    assert answer.stdout.strip() == "[]"
