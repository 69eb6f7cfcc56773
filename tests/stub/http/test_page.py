"""The page's routes over HTTP, without a browser: headers, keys, shapes, two front ends."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from tokenizers import Tokenizer

from app import create_app
from app.call.token_texts import texts_in_order
from app.operators.page.assets import STATIC, read_assets, version_of
from app.operators.page.history import SPAN_S, History
from app.operators.page.overview import latest_end
from app.operators.page.samples import NUM_LEARNING, Sampler, quantile
from harness.hostile_requests import FOREIGN
from harness.servers import REPOSITORY, Server, front_ends, wait_until
from titopool.settings.config import ServerConfig
from titopool.wire.run_dir import WorkerEnd

PAGE = "/"
TEN_IDS = list(range(1, 11))


def page_client(**settings: Any):
    return create_app(ServerConfig(**settings)).test_client()


def addresses_in(html: str) -> list[str]:
    return re.findall(r'(?:src|href)="(?!#)([^"]+)"', html)


# ---- the page and its files ----------------------------------------------------------


def test_the_policy_allows_no_other_host_and_nothing_inline():
    answer = page_client().get(PAGE)
    assert answer.status_code == 200
    policy = answer.headers["Content-Security-Policy"]
    directives = dict(one.split(" ", 1) for one in policy.split("; "))
    assert directives.pop("img-src") == "'self' data:"
    assert directives.pop("default-src") == "'none'"
    assert set(directives) == {
        "script-src", "style-src", "connect-src", "base-uri", "form-action", "frame-ancestors",
    }  # fmt: skip
    assert set(directives.values()) == {"'self'", "'none'"}
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", answer.text)


def test_no_file_of_ours_names_another_host():
    for path in STATIC.rglob("*"):
        if path.is_file() and path.parent == STATIC and path.suffix != ".svg":
            assert "//" not in re.sub(r"^\s*(//|/\*).*$", "", path.read_text(), flags=re.M), path


def test_all_files_are_served_and_kept_by_browsers():
    client = page_client(api_key="secret")
    html = client.get(PAGE)
    assert html.headers["Cache-Control"] == "no-cache"
    found = addresses_in(html.text)
    assert len(found) >= 6
    for address in found:
        answer = client.get(f"/{address}")
        assert answer.status_code == 200, address
        assert "immutable" in answer.headers["Cache-Control"]
        assert answer.content_type.partition(";")[0] in (
            "text/css",
            "text/javascript",
            "image/svg+xml",
        )
        again = client.get(f"/{address}", headers={"If-None-Match": answer.headers["ETag"]})
        assert (again.status_code, again.data) == (304, b"")
    assert client.get(PAGE, headers={"If-None-Match": html.headers["ETag"]}).status_code == 304
    # Of a front end with other files: the browser must ask again.
    other = client.get("/page/0000000000000000/main.js")
    assert (other.status_code, other.headers["Cache-Control"]) == (200, "no-cache")


@pytest.mark.parametrize(
    "name", ["index.html", "none.js", "../page.py", "%2e%2e/page.py", "/etc/passwd"]
)
def test_nothing_else_is_served(name: str):
    assert page_client().get(f"/page/0/{name}").status_code in (404, 308)


def test_modules_import_files_that_exist():
    for path in STATIC.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert (STATIC / name).exists(), f"{path.name} imports {name}"


def test_the_address_changes_with_any_file(tmp_path: Path):
    (tmp_path / "a.js").write_text("1")
    before = version_of(read_assets(tmp_path))
    (tmp_path / "a.js").write_text("2")
    assert version_of(read_assets(tmp_path)) != before


def test_the_chart_library_is_the_published_one():
    words = (STATIC / "uplot" / "README.txt").read_text()
    (version,) = re.findall(r"uPlot ([\d.]+):", words)
    script = (STATIC / "uplot" / "uPlot.iife.min.js").read_text()
    assert script.startswith(f"/*! https://github.com/leeoniya/uPlot (v{version}) */")
    assert "Permission is hereby granted" in (STATIC / "uplot" / "LICENSE").read_text()


# ---- who may see what ----------------------------------------------------------------


def test_the_page_needs_no_key_and_its_data_does():
    client = page_client(api_key="secret")
    html = client.get(PAGE)
    assert html.status_code == 200
    assert "secret" not in html.text + str(html.headers)
    for path in ("/workers", "/metrics/history", "/metrics"):
        assert client.get(path).status_code == 401, path


def test_a_link_of_another_site_opens_the_page_and_nothing_else():
    client = page_client()
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get(PAGE, headers=link).status_code == 200
    assert client.get(PAGE, headers={**link, "Sec-Fetch-Mode": "no-cors"}).status_code == 403
    for path in ("/workers", "/metrics/history", "/page/0/main.js"):
        assert client.get(path, headers=link).status_code == 403, path


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_page_gets_no_data(case: str):
    client = page_client()
    for path in ("/workers", "/metrics/history"):
        assert client.get(path, headers=FOREIGN[case]).status_code == 403


# ---- samples -------------------------------------------------------------------------


def families(tokens: dict[str, float], **others: Any):
    made = CounterMetricFamily("titopool_worker_completion_tokens", "…", labels=["worker"])
    for worker, value in tokens.items():
        made.add_metric([worker], value)
    yield made
    if "errors" in others:
        requests_ = CounterMetricFamily(
            "titopool_http_requests", "…", labels=["route", "method", "status", "code"]
        )
        requests_.add_metric(["/generate/", "POST", "200", ""], 100)
        for code, value in others["errors"].items():
            requests_.add_metric(["/generate/", "POST", "400", code], value)
        yield requests_
    if "buckets" in others:
        first = HistogramMetricFamily("titopool_time_to_first_token_seconds", "…", labels=["route"])
        first.add_metric(["/generate/"], others["buckets"], 0.0)
        yield first
    if "updates" in others:
        for name, value in others["updates"].items():
            kind = CounterMetricFamily if name.endswith("updates") else GaugeMetricFamily
            labels = ["worker", "staging"] + (["outcome"] if name.endswith("updates") else [])
            family = kind(f"titopool_worker_weight_{name}", "…", labels=labels)
            family.add_metric(["0", "kv", "applied"][: len(labels)], value)
            yield family


def learned(**others: Any) -> Sampler:
    sampler = Sampler()
    for _ in range(NUM_LEARNING):
        sampler.sample(families({"0": 1000.0}, **others), 2.0)
    return sampler


def test_rates_follow_counters_through_restarts_and_newcomers():
    sampler = learned()
    sample = sampler.sample(families({"0": 1100.0, "1": 40.0}), 2.0)
    assert sample.figures == {"completion_tokens_per_s": 70.0}
    assert sample.worker_tokens_per_s == {"0": 50.0, "1": 20.0}
    # Worker 0 has restarted; worker 1 does not answer for a moment.
    assert sampler.sample(families({"0": 10.0}), 2.0).worker_tokens_per_s == {"0": 5.0}
    assert sampler.sample(families({"0": 10.0, "1": 44.0}), 2.0).worker_tokens_per_s["1"] == 2.0


def test_what_a_process_learns_at_its_start_is_no_growth():
    sampler = Sampler()
    assert sampler.sample(families({}), 2.0).figures == {"completion_tokens_per_s": 0.0}
    assert sampler.sample(families({"0": 1e9}), 2.0).figures == {"completion_tokens_per_s": 0.0}


def test_figures_of_missing_families_are_missing():
    sample = Sampler().sample([], 2.0)
    assert sample.figures == {}
    assert sample.errors_per_s is None


def test_errors_are_counted_by_code_from_the_first_one_on():
    sampler = learned(errors={})
    sample = sampler.sample(families({}, errors={"queue_full": 4, "invalid_request": 1}), 2.0)
    assert sample.errors_per_s == {"queue_full": 2.0, "invalid_request": 0.5}
    assert sampler.sample(families({}, errors={"queue_full": 4}), 2.0).errors_per_s == {
        "queue_full": 0.0
    }


def test_quantiles_of_first_tokens():
    before = [("0.1", 0.0), ("0.2", 0.0), ("+Inf", 0.0)]
    sampler = learned(buckets=before)
    figures = sampler.sample(
        families({}, buckets=[("0.1", 50.0), ("0.2", 100.0), ("+Inf", 100.0)]), 2.0
    ).figures
    assert figures["first_token_p50_s"] == pytest.approx(0.1)
    assert figures["first_token_p95_s"] == pytest.approx(0.19)
    assert quantile({0.1: 0.0, float("inf"): 3.0}, 0.5) == 0.1
    assert quantile({}, 0.5) is None


def test_an_update_is_shown_when_it_was_applied():
    def with_updates(number: float):
        return families(
            {}, updates={"updates": number, "update_seconds": 1.5, "paused_seconds": 0.2}
        )

    sampler = learned(updates={"updates": 3, "update_seconds": 1.5, "paused_seconds": 0.2})
    assert sampler.sample(with_updates(3), 2.0).figures["update_s"] is None
    figures = sampler.sample(with_updates(4), 2.0).figures
    assert (figures["update_s"], figures["paused_s"]) == (1.5, 0.2)

    # After a restart, the worker's first update counts.
    running = GaugeMetricFamily("titopool_worker_sequences", "…", labels=["worker"])
    running.add_metric(["0"], 0)
    sampler.sample([running, *families({}, updates={})], 2.0)
    figures = sampler.sample([running, *with_updates(4)], 2.0).figures
    assert (figures["update_s"], figures["paused_s"]) == (1.5, 0.2)


def test_the_history_is_bounded_and_follows_the_clock():
    history = History(lambda: families({"0": 1.0}))
    for second in range(3 * SPAN_S):
        history.take(1e6 + second, float(second))
    answer = history.since(0)
    assert len(answer.time_s) == SPAN_S // answer.interval_s
    assert {time_s % answer.interval_s for time_s in answer.time_s} == {0}
    assert len(history.since(answer.time_s[-3]).time_s) == 2
    # The clock is set back by an hour.
    history.take(1e6 - 3600, 4.0 * SPAN_S)
    assert len(history.since(0).time_s) == 1


# ---- ends of workers -----------------------------------------------------------------


def test_the_last_end_is_the_one_with_its_cause():
    seen, told = WorkerEnd("its connection is closed", 100.0), WorkerEnd("it was killed", 100.3)
    assert latest_end(seen, told) == told
    assert latest_end(WorkerEnd("silent for 10 s", 500.0), told).reason == "silent for 10 s"
    assert latest_end(None, told) == told
    assert latest_end(None, None) is None


# ---- a server with two front ends ----------------------------------------------------


def from_each_front_end(server: Server, path: str) -> list[Any]:
    found = front_ends(server).values()
    return [session.get(server.url + path, timeout=30).json() for session in found]


def test_every_front_end_has_the_pool_s_history_and_ends(start_stub, stub_server):
    workers = [start_stub(0), start_stub(1)]
    server = stub_server(2, "--num-front-ends", "2")
    time.sleep(2 * NUM_LEARNING)
    for _ in range(10):
        server.generate([TEN_IDS] * 10, max_tokens=10)
    time.sleep(4)

    histories = from_each_front_end(server, "/metrics/history")
    totals = []
    for history in histories:
        assert {"completion_tokens_per_s", "running", "waiting"} <= history["figures"].keys()
        assert all(len(one) == len(history["time_s"]) for one in history["figures"].values())
        assert time.time() - history["time_s"][-1] < 30
        rates = history["figures"]["completion_tokens_per_s"]
        totals.append(sum(rates) * history["interval_s"])
        assert set(history["worker_tokens_per_s"]) == {"0", "1"}
    assert totals == pytest.approx([1000.0, 1000.0], rel=0.1)
    for since in ("nan", "x", ""):
        answer = server.get(f"/metrics/history?since={since}")
        assert answer.status_code == 400
        assert "since: expected a Unix time" in answer.json()["error"]["message"]
    common = set(histories[0]["time_s"]) & set(histories[1]["time_s"])
    assert len(common) >= len(histories[0]["time_s"]) - 3

    workers[1].kill()
    workers[1].wait()
    wait_until(lambda: server.get("/ready").json()["num_ready"] == 1, 15)
    time.sleep(1)
    for answer in from_each_front_end(server, "/workers"):
        first, second = answer["workers"]
        assert (first["phase"], first["last_end"], first["model"]) == ("ready", None, "stub")
        assert first["num_completion_tokens"] + first["num_prompt_tokens"] > 0
        assert (second["worker"], second["phase"]) == ("1", "unreachable")
        assert second["last_end"]["reason"] == "its connection is closed"
        assert 0 <= second["last_end"]["ago_s"] < 60


# ---- texts of tokens -----------------------------------------------------------------


class DemoTokenizer:
    """The demo model's, without transformers."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(REPOSITORY / "titopool" / "demo_tokenizer.json"))

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    @property
    def all_special_ids(self) -> list[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return [number for number, token in added.items() if token.special]

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": self.encode(text)}


def test_the_texts_of_single_tokens_add_up():
    tokenizer, text = DemoTokenizer(), "naïve 🙂 text\n<|im_end|> 漢字 end"
    ids = tokenizer.encode(text)
    texts = texts_in_order(tokenizer, ids)
    assert len(texts) == len(ids) > 10
    assert "".join(texts) == text
    assert "" in texts
