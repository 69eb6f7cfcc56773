"""docker-compose.yml with a real Docker engine: the cpu profile, two workers, from build to `down`.

`make test-all PART=compose` runs these tests; tests/all/compose/engine.py says in which engine. The base image is
pulled, or built locally where nothing can be pulled; BASE_IMAGE in the environment names another
image.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from app.http.connections import limits_within
from harness.servers import REPOSITORY, first_request, free_port, wait_until
from tests.all.compose import engine, make_base_image
from tests.kit.models.weights import assert_serves
from tests.kit.trainers.trainer import tensors_of
from tests.kit.trainers.trl_weights_client import update_by_trl
from titopool.client.weights_client import WeightsClient, WeightsError
from titopool.demo_model import make_model
from titopool.settings.config import ServerConfig

BASE_IMAGE = "python:3.11-slim"
BUILD_TIMEOUT_S = 1800.0
READY_TIMEOUT_S = 300.0
COMMAND_TIMEOUT_S = 120.0
API_KEY = "a key for this test"
GREEDY = {"temperature": 0.0, "max_tokens": 6}


def run(
    *command: str, timeout_s: float = COMMAND_TIMEOUT_S, check: bool = True, **variables: str
) -> str:
    """The output of `command`; fails the test if the command fails or times out."""
    done = subprocess.run(
        command, cwd=REPOSITORY, timeout=timeout_s, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | variables,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"{command}: {done.stdout[-6000:]}"
    return done.stdout


# Includes the image build.
pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S + 1800)


@pytest.fixture(scope="module", autouse=True)
def own_engine() -> Iterator[bool]:
    """Whether the engine is the tests' own; skips the tests without one."""
    with engine.running() as is_own:
        if not engine.compose_command():
            pytest.skip("Docker has no compose plug-in, nor is there docker-compose")
        yield is_own


@pytest.fixture(scope="module")
def base_image(own_engine: bool) -> str:
    """A base image for the build."""
    if given := os.environ.get("BASE_IMAGE"):
        return given
    # A build in the tests' own engine reaches no network, which only the local image can do without.
    for command in () if own_engine else (("image", "inspect"), ("pull", "--quiet")):
        if "Error" not in run("docker", *command, BASE_IMAGE, timeout_s=600, check=False):
            return BASE_IMAGE
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip(f"{BASE_IMAGE} cannot be pulled, and making another needs root and debootstrap")
    sources = ("setup.cfg", "constraints/cpu.txt", "tests/all/compose/make_base_image.py")
    digest = hashlib.sha256(b"".join((REPOSITORY / source).read_bytes() for source in sources))
    tag = f"titopool-test-base:{digest.hexdigest()[:12]}"
    if not run("docker", "images", "--quiet", tag).strip():
        make_base_image.make_base_image(tag)
    return tag


