"""The tests of tests/engine/weights/test_weights.py about transfers, and an update within a turn of a
session, with one worker."""

# `client` is imported, and an argument of tests.
# ruff: noqa: F811

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from harness.servers import Server, wait_until
from tests.kit.models import reference
from tests.kit.models.weights import TOLERANCE, weights_client
from tests.kit.trainers.trainer import tensors_of
from tests.kit.trainers.weight_transfers import (  # noqa: F401
    client,
    own_weights,
    test_a_restarted_worker_serves_only_the_pool_s_weights,
    test_keep_continues_with_new_weights_and_reports_the_switch,
    test_new_weights_are_exact_and_old_ones_can_be_restored,
    test_q_k_and_v_may_be_sent_fused,
)
from titopool.client.weights_client import WeightsClient

# Tokens: an update takes less time.
LONG = 600


@pytest.fixture(scope="module", autouse=True)
def own_weights_at_the_end(single_server: Server, tiny_model: str) -> Iterator[None]:
    """For the other tests of this server."""
    yield
    last = weights_client(single_server, timeout_s=15.0)
    last.update(tensors_of(tiny_model), policy="abort", version=0)
    last.close()


@pytest.fixture
def server(single_server: Server) -> Server:
    return single_server


class StreamedTurn:
    """A streamed chat that is read while the test goes on."""

    def __init__(self, url: str, body: dict[str, Any]):
        self.prompt, self.ids, self.texts = list[int](), list[int](), list[str]()
        self._url, self._body = url, body | {"stream": True, "return_token_ids": True}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with requests.post(self._url, json=self._body, stream=True, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        self.prompt = chunk.get("prompt_token_ids") or self.prompt
        for choice in chunk["choices"]:
            self.ids += choice.get("token_ids") or []
            self.texts.append(choice["delta"].get("content") or "")

    def join(self) -> dict[str, str]:
        """The message."""
        self._thread.join(120)
        assert not self._thread.is_alive()
        return {"role": "assistant", "content": "".join(self.texts)}


def test_a_turn_of_a_session_goes_on_with_the_new_weights_and_its_sample_has_both_versions(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    client.open()
    made = server.post("/sessions", {}).json()
    url = f"{server.url}{made['path']}/chat/completions"
    messages: list[Any] = [{"role": "user", "content": "Count."}]
    turns = list[tuple[list[int], list[int]]]()

    def play(num_tokens: int, seed: int) -> StreamedTurn:
        options = {"max_tokens": num_tokens, "ignore_eos": True, "seed": seed, "logprobs": True}
        return StreamedTurn(url, {"messages": messages, **options})

    def end(turn: StreamedTurn, num_tokens: int) -> None:
        messages.extend([turn.join(), {"role": "user", "content": "Go on."}])
        assert len(turn.ids) == num_tokens
        known = [*turns[-1][0], *turns[-1][1]] if turns else []
        assert turn.prompt[: len(known)] == known
        turns.append((turn.prompt, turn.ids))

    end(play(5, 0), 5)
    running = play(LONG, 1)
    wait_until(lambda: len(running.ids) > 20, 30)
    client.update(tensors_of(other_model), policy="keep", version=5)
    end(running, LONG)
    end(play(5, 2), 5)

    session = f"/sessions/{made['session_id']}"
    shown = server.get(session).json()["turns"]
    assert [one["reason"] for one in shown] == ["first", "", ""]
    _, second, third = turns
    ((old, begin), (new, cut)) = shown[1]["weight_versions"]
    assert (old, begin, new) == (0, 0, 5)
    assert 20 < cut < LONG
    (sample,) = server.get(f"{session}/samples").json()["samples"]
    assert sample["ids"] == third[0] + third[1]
    starts = [len(prompt) for prompt, _ in turns]
    switch = starts[1] + cut
    assert sample["weight_versions"] == [
        [0, starts[0]], [0, starts[1]], [5, switch], [5, starts[2]]
    ]  # fmt: skip
    # The log-probability of each token is that of the weights which sampled it.
    values = sample["logprobs"][starts[1] : starts[1] + LONG]
    before = reference.logprobs(tiny_model, *second)
    after = reference.logprobs(other_model, *second)
    for index, (token_id, value) in enumerate(zip(second[1], values, strict=True)):
        rows = before if index < cut else after
        assert abs(float(rows[index][token_id]) - value) < TOLERANCE, index
