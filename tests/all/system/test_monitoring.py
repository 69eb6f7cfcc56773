"""deploy/monitoring with Debian's Prometheus, which scrapes a stub pool and a real engine under load.

Every query of the dashboard must return numbers. Grafana itself is not in Debian: what it would draw
was not seen.
"""

import itertools
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import yaml

from harness import vision_models
from harness.images import PLACEHOLDERS, encoded, picture
from harness.servers import REPOSITORY, Server, free_port, running_server, wait_until
from harness.stub_worker import Fault
from tests.all.system.packages import need
from tests.kit.peers.load import load_on

FOLDER = REPOSITORY / "deploy" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana/dashboards/titopool.json").read_text())
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"][0]["rules"]
KEY = "a-key-of-the-test"
HEADERS = {"Authorization": f"Bearer {KEY}"}
STUB = f"{sys.executable} -m harness.stub_worker --delay-s 0.01 --in-slots --max-num-seqs 4"
LOAD_S = 20.0
# At four scrapes; Grafana's $__rate_interval would be 20 s.
RATE_INTERVAL = "5s"
Answers = dict[str, list[dict[str, Any]]]


def queries() -> dict[str, str]:
    """Each query of the dashboard by its panel, with the variables as Grafana fills them in."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
            for name in ("instance", "worker"):
                text = text.replace(f"${name}", ".+")
            assert "$" not in text
            found[f"{panel['title']}: {target['refId']}"] = text
    return found


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str):
        self.url = url

    def ask(self, path: str, **params: object) -> Any:
        answer = requests.get(f"{self.url}/api/v1/{path}", params=params, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def rows(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=query)["result"]
        return found


@contextmanager
def running_prometheus(folder: Path, targets: list[str]) -> Iterator[Prometheus]:
    """deploy's configuration, with these targets in place of Compose's names."""
    need("prometheus")
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / "rules.yml")]
    (scrape,) = config["scrape_configs"]
    del scrape["dns_sd_configs"]
    scrape["static_configs"] = [{"targets": targets}]
    (folder / scrape["authorization"]["credentials_file"]).write_text(KEY)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus-log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
             f"--web.listen-address={address}"],
            cwd=folder, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        running = Prometheus(f"http://{address}")
        wait_until(lambda: is_up(running), 30, (folder / "prometheus-log").read_text)
        yield running
    finally:
        process.terminate()
        process.wait(20)


def is_up(prometheus: Prometheus) -> bool:
    try:
        # Until it has read its data it answers 503.
        is_ready = requests.get(f"{prometheus.url}/-/ready", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False
    return is_ready and len(prometheus.rows('up{job="titopool"} == 1')) == 2


def use_stub(server: Server, update: Path) -> list[Callable[[], object]]:
    """Calls that use every part of a pool of stubs."""

    def post(path: str, body: dict[str, Any]) -> None:
        answer = server.post(path, body, headers=HEADERS, stream=body.get("stream", False))
        list(answer.iter_content(65_536))

    def control() -> None:
        post("/update_weights", {"path": str(update), "policy": "keep"})
        post("/pause", {"mode": "keep", "lease_s": 10})
        time.sleep(0.1)
        post("/resume", {})
        time.sleep(1)

    def wrong() -> None:
        post("/generate/", {"prompts": [[1, -5]]})
        post("/generate/", {"prompts": [[Fault.FAIL]]})
        time.sleep(0.2)

    return [
        lambda: post("/generate/", {"prompts": [[1, 2, 3]] * 8, "max_tokens": 4}),
        lambda: post("/v1/completions", {
            "model": "stub", "prompt": [1, 2, 3, 4, 5], "max_tokens": 5, "stream": True,
        }),
        control,
        wrong,
    ]  # fmt: skip


def use_engine(server: Server) -> list[Callable[[], object]]:
    # A prompt that equals a recent one is not prepared again.
    seeds = itertools.count()
    text = PLACEHOLDERS["qwen"] + " what is it"
    return [
        lambda: server.generate(
            [text], images=[[encoded(picture(64, 48, next(seeds)))]], max_tokens=8
        ),
        lambda: server.generate([[5, 6, 7, 8] * 16] * 2, max_tokens=16),
    ]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has watched both servers under load, while a stub was killed."""
    need("prometheus")
    folder = tmp_path_factory.mktemp("monitoring")
    model, update = folder / "model", folder / "weights" / "step-1"
    model.mkdir()
    update.mkdir(parents=True)
    (update / "model.safetensors").write_bytes(b"a stub does not read it")
    vision_models.make_qwen_vl(model)
    with (
        running_server(
            "--worker-command", STUB, "--num-workers", "2", "--num-front-ends", "2",
            "--weights-root", str(folder / "weights"), log=folder / "stub-log", num_workers=2,
            TITOPOOL_API_KEY=KEY,
        ) as stub,
        running_server(
            str(model), "--num-workers", "1", "--dtype", "float32", "--max-model-len", "1024",
            log=folder / "engine-log",
        ) as engine,
        running_prometheus(folder, [one.url.removeprefix("http://") for one in (stub, engine)])
        as prometheus,
    ):  # fmt: skip
        with load_on(*use_stub(stub, update), *use_engine(engine)):
            time.sleep(LOAD_S / 2)
            worker = next(
                one for one in psutil.Process(stub.process.pid).children(recursive=True)
                if "harness.stub_worker" in one.cmdline()
            )  # fmt: skip
            worker.kill()
            time.sleep(LOAD_S / 2)
        yield prometheus


