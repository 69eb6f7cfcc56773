"""Front end, workers and trainer on hosts of their own (`tests/all/system/network.py`)."""

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests

from harness.servers import TITOPOOL, wait_until
from tests.all.system.network import Network
from tests.all.system.packages import need, need_root
from tests.conftest import ENGINE_OPTIONS

HOSTS = ["front", "one", "two", "trainer"]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    need("ip")
    need_root()
    made = Network(tmp_path, HOSTS)
    yield made
    made.close()


class Pool:
    """A front end and two workers, each on its host."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        *,
        worker: list[str],
        ipv6: bool = False,
        heartbeat_s: float = 0.5,
    ):
        self._network = network
        self._settings = {
            "TITOPOOL_HEARTBEAT_TIMEOUT_S": "2", "TITOPOOL_HEARTBEAT_INTERVAL_S": str(heartbeat_s),
        }  # fmt: skip
        self._key = str(folder / "curve-key")
        address = network.ipv6 if ipv6 else network.ipv4
        self.host = f"[{address('front')}]" if ipv6 else address("front")
        self.url = f"http://{self.host}:8000"
        self._listen = "[::]" if ipv6 else "0.0.0.0"
        self._worker = worker
        network.set_names({"workers": [address("one"), address("two")]})
        # It makes the key.
        self.start_front_end("front", self._key)
        wait_until(lambda: Path(self._key).exists(), 20, network.logs)
        for host in ("one", "two"):
            self.start_worker(host)

    def start_front_end(self, host: str, key: str) -> None:
        self._network.start(
            host, TITOPOOL, "serve", "--endpoints", "tcp://workers:5555", "--host", "::",
            "--num-front-ends", "2", TITOPOOL_CURVE_KEY_FILE=key, **self._settings,
        )  # fmt: skip

    def start_worker(self, host: str) -> None:
        self._network.start(
            host, *self._worker, "--endpoint", f"tcp://{self._listen}:5555", "--worker-id", host,
            TITOPOOL_CURVE_KEY_FILE=self._key, **self._settings,
        )  # fmt: skip

    def workers(self) -> dict[str, str]:
        """Phase and weight version of each worker, by endpoint."""
        try:
            found = requests.get(f"{self.url}/ready", timeout=10).json()["workers"]
        except requests.RequestException:
            return {}
        return {one["endpoint"]: f"{one['phase']} {one['weight_version']}" for one in found}

    def wait_for(self, *states: str, within_s: float = 20) -> None:
        wait_until(
            lambda: all(sorted(self.workers().values()) == sorted(states) for _ in range(8)),
            within_s, lambda: f"{self.workers()} {self._network.logs()}",
        )  # fmt: skip

    def num_running(self, workers: str) -> int:
        """Completions in flight at the workers whose names match `workers`."""
        metrics = requests.get(f"{self.url}/metrics", timeout=10).text
        found = re.findall(
            rf'^titopool_worker_sequences{{worker="{workers}"}} (\S+)', metrics, re.M
        )
        return int(sum(map(float, found)))

    def post(self, path: str, body: object) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, timeout=60)


STUB = [sys.executable, "-m", "harness.stub_worker"]


@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_a_name_with_two_addresses_is_a_pool_of_two(network: Network, tmp_path: Path, ipv6: bool):
    pool = Pool(network, tmp_path, worker=STUB, ipv6=ipv6)
    pool.wait_for("ready 0", "ready 0")
    expected = {
        f"tcp://[{network.ipv6(host)}]:5555" if ipv6 else f"tcp://{network.ipv4(host)}:5555"
        for host in ("one", "two")
    }
    assert set(pool.workers()) == expected
    answer = pool.post("/generate/", {"prompts": [[n, 7] for n in range(1, 9)]})
    assert answer.json()["completion_ids"] == [[7, n] for n in range(1, 9)]


def test_a_partition_costs_no_request_and_heals(network: Network, tmp_path: Path):
    pool = Pool(network, tmp_path, worker=[*STUB, "--delay-s", "6"], heartbeat_s=0.1)
    pool.wait_for("ready 0", "ready 0")
    answers: list[requests.Response] = []
    body = {"prompts": [[n, 7] for n in range(1, 21)]}
    thread = threading.Thread(target=lambda: answers.append(pool.post("/generate/", body)))
    thread.start()
    wait_until(lambda: pool.num_running("two") > 0 and pool.num_running(r"\w+") == 20, 5)
    network.unplug("two")
    thread.join(60)
    assert answers[0].json()["completion_ids"] == [[7, n] for n in range(1, 21)]
    pool.wait_for("ready 0", "unreachable None")
    assert pool.post("/generate/", {"prompts": [[1, 7]] * 4}).status_code == 200
    network.plug("two")
    pool.wait_for("ready 0", "ready 0")


def test_a_front_end_with_another_key_is_refused_and_says_so(network: Network, tmp_path: Path):
    pool = Pool(network, tmp_path, worker=STUB)
    pool.wait_for("ready 0", "ready 0")
    pool.start_front_end("trainer", str(tmp_path / "another-key"))
    url = f"http://{network.ipv4('trainer')}:8000/ready"

    def reasons() -> list[str]:
        try:
            return [str(one["reason"]) for one in requests.get(url, timeout=10).json()["workers"]]
        except requests.RequestException:
            return []

    wait_until(
        lambda: all("curve_key_file" in one for one in reasons() or [""]),
        20,
        lambda: str(reasons()),
    )
    assert requests.get(url.replace("ready", "health")).status_code == 503
    pool.wait_for("ready 0", "ready 0")


def test_the_doctor_names_the_pairs_that_cannot_connect(network: Network, tmp_path: Path):
    pool = Pool(network, tmp_path, worker=STUB)
    pool.wait_for("ready 0", "ready 0")
    one, two, trainer = (network.ipv4(host) for host in ("one", "two", "trainer"))
    network.start("one", sys.executable, "-m", "http.server", "5556")

    def report(host: str, *words: str, key: str = "curve-key") -> tuple[int, str]:
        before = len(network.log(host))
        variables = {"TITOPOOL_CURVE_KEY_FILE": str(tmp_path / key)}
        code = network.start(host, TITOPOOL, "doctor", *words, **variables).wait(60)
        return code, network.log(host)[before:]

    code, text = report("trainer", "--endpoints", "tcp://workers:5555", "--url", pool.url)
    assert code == 0, text
    assert f"worker at {one}:5555: worker one is ready" in text
    assert f"worker at {two}:5555: worker two is ready" in text
    assert f"workers connect to this host at {trainer}" in text
    assert "worker → worker: all 2 connections open" in text
    network.cut("one", "two")
    code, text = report("trainer", "--url", pool.url)
    assert code == 1
    for pair in (
        f"one at {one}:5555 → worker two at {two}",
        f"two at {two}:5555 → worker one at {one}",
    ):
        assert f"worker {pair}:5555: expected a TCP connection, got no answer within 5 s" in text
    assert "2 do not connect" in text
    network.unplug("two")
    faults = f"tcp://workers:5555,tcp://{one}:5557,tcp://{one}:5556,tcp://nobody:5555"
    code, text = report("trainer", "--endpoints", faults, "--url", "http://front:8001")
    assert code == 1
    assert f"worker at {one}:5555: worker one is ready" in text
    lost = [line for line in text.splitlines() if f"worker at {two}:5555: " in line]
    assert "expected a TCP connection, got" in lost[0]
    assert f"worker at {one}:5557: expected a TCP connection, got a refusal" in text
    assert f"worker at {one}:5556: expected a worker" in text
    assert "tcp://nobody:5555: expected a name that resolves" in text
    assert "http://front:8001: expected an answer of the front end, got: [Errno 111]" in text
    assert "5 do not connect" in text
    code, text = report("trainer", "--endpoints", f"tcp://{one}:5555", key="another-key")
    assert code == 1
    assert "expected a worker with the same key" in text


# By protocol: what the trainer runs, with `url`, `folder` and its own address `host`.
TRAINERS = {
    "titopool": """
