"""The server that receives fuzzed bodies, with real vLLM."""

import concurrent.futures
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.servers import Server, running_server, wait_until
from tests.all.fuzz.exploring import ServerGone
from tests.all.fuzz.hints import MODEL, ROOT
from tests.all.fuzz.oracle import Processes
from tests.all.fuzz.wire_http import Answer, Sent, ask
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models.adapters import make_adapter

NUM_WORKERS = 2
PROMPT = [5, 6, 7, 8, 9, 10, 11]
# For the log-probability of one token; batches differ between runs.
TOLERANCE = 1e-3
# Number of recent requests to print when the server has died.
NUM_SHOWN = 5


class Fuzzed:
    """A server, the last requests sent to it, and what must stay unchanged."""

    def __init__(self, server: Server, *, model: str, root: Path):
        self.server = server
        self.port = int(server.url.rpartition(":")[2])
        self._replacements = {MODEL.encode(): model.encode(), ROOT.encode(): str(root).encode()}
        self._last: list[str] = []
        self.num_sent = 0
        self.statuses: dict[int, int] = {}
        self._warm_up()
        self._greedy = self.greedy()
        self._processes = Processes(server.process.pid)

    def _warm_up(self) -> None:
        """Sends requests to all workers and front ends, so that each has loaded its tokenizer."""
        body = {"prompts": ["Hello"], "max_tokens": 1}
        # The first texts may wait for a tokenizer for longer than a request may.
        wait_until(lambda: all(self.server.post("/generate/", body).ok for _ in range(8)), 60)
        for _ in range(2):
            with concurrent.futures.ThreadPoolExecutor(32) as pool:
                list(pool.map(lambda _: self.server.generate(["Hello"], max_tokens=1), range(32)))
        self.greedy()

    def ask(self, sent: Sent) -> Answer | None:
        """The response to a request; None if the connection ended without one.

        Raises:
            ServerGone: no response in time, or a process has ended.
        """
        body = sent.body
        for name, value in self._replacements.items():
            body = body.replace(name, value)
        self._last = [*self._last[1 - NUM_SHOWN :], repr(sent)]
        self.num_sent += 1
        try:
            answer = ask(self.port, sent._replace(body=body))
        except (TimeoutError, ConnectionRefusedError) as error:
            raise ServerGone(self._diagnosis(repr(error))) from error
        self._check_processes()
        if answer is not None:
            self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
        return answer

    def _check_processes(self) -> None:
        try:
            self._processes.check()
        except ServerGone as gone:
            raise ServerGone(self._diagnosis(str(gone))) from None

    def _diagnosis(self, what: str) -> str:
        last = "\n".join(f"@example({sent})" for sent in self._last)
        return (
            f"{what}\nthe last requests, the very last one last:\n{last}\n{self.server.log[-3000:]}"
        )

    def greedy(self) -> list[dict[str, Any]]:
        """Greedy completions of enough prompts to reach all workers."""
        fields = {"temperature": 0.0, "max_tokens": 8, "generation_kwargs": {"ignore_eos": True}}
        answer = self.server.generate([PROMPT] * (4 * NUM_WORKERS), **fields)
        return [
            {"ids": ids, "logprobs": [entries[0] for entries in rows]}
            for ids, rows in zip(answer["completion_ids"], answer["logprobs"], strict=True)
        ]

    def check(self) -> None:
        """The server is unchanged: same processes, ready workers, same completions."""
        self._check_processes()
        for _ in range(2):
            ready = self.server.get("/ready").json()
            assert ready["num_ready"] == NUM_WORKERS, ready
            paused = self.server.get("/is_paused").json()
            assert not paused["is_paused"], self._diagnosis(str(paused))
            weights = self.server.get("/weights").json()["workers"]
            assert {one["state"] for one in weights} == {"closed"}, weights
            for current, before in zip(self.greedy(), self._greedy, strict=True):
                assert current["ids"] == before["ids"]
                assert current["logprobs"] == pytest.approx(before["logprobs"], abs=TOLERANCE)


@contextmanager
def fuzzed_server(model: str, root: Path, log: Path) -> Iterator[Fuzzed]:
    """Two vLLM workers behind two gunicorn processes, with adapters, tools and `root` for weights."""
    make_adapter(model, root, "adapter", 1)
    shutil.copytree(model, root / "weights")
    (root / "file").write_text("no folder")
    (root / "broken").mkdir()
    (root / "broken" / "model.safetensors").write_bytes(b"\xff" * 20)
    (root / "broken" / "adapter_model.safetensors").write_bytes(b"\xff" * 20)
    (root / "broken" / "adapter_config.json").write_text(json.dumps({"r": 4, "peft_type": []}))
    os.symlink(root / "loop", root / "loop")
    options = (
        "--num-workers", str(NUM_WORKERS), "--num-front-ends", "2", "--weights-root", str(root),
        "--tool-call-parser", "hermes", "--max-body-bytes", str(2**20),
        "--max-completions-per-request", "8", "--weight-update-timeout-s", "3",
        # A large `min_weight_version` waits so long, and is a 409 then; 192 tokens of several prompts take
        # a busy machine longer than 8 s.
        "--request-timeout-s", "20",
        "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-cpu-loras", "3",
    )  # fmt: skip
    engine_options = (*ENGINE_OPTIONS, "--max-model-len", "192")
    with running_server(
        model, *options, *engine_options, log=log, num_workers=NUM_WORKERS
    ) as server:
        yield Fuzzed(server, model=model, root=root)
