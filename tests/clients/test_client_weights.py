"""`Client.weights`: new weights by the client, under other names, and after failures."""

from typing import Any

import pytest

from harness.servers import Server
from tests.kit.trainers.trainer import DEVICE
from titopool import Client
from titopool.client.weights.sources import Source
from titopool.client.weights_client import WeightsError

Tensors = list[tuple[str, Any]]
GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


def sampled(client: Client) -> tuple[list[int], int]:
    """Ids that the weights give, and their version."""
    ((done,),) = (one.completions for one in client.generate([42, 1393, 14], **GREEDY))
    return done.ids.tolist(), done.weight_versions[-1][0]


def pause_and_fail(client: Client) -> None:
    with client.weights(device=DEVICE) as one:
        one.open()
        one.pause("keep", lease_s=600)
        raise RuntimeError("mine")


def test_weights_are_sent_under_other_names(weights_server: Server, own: Tensors, other: Tensors):
    with Client(weights_server.url, timeout_s=120) as client:
        before, version = sampled(client)
        policy_names = [(f"policy.{name}", tensor) for name, tensor in other]
        with client.weights(device=DEVICE, names=lambda name: name.removeprefix("policy.")) as one:
            assert one.update(iter(policy_names), policy="keep", version=version + 5)["loaded"]
            assert sampled(client) == (sampled(client)[0], version + 5)
            assert sampled(client)[0] != before
        with client.weights(device=DEVICE) as one:
            one.update(dict(own), policy="keep")
        assert sampled(client) == (before, version + 6)


def test_a_failure_in_the_block_leaves_the_server_usable(weights_server: Server, own: Tensors):
    with Client(weights_server.url, timeout_s=120) as client:
        before, version = sampled(client)
        with pytest.raises(RuntimeError, match="mine"):
            pause_and_fail(client)
        assert sampled(client) == (before, version)
        with client.weights(device=DEVICE) as one:
            with pytest.raises(WeightsError, match=r"missing|expected"):
                one.update(own[:2], policy="keep")
            assert one.update(own, policy="keep")["version"] == version + 1


def test_names_are_mapped_by_a_dict_or_a_function():
    torch = pytest.importorskip("torch")
    tensors = [("a", torch.zeros(1)), ("b", torch.zeros(2))]
    assert [one.name for one in Source(tensors, names={"a": "x"}).infos] == ["x", "b"]
    metadata = [("a", "float32", [1]), ("b", "float32", [2])]
    found = Source(iter(tensors), metadata, lambda name: f"m.{name}")
    assert [one.name for one in found.infos] == ["m.a", "m.b"]
    for info in found.infos:
        with found.next_tensor(info):
            pass
    found.check_end()
    with pytest.raises(WeightsError, match="expected a text for a, got None"):
        Source(tensors, names=lambda name: None)
