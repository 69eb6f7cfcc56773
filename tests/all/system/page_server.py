"""Servers for the page: stub workers, front ends and a steady load."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

from harness.servers import REPOSITORY, Server, environment, running_server

# A file of safetensors without a tensor: stubs do not read it.
EMPTY_WEIGHTS = b"\x02\0\0\0\0\0\0\0{}"


class StubWorkers:
    """Stub workers at sockets in `folder`, and a folder of weights that they load."""

    def __init__(self, folder: Path, *arguments: str, number: int = 2):
        self.root = folder / "weights"
        (self.root / "step").mkdir(parents=True)
        (self.root / "step" / "model.safetensors").write_bytes(EMPTY_WEIGHTS)
        self.endpoints = [f"ipc://{folder}/worker-{index}" for index in range(number)]
        self._arguments = arguments
        self.processes = [self._start(index) for index in range(number)]

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        words = ["--endpoint", self.endpoints[index], "--worker-id", str(index), *self._arguments]
        return subprocess.Popen(
            [sys.executable, "-m", "harness.stub_worker", *words],
            env=environment(TITOPOOL_WEIGHTS_ROOT=str(self.root)), cwd=REPOSITORY,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def restart(self, index: int) -> None:
        """Kills a worker, and starts it again."""
        self.processes[index].kill()
        self.processes[index].wait()
        Path(self.endpoints[index].removeprefix("ipc://")).unlink(missing_ok=True)
        self.processes[index] = self._start(index)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    @contextmanager
    def server(self, log: Path, *arguments: str, **variables: str) -> Iterator[Server]:
        """Front ends before these workers."""
        with running_server(
            "--endpoints", ",".join(self.endpoints), "--weights-root", str(self.root), *arguments,
            log=log, num_workers=len(self.endpoints), **variables,
        ) as server:  # fmt: skip
            yield server


def update_weights(server: Server, folder: Path, version: int) -> None:
    """All workers serve the weights of a folder."""
    body = {"path": str(folder), "version": version, "policy": "keep"}
    answer = server.post("/update_weights", body)
    assert answer.status_code == 200, answer.text


@contextmanager
def load(server: Server, *, num_clients: int, share_bad: float = 0.0) -> Iterator[None]:
    """Clients that send prompts of various lengths again and again; some are refused."""
    ended = threading.Event()

    def run(seed: int) -> None:
        choose = random.Random(seed)
        session = requests.Session()
        # Prompts of one client have a common beginning.
        common = [choose.randrange(1, 1000) for _ in range(48)]
        while not ended.is_set():
            length = choose.randrange(8, 64)
            ids = common + [choose.randrange(1, 1000) for _ in range(length)]
            body = {"prompts": [ids] * choose.randrange(1, 4), "max_tokens": length}
            if choose.random() < share_bad:
                body = choose.choice(
                    [{"prompts": [[10**9]]}, {"prompts": [[1]], "max_token": 1}, {"prompts": [[1]], "lora_name": "none"}]
                )  # fmt: skip
            try:
                session.post(server.url + "/generate/", json=body, timeout=60)
            except requests.RequestException:
                time.sleep(0.5)
            ended.wait(choose.random() * 0.3 * (1 + (time.time() // 15) % 3))

    clients = [
        threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(num_clients)
    ]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        ended.set()
        for client in clients:
            client.join(70)
