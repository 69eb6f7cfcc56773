"""`GET /metrics` of real servers: what it shows, and who answers."""

import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from harness.servers import REPOSITORY, Server, front_ends, running_server, wait_until
from harness.stub_worker import Fault

STUB = f"{sys.executable} -m harness.stub_worker --delay-s 0.01"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(text: str) -> Samples:
    """All samples by name and labels; fails if a sample or a family comes twice."""
    found, names = {}, []
    for family in text_string_to_metric_families(text):
        names.append(family.name)
        for one in family.samples:
            key = (one.name, frozenset(one.labels.items()))
            assert key not in found, key
            found[key] = one.value
    assert len(names) == len(set(names))
    return found


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples of this name that have these labels."""
    return sum(
        value for (one, has), value in samples.items() if one == name and labels.items() <= set(has)
    )


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two supervised stub workers behind two front ends."""
    folder = tmp_path_factory.mktemp("metrics")
    with running_server(
        "--worker-command", STUB, "--num-workers", "2", "--num-front-ends", "2",
        "--run-dir", str(folder / "run"), log=folder / "log", num_workers=2,
    ) as server:  # fmt: skip
        yield server


def by_front_end(server: Server) -> dict[int, Samples]:
    """The samples of each front end, by its process."""
    return {
        pid: samples_of(session.get(server.url + "/metrics").text)
        for pid, session in front_ends(server).items()
    }


def read(server: Server) -> Samples:
    return samples_of(server.get("/metrics").text)


def stream(server: Server, prompt: list[int], **fields: object) -> None:
    body = {"model": "stub", "prompt": prompt, "stream": True, **fields}
    answer = server.post("/v1/completions", body, stream=True)
    assert answer.status_code == 200
    list(answer.iter_lines())


