"""Helpers for tests of weight updates: other weights, and the completions they give."""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from harness.servers import START_TIMEOUT_S, Server
from tests.kit.models import reference
from tests.kit.models.reference import TOLERANCE
from tests.kit.trainers.trainer import DEVICE, train
from titopool.client.weights_client import WeightsClient

PROMPT = [5, 6, 7, 8, 9, 10, 11]
NUM_TOKENS = 10
# Tokens that fit after `PROMPT`, for what must not end before an update has.
LONGEST = 1000


def weights_client(server: Server, **options: Any) -> WeightsClient:
    """A trainer's client on its device: NCCL with GPUs, else gloo."""
    return WeightsClient(server.url, device=DEVICE, **options)


class Generates(Protocol):
    """Any server that generates."""

    def generate(self, prompts: Any, **fields: Any) -> dict[str, Any]:
        """The response of /generate/."""


def assert_serves(server: Generates, folder: str, *, times: int = 1) -> dict[str, Any]:
    """Checks that greedy ids and log-probabilities equal transformers' for `folder`."""
    expected = reference.greedy(folder, PROMPT, NUM_TOKENS)
    rows = reference.logprobs(folder, PROMPT, expected)
    answer: dict[str, Any] = {}
    for _ in range(times):
        answer = server.generate(
            [PROMPT], temperature=0.0, max_tokens=NUM_TOKENS, generation_kwargs={"ignore_eos": True}
        )
        assert answer["completion_ids"] == [expected]
        for row, token_id, entry in zip(rows, expected, answer["logprobs"][0], strict=True):
            assert abs(float(row[token_id]) - entry[0]) < TOLERANCE
    return answer


def states(server: Server) -> list[str]:
    """Each worker's state, from /weights."""
    return [one["state"] for one in server.get("/weights").json()["workers"]]


class Generation:
    """A long request that runs during the test."""

    def __init__(self, server: Server, *, num_tokens: int, n: int = 1, num_prompts: int = 2):
        self.prompts = [PROMPT, PROMPT[::-1]][:num_prompts]
        self.answer: dict[str, Any] = {}
        self._server, self._num_tokens, self._n = server, num_tokens, n
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        options = {"ignore_eos": True, "seed": 5}
        self.answer = self._server.generate(
            self.prompts, n=self._n, max_tokens=self._num_tokens, generation_kwargs=options
        )

    def join(self) -> dict[str, Any]:
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.answer


@contextmanager
def trainer(server: Server, folder: str, stop_at: str) -> Iterator[BaseProcess]:
    """A trainer process (`tests/kit/trainers/trainer.py`) that has reached `stop_at`; killed at the end.

    It is a fork of a process that has imported torch and transformers, which takes 5 s.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.kit.trainers.trainer"])
    ours, theirs = forks.Pipe(duplex=False)
    process = forks.Process(target=train, args=(server.url, folder, stop_at, theirs), daemon=True)
    with ours:
        with theirs:
            process.start()
        try:
            assert ours.poll(START_TIMEOUT_S), f"the trainer has not {stop_at}"
            assert ours.recv() == stop_at
            yield process
        finally:
            process.kill()
            process.join()


def begun(server: Server, num_sequences: int) -> bool:
    return sum(server.metrics("sequences").values()) >= num_sequences
