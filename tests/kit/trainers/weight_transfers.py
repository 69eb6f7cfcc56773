"""Tests of weights that a trainer sends, for a server with any number of workers."""

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from harness.servers import START_TIMEOUT_S, Server, phases, wait_until, worker_pids
from tests.kit.models.weights import (
    LONGEST,
    TOLERANCE,
    Generation,
    assert_serves,
    begun,
    weights_client,
)
from tests.kit.trainers.trainer import CHUNK_BYTES, tensors_of
from titopool.client.weights_client import WeightsClient, WeightsError

TIMEOUT_S = 15.0
LAYER = "model.layers.1.self_attn."


@pytest.fixture
def client(server: Server) -> Iterator[WeightsClient]:
    """A client whose group is closed at the end."""
    made = weights_client(server, timeout_s=TIMEOUT_S, chunk_bytes=CHUNK_BYTES)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def own_weights(server: Server, tiny_model: str) -> None:
    """Every test begins with the initial weights, as an update of version 0."""
    fresh = weights_client(server, timeout_s=TIMEOUT_S)
    fresh.update(tensors_of(tiny_model), policy="abort", version=0)
    fresh.close()


def refused(client: WeightsClient, tensors: list[tuple[str, Any]], **options: Any) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        client.update(tensors, policy="keep", **options)
    return caught.value


def test_new_weights_are_exact_and_old_ones_can_be_restored(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    assert_serves(server, tiny_model, times=3)
    result = client.update(tensors_of(other_model), policy="keep", version=7, with_checksum=True)
    assert result["version"] == 7
    assert result["missing"] == result["ignored"] == []
    assert result["loaded"] == len(tensors_of(other_model))
    assert len(result["checksum"]) == 16
    answer = assert_serves(server, other_model, times=3)
    assert answer["weight_versions"] == [[[7, 0]]]
    # The same prompt: cached keys and values of the old weights would show.
    assert client.update(tensors_of(tiny_model), policy="drain")["version"] == 8
    assert_serves(server, tiny_model, times=3)
    ready = server.get("/ready").json()["workers"]
    assert [one["weight_version"] for one in ready] == [8] * server.num_workers


def test_q_k_and_v_may_be_sent_fused(server: Server, client: WeightsClient, other_model: str):
    tensors = dict(tensors_of(other_model))
    fused = torch.cat([tensors.pop(f"{LAYER}{part}_proj.weight") for part in "qkv"])
    tensors[f"{LAYER}qkv_proj.weight"] = fused
    client.update(tensors.items(), policy="keep")
    assert_serves(server, other_model)


def test_keep_continues_with_new_weights_and_reports_the_switch(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    from tests.kit.models import reference

    client.open()
    generation = Generation(server, num_tokens=LONGEST)
    wait_until(lambda: begun(server, 2), 20)
    client.update(tensors_of(other_model), policy="keep", version=5)
    answer = generation.join()
    for prompt, ids, logprobs, spans in zip(
        generation.prompts, answer["completion_ids"], answer["logprobs"],
        answer["weight_versions"], strict=True,
    ):  # fmt: skip
        assert len(ids) == LONGEST
        (old, begin), (new, cut) = spans
        assert (old, begin, new) == (0, 0, 5)
        assert 0 < cut < LONGEST
        # Each token has the log-probability that its own weights give, up to and after the switch.
        before = reference.logprobs(tiny_model, prompt, ids)
        after = reference.logprobs(other_model, prompt, ids)
        for index, token_id in enumerate(ids):
            rows = before if index < cut else after
            assert abs(float(rows[index][token_id]) - logprobs[index][0]) < TOLERANCE, index


def test_a_restarted_worker_serves_only_the_pool_s_weights(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    client.update(tensors_of(other_model), policy="keep", version=4)
    psutil.Process(worker_pids(server)[-1]).kill()
    wait_until(lambda: "waiting_for_weights" in phases(server), START_TIMEOUT_S)
    if server.num_workers == 2:
        assert_serves(server, other_model, times=4)
    else:
        assert server.get("/health").status_code == 503
    # The restarted worker cannot use a partial update.
    error = refused(client, tensors_of(other_model)[:1], partial=True)
    assert error.status == 409
    # The group has lost a member: the client forms a new one.
    client.update(tensors_of(tiny_model), policy="keep", version=6)
    # A front end that did not lead the commit learns it with each worker's next heartbeat.
    wait_until(lambda: set(phases(server)) == {"ready"}, 5)
    assert_serves(server, tiny_model, times=4)