from titopool.client.weights_client import WeightsClient
from tests.kit.trainers.trainer import tensors_of
with WeightsClient(url, device="cpu") as client:
    client.update(tensors_of(folder), policy="keep")
""",
    "vLLM": """
from tests.kit.trainers.rl_trainer import stock_trainer
from harness.servers import Server
from tests.kit.trainers.trainer import tensors_of
server = Server(None, url, None)
server.post("/pause?mode=keep", None)
with stock_trainer(server, master_address=host) as trainer:
    trainer.update(tensors_of(folder))
server.post("/resume", {})
""",
    "TRL": """
from tests.kit.trainers.trl_weights_client import update_by_trl
update_by_trl(url, folder)
""",
}


def test_weights_come_from_a_trainer_on_its_own_host_by_each_protocol(
    network: Network, tmp_path: Path, tiny_model: str, other_model: str
):
    worker = [sys.executable, "-P", "-m", "workers", tiny_model, *ENGINE_OPTIONS]
    pool = Pool(network, tmp_path, worker=worker)
    pool.wait_for("ready 0", "ready 0", within_s=120)

    def logprobs() -> np.ndarray:
        """Of both workers."""
        answers = [
            pool.post("/generate/", {"prompts": [[1, 2, 3]], "max_tokens": 4, "temperature": 0})
            for _ in range(6)
        ]
        found = np.array([one.json()["logprobs"] for one in answers])
        assert np.abs(found - found[0]).max() < 1e-5
        return found[0]

    own = logprobs()
    for version, (protocol, script) in enumerate(TRAINERS.items(), start=1):
        folder = other_model if version % 2 else tiny_model
        values = f"url, folder, host = {pool.url!r}, {folder!r}, {network.ipv4('trainer')!r}\n"
        trainer = network.start("trainer", sys.executable, "-c", values + script)
        assert trainer.wait(120) == 0, f"{protocol}: {network.logs()}"
        pool.wait_for(f"ready {version}", f"ready {version}")
        difference = float(np.abs(logprobs() - own).max())
        assert (difference > 0.01) if folder == other_model else (difference < 1e-5), protocol
