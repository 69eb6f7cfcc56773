"""A grammar that hangs real vLLM's engine step: it fails alone, and costs two workers at most."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from harness.servers import START_TIMEOUT_S, Server, need_gpus, running_server, wait_until
from tests.conftest import ENGINE_OPTIONS

EXTENSION = "tests.kit.extensions.hanging_extension.HangingExtension"
# Short, as a worker with a hung engine is found by it.
PROBE_TIMEOUT_S = "4"


def body(prompts: list[list[int]], max_tokens: int, regex: str = "") -> dict[str, Any]:
    options: dict[str, Any] = (
        {"structured_outputs": {"regex": regex}} if regex else {"ignore_eos": True}
    )
    return {"prompts": prompts, "max_tokens": max_tokens, "generation_kwargs": options}


# Those that generate, those that begin just then, those that wait, and honest grammars.
INNOCENT = [
    body([[1, 2, 3]], 200),
    body([[4]], 2),
    body([[one] for one in range(1, 20)], 20),
    body([[5, 6]], 40, "[a-z ]{30,40}"),
]


def post(server: Server, sent: dict[str, Any]) -> requests.Response:
    return requests.post(f"{server.url}/generate/", json=sent, timeout=2 * START_TIMEOUT_S)


@contextmanager
def innocent_requests(server: Server) -> Iterator[list[requests.Response]]:
    """Each kind is sent again and again within the block; their answers are complete after it."""
    answers: list[requests.Response] = []
    is_over = threading.Event()

    def send_on(sent: dict[str, Any]) -> None:
        while not is_over.is_set():
            answers.append(post(server, sent))
            # The engine that starts again needs the machine too.
            is_over.wait(0.3)

    with ThreadPoolExecutor(len(INNOCENT)) as pool:
        sending = [pool.submit(send_on, one) for one in INNOCENT]
        wait_until(lambda: len(answers) >= len(INNOCENT), START_TIMEOUT_S)
        try:
            yield answers
        finally:
            is_over.set()
    for one in sending:
        one.result()


def num_losses(server: Server) -> int:
    """How many workers were lost, as both front ends say."""
    return len(re.findall(r"is lost with \d+ open jobs: the engine did not answer", server.log))


def test_a_grammar_that_hangs_after_some_tokens_fails_alone(tiny_model: str, tmp_path: Path):
    need_gpus(2)
    options = (
        *ENGINE_OPTIONS, "--num-workers", "2", "--num-front-ends", "2", "--worker-extension-cls",
        EXTENSION, "--engine-probe-timeout-s", PROBE_TIMEOUT_S,
    )  # fmt: skip
    with running_server(tiny_model, *options, log=tmp_path / "log", num_workers=2) as server:
        with innocent_requests(server) as innocent:
            num_before = len(innocent)
            hung = post(server, body([[7, 8]], 40, "[a-z ]{30,40}|hang3"))
        assert hung.status_code == 500, hung.text
        message = hung.json()["error"]["message"]
        assert message.startswith("prompts[0]: 2 workers died while they ran this prompt"), message
        wait_until(lambda: num_losses(server) >= 4, 10, lambda: server.log)
        assert num_losses(server) == 4, server.log
        assert len(innocent) > num_before
        assert [one.text for one in innocent if one.status_code != 200] == []