@dataclass
class ComposeProject:
    """A running compose project."""

    name: str
    variables: dict[str, str]
    url: str
    group_port: int

    def compose(self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        command = (*engine.compose_command(), "--profile", "cpu", "-p", self.name, *words)
        return run(*command, timeout_s=timeout_s, **self.variables)

    def containers(self, service: str) -> list[str]:
        """Ids of the service's running containers."""
        service_label = f"label=com.docker.compose.service={service}"
        return run(
            "docker", "ps", "--quiet", *self._project_label(), "--filter", service_label
        ).split()

    def num_restarts(self) -> int:
        """How often Docker has restarted the workers."""
        inspect = ("docker", "inspect", "--format", "{{.RestartCount}}")
        return sum(map(int, run(*inspect, *self.containers("worker-cpu")).split()))

    def leftovers(self) -> str:
        """The project's containers, volumes and networks, running or not."""
        return "".join(
            run("docker", kind, "ls", "--quiet", *flags, *self._project_label())
            for kind, flags in (("container", ("--all",)), ("volume", ()), ("network", ()))
        )

    def _project_label(self) -> tuple[str, str]:
        return "--filter", f"label=com.docker.compose.project={self.name}"

    def num_ready(self) -> int:
        try:
            return int(requests.get(f"{self.url}/ready", timeout=10).json()["num_ready"])
        except requests.RequestException:
            return 0

    def wait_until_ready(self, num_workers: int) -> None:
        wait_until(lambda: self.num_ready() == num_workers, READY_TIMEOUT_S, self.logs)

    def logs(self) -> str:
        return self.compose("logs", "--tail", "60")

    def generate(self, prompts: Any, **fields: Any) -> dict[str, Any]:
        """The response of /generate/; fails the test if the status is not 200."""
        answer = requests.post(
            f"{self.url}/generate/",
            json={"prompts": prompts, **fields},
            headers={"Authorization": f"Bearer {API_KEY}"},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result


@pytest.fixture(scope="module")
def composed(base_image: str) -> Iterator[ComposeProject]:
    """The cpu profile with two workers; removed afterwards with its volumes."""
    port, group_port = free_port(), free_port()
    variables = {
        "BASE_IMAGE": base_image,
        "PUBLISH": f"127.0.0.1:{port}",
        "PUBLISH_GROUP": f"127.0.0.1:{group_port}:{group_port}",
        "TITOPOOL_API_KEY": API_KEY,
        "OMP_NUM_THREADS": "1",
        # As in a user's .env file: --profile must win.
        "COMPOSE_PROFILES": "gpu",
    }
    url = f"http://127.0.0.1:{port}"
    project = ComposeProject(f"titopool-test-{os.getpid()}", variables, url, group_port)
    project.compose("build", timeout_s=BUILD_TIMEOUT_S)
    try:
        project.compose("up", "--detach", "--scale", "worker-cpu=2")
        # Fail early if two workers restart in a loop, instead of at the timeout.
        wait_until(
            lambda: project.num_ready() == 2 or project.num_restarts(),
            READY_TIMEOUT_S,
            project.logs,
        )
        assert not project.num_restarts(), project.logs()
        yield project
    finally:
        project.compose("down", "--volumes")
    assert not project.leftovers()


def test_front_end_is_healthy_and_requires_the_key(composed: ComposeProject) -> None:
    assert requests.get(f"{composed.url}/health", timeout=10).status_code == 200
    refused = requests.post(f"{composed.url}/generate/", json={"prompts": [[1]]}, timeout=10)
    assert refused.status_code == 401
    (front,) = composed.containers("front-cpu")
    status = ("docker", "inspect", "--format", "{{.State.Health.Status}}", front)
    wait_until(lambda: run(*status).strip() == "healthy", 60, lambda: run(*status))


def test_no_container_runs_as_root(composed: ComposeProject) -> None:
    for container in composed.containers("worker-cpu") + composed.containers("front-cpu"):
        assert run("docker", "exec", container, "id", "-u").strip() == "1000"


def test_completions_come_in_the_order_of_the_prompts(composed: ComposeProject) -> None:
    prompts = [[10 + index] * (3 + index) for index in range(8)]
    answer = composed.generate(prompts, **GREEDY)
    assert answer["prompt_ids"] == prompts
    assert [len(ids) for ids in answer["completion_ids"]] == [6] * 8
    assert [[len(at) for at in one] for one in answer["logprobs"]] == [[1] * 6] * 8
    # Both workers serve the same weights, so a prompt alone gives the same ids as in the batch.
    alone = [composed.generate([prompt], **GREEDY)["completion_ids"][0] for prompt in prompts]
    assert answer["completion_ids"] == alone
    assert len(composed.generate(prompts, n=3)["completion_ids"]) == 24


def test_the_readmes_first_request_is_answered(composed: ComposeProject) -> None:
    """Its prompt is a text, for which the front end loads the workers' tokenizer."""
    answer = first_request(composed.url, "-H", f"Authorization: Bearer {API_KEY}")
    assert len(answer["prompt_ids"][0]) > 1
    assert len(answer["completion_ids"][0]) == 8


def test_the_front_end_takes_as_many_open_files_as_the_engine_allows(
    composed: ComposeProject,
) -> None:
    (front,) = composed.containers("front-cpu")
    allowed = run("docker", "exec", front, "sh", "-c", "ulimit -Hn").strip()
    wanted = ServerConfig().max_open_requests
    num_open = wanted
    if allowed != "unlimited":
        num_open, _ = limits_within(int(allowed), max_open_requests=wanted)
    line = f"max_open_requests is {num_open} here, not {wanted}: a process may open {allowed} files"
    assert composed.compose("logs", "front-cpu").count(line) == (num_open < wanted)


def test_requests_succeed_while_one_worker_is_stopped(composed: ComposeProject) -> None:
    stopped = composed.containers("worker-cpu")[0]
    run("docker", "stop", stopped)
    composed.wait_until_ready(1)
    assert len(composed.generate([[5, 6, 7]] * 4, **GREEDY)["completion_ids"]) == 4
    # The restarted container may get another address.
    run("docker", "start", stopped)
    composed.wait_until_ready(2)


def test_a_dead_worker_is_restarted(composed: ComposeProject) -> None:
    killed = composed.containers("worker-cpu")[0]
    # Kills every process of the container except the first, which ends with its child.
    run("docker", "exec", killed, "sh", "-c", "kill -9 -1", check=False)
    wait_until(lambda: composed.num_ready() == 1, 60, composed.logs)
    assert len(composed.generate([[5, 6, 7]] * 4, **GREEDY)["completion_ids"]) == 4
    composed.wait_until_ready(2)


def test_gpu_workers_take_different_gpus(composed: ComposeProject, tmp_path: Path) -> None:
    """Runs the command of `worker` with a stand-in for nvidia-smi that lists three GPUs."""
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    command = [word.replace("$$", "$") for word in services["worker"]["command"]]
    # Instead of starting, the worker prints the GPUs it sees and holds its locks for a while.
    programs = {
        "nvidia-smi": "printf '0\\n1\\n2\\n'",
        "python": "echo $CUDA_VISIBLE_DEVICES; sleep 600",
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    tmp_path.chmod(0o755)
    volume = f"{composed.name}_pool:/pool"

    def start(*options: str) -> str:
        # With compose's label, so that leftovers() finds the container.
        label = f"com.docker.compose.project={composed.name}"
        output = run(
            "docker", "run", "--detach", "--label", label, "--volume", volume, *options,
            "--volume", f"{tmp_path}:/stand-ins:ro", "--env", "PATH=/stand-ins:/usr/bin:/bin",
            "titopool:cpu", *command,
        )  # fmt: skip
        # Warnings of the engine may stand before the id.
        container = output.split()[-1]
        started.append(container)
        wait_until(lambda: run("docker", "logs", container).strip(), 30)
        return run("docker", "logs", container).strip()

    started: list[str] = []
    try:
        assert start() == "0"
        assert "needs 3 GPUs and 2 are free" in start("--env", "TITOPOOL_TENSOR_PARALLEL_SIZE=3")
        assert start("--env", "TITOPOOL_TENSOR_PARALLEL_SIZE=2") == "1,2"
        assert "needs 1 GPUs and 0 are free" in start()
        # The GPU of a killed worker is free again.
        run("docker", "kill", started[0])
        assert start() == "0"
    finally:
        run("docker", "rm", "--force", "--volumes", *started)


def test_a_trainer_on_the_host_updates_the_weights(
    composed: ComposeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With titopool's client and with TRL's, which reaches rank 0 at the front end's address."""
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    make_model(own)
    make_model(other, seed=1)
    inspect = "{{(index .IPAM.Config 0).Gateway}} {{.Id}}"
    network = run("docker", "network", "inspect", f"{composed.name}_default", "--format", inspect)
    gateway, network_id = network.split()
    # The network bridge between host and containers.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"br-{network_id[:12]}")
    client = WeightsClient(
        composed.url, device="cpu", host="127.0.0.1", api_key=API_KEY, timeout_s=60
    )
    with pytest.raises(WeightsError, match="nothing answers"):
        client.open()
    client = WeightsClient(composed.url, device="cpu", host=gateway, api_key=API_KEY, timeout_s=60)
    client.update(tensors_of(other), policy="keep")
    client.close()
    assert_serves(composed, other, times=4)
    # TRL's client cannot send a key.
    before = f"""
import requests
send = requests.Session.send

def send_with_key(self, request, **options):
    request.headers["Authorization"] = "Bearer {API_KEY}"
    return send(self, request, **options)

requests.Session.send = send_with_key
client.group_port = {composed.group_port}
"""
    update_by_trl(composed.url, own, before=before)
    assert_serves(composed, own, times=4)