def test_requests_are_counted_by_route_and_code_and_timed(pool: Server):
    before = read(pool)
    for _ in range(3):
        pool.generate([[1, 2, 3], [4, 5]], max_tokens=2)
    stream(pool, [1, 2, 3, 4], max_tokens=4)
    refused = [
        ("/generate/", {"prompts": [[1, -2]]}, 400, "invalid_request", "/generate/"),
        ("/generate/", {"prompts": [[Fault.FAIL, 2]]}, 500, "generation_failed", "/generate/"),
        ("/v1/completions", {"model": "other", "prompt": [1]}, 404, "model_not_found",
         "/v1/completions/"),
        ("/no/such/path-of-a-client", {}, 404, "not_found", ""),
    ]  # fmt: skip
    for path, body, status, _, _ in refused:
        assert pool.post(path, body).status_code == status
    requests.request("BREW", pool.url + "/generate/", timeout=30)
    stream(pool, [1, Fault.RAISE, 3], max_tokens=3)
    after = read(pool)

    def gain(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    counted = "titopool_http_requests_total"
    assert gain(counted, route="/generate/", method="POST", status="200", code="") == 3
    for _, _, status, code, route in refused:
        assert gain(counted, route=route, status=str(status), code=code) == 1
    assert gain(counted, method="other", status="405") == 1
    assert not any("path-of-a-client" in str(key) or "BREW" in str(key) for key in after)
    assert gain("titopool_http_request_seconds_count", route="/v1/completions/") == 3
    for route, number in (("/generate/", 3), ("/v1/completions/", 2)):
        first = gain("titopool_time_to_first_token_seconds_count", route=route)
        whole = gain("titopool_http_request_seconds_sum", route=route)
        assert first == number
        assert 0 < gain("titopool_time_to_first_token_seconds_sum", route=route) < whole
    assert 1 <= gain("titopool_inter_token_seconds_count", route="/v1/completions/") <= 8
    tokens = {
        (route, kind): gain("titopool_tokens_total", route=route, kind=kind)
        for route in ("/generate/", "/v1/completions/") for kind in ("prompt", "completion")
    }  # fmt: skip
    assert tokens["/generate/", "prompt"] == 15
    assert tokens["/generate/", "completion"] == 12
    assert tokens["/v1/completions/", "prompt"] == 7
    assert gain("titopool_queue_wait_seconds_count") == 9
    assert gain("titopool_placed_jobs_total") == 9


def test_refused_requests_are_counted_by_code_over_all_front_ends(pool: Server):
    reasons = ("invalid_request", "model_not_found", "not_found", "conflict", "bad_request")

    def shown() -> list[list[float]]:
        name = "titopool_refused_requests_total"
        return [
            [total(one, name, reason=reason) for reason in reasons]
            for one in by_front_end(pool).values()
        ]

    # What other tests have asked for is counted, and both front ends show it.
    seen: list[Any] = []

    def is_still() -> bool:
        seen.append(shown())
        return len(seen) > 20 and all(one == [seen[-1][0]] * 2 for one in seen[-20:])

    wait_until(is_still, 20)
    before = seen[-1][0]
    for _ in range(4):
        # Each time at whichever front end.
        assert pool.post("/generate/", {"prompts": 1}).status_code == 400
        assert pool.post("/v1/completions", {"model": "x", "prompt": [1]}).status_code == 404
        assert pool.get("/no/such/route").status_code == 404
        # vLLM's routes answer their errors by themselves.
        assert pool.post("/finish_weight_update", {}).status_code == 409
        with socket.create_connection(("127.0.0.1", int(pool.url.rpartition(":")[2]))) as client:
            client.sendall(b"GET /live HTTP/1.1\r\nbad header\r\n\r\n")
            assert b" 400 " in client.recv(4096)
    wanted = [number + 4 for number in before]
    wait_until(lambda: shown() == [wanted, wanted], 10, lambda: f"{shown()}, not {wanted}")


def test_a_stream_that_fails_is_counted_with_its_code(pool: Server):
    before = read(pool)
    # The engine dies at the second chunk, and with it the stream.
    stream(pool, [9, Fault.DIE_MID_STREAM, 5], max_tokens=3)
    wait_until(lambda: pool.get("/ready").json()["num_ready"] == 2, 20)
    labels = {"route": "/v1/completions/", "status": "200", "code": "generation_failed"}
    name = "titopool_http_requests_total"
    assert total(read(pool), name, **labels) - total(before, name, **labels) == 1


def test_all_front_ends_show_the_same_and_keep_the_counts_of_one_that_dies(pool: Server):
    for _ in range(10):
        pool.generate([[1, 2, 3]], max_tokens=2)

    def same_everywhere() -> Samples:
        """What both show of front ends, but for the scrapes themselves."""
        shown = [
            {
                key: value for key, value in samples.items()
                if key[0].startswith(("titopool_http", "titopool_t", "titopool_i", "titopool_q"))
                and not {("route", "/metrics/"), ("route", "/live/")} & key[1]
            }
            for samples in by_front_end(pool).values()
        ]  # fmt: skip
        assert shown[0] == shown[1]
        return shown[0]

    before = same_everywhere()
    pid = next(iter(by_front_end(pool)))
    psutil.Process(pid).kill()
    wait_until(lambda: pid not in by_front_end(pool), 20)
    assert same_everywhere() == before


def test_a_dead_worker_leaves_the_others_and_its_restart_is_counted(pool: Server):
    before = read(pool)
    worker = next(
        one for one in psutil.Process(pool.process.pid).children(recursive=True)
        if "harness.stub_worker" in one.cmdline() and "1" in one.cmdline()
    )  # fmt: skip
    worker.kill()
    # Parsed each time.
    wait_until(
        lambda: (
            total(read(pool), "titopool_worker_restarts_total", worker="1", reason="killed")
            > total(before, "titopool_worker_restarts_total", worker="1", reason="killed")
        ),
        20,
    )
    # Each front end learns of it by itself.
    wait_until(lambda: total(read(pool), "titopool_worker_phase", phase="ready") == 2, 20)
    wait_until(lambda: total(read(pool), "titopool_workers") == 2, 20)
    wait_until(lambda: total(read(pool), "vllm:stub_0_seconds_bucket", worker="1") > 0, 10)


def test_pauses_are_counted_by_mode(pool: Server):
    assert pool.post("/pause", {"mode": "keep", "lease_s": 30}).status_code == 200
    time.sleep(0.2)
    assert pool.post("/resume", {}).status_code == 200
    name = "titopool_worker_pause_seconds"
    wait_until(lambda: total(read(pool), name + "_count", mode="keep") == 2, 10)
    assert 0.4 < total(read(pool), name + "_sum", mode="keep") < 30


def documented() -> dict[str, str]:
    """The labels of each metric in docs/metrics.md."""
    text = (REPOSITORY / "docs" / "metrics.md").read_text()
    return dict(re.findall(r"^\| `(titopool_\w+)` \| (.*?) \|", text, re.M))


def test_the_document_lists_every_metric_and_label(pool: Server):
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(pool.get("/metrics").text):
        if family.name.startswith("titopool_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {label for one in family.samples for label in one.labels}
            shown[name] = labels - {"le", "quantile"}
    assert sorted(documented()) == sorted(shown)
    for name, labels in shown.items():
        if labels:
            assert set(re.findall(r"`(\w+)`", documented()[name])) == labels, name


def test_a_real_engine_shows_vllm_s_metrics_for_each_worker(server: Server):
    read(server)
    before = read(server)
    for _ in range(4):
        server.generate([[5, 6, 7]] * 4, max_tokens=16, generation_kwargs={"ignore_eos": True})
    name = "vllm:generation_tokens_total"
    wait_until(lambda: total(read(server), name) - total(before, name) >= 16 * 16, 15)
    samples = read(server)
    for worker in ("0", "1"):
        for known in (
            "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
            "vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total",
            "vllm:prefix_cache_hits_total", "vllm:time_to_first_token_seconds_count",
            "vllm:e2e_request_latency_seconds_count", "vllm:request_success_total",
        ):  # fmt: skip
            assert any(one == known and ("worker", worker) in has for one, has in samples), known
    assert total(samples, "vllm:inter_token_latency_seconds_count") > 0
    assert not any(name.endswith("_created") for name, _ in samples)
    assert "custom stat loggers" not in Path(server.log_file).read_text()