@pytest.mark.parametrize("query", queries().values(), ids=queries().keys())
def test_a_query_of_the_dashboard_returns_numbers(scraped: Prometheus, query: str):
    now = time.time()
    found = scraped.ask("query_range", query=query, start=now - 120, end=now, step=1)["result"]
    numbers = [float(value) for row in found for _, value in row["values"]]
    assert any(math.isfinite(one) for one in numbers), found


@pytest.mark.parametrize("name", ["instance", "worker"])
def test_a_variable_of_the_dashboard_has_values(scraped: Prometheus, name: str):
    (variable,) = [one for one in DASHBOARD["templating"]["list"] if one["name"] == name]
    text = variable["query"]["query"].replace("$instance", ".+")
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", text)
    assert found is not None
    values = scraped.ask(f"label/{found[2]}/values", **{"match[]": found[1]})
    assert len(values) == 2


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule.get("record"))
def test_the_metrics_of_a_rule_exist(scraped: Prometheus, rule: dict[str, Any]):
    scraped.rows(rule["expr"])
    names = set(re.findall(r"\b(?:titopool[_:]\w+|up)\b(?=[{\[\s)]|$)", rule["expr"]))
    assert names
    for name in names:
        now = time.time()
        series = scraped.ask("series", **{"match[]": name}, start=now - 120, end=now)
        assert series, name
    if "record" in rule:
        assert scraped.rows(rule["record"])


def test_prometheus_evaluates_all_rules(scraped: Prometheus):
    (group,) = scraped.ask("rules")["groups"]
    assert {one["name"]: one.get("lastError", "") for one in group["rules"]} == {
        rule.get("alert") or rule["record"]: "" for rule in RULES
    }
    assert {one["health"] for one in group["rules"]} == {"ok"}


def test_an_alert_says_what_to_do_and_where_to_read():
    for rule in RULES:
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert re.fullmatch(r"\d+m", rule["for"])
            assert "docs/operators.md" in rule["annotations"]["description"]
    listed = re.findall(
        r"^\| `(Titopool\w+)` \|", (REPOSITORY / "docs/operators.md").read_text(), re.M
    )
    assert listed == [rule["alert"] for rule in RULES if "alert" in rule]


def test_promtool_accepts_configuration_and_rules_and_their_tests(tmp_path: Path):
    need("promtool")
    for name in ("prometheus.yml", "rules.yml", "rules_test.yml"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    (tmp_path / "api-key").touch()
    for words in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "rules.yml"],
        ["test", "rules", "rules_test.yml"],
    ):
        done = subprocess.run(
            ["promtool", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    for rule in RULES:
        if "alert" in rule:
            names = [f"{rule['alert']} fires", f"{rule['alert']} is silent"]
            assert [one["name"] for one in tests if one["name"].startswith(rule["alert"])] == names


def test_compose_mounts_files_that_exist():
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        service = services[name]
        assert service["profiles"] == ["monitoring"]
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
        assert all("127.0.0.1" in port for port in service["ports"])
        for mount in service["volumes"]:
            source = re.sub(r"^\$\{\w+:-([^}]*)\}", r"\1", mount).partition(":")[0]
            if source.startswith("./"):
                assert (REPOSITORY / source).exists(), source
