"""TRL's own client updates the weights of two workers; on CPUs gloo replaces NCCL."""

import pytest

from harness.servers import Server
from tests.kit.models.weights import assert_serves, states, weights_client
from tests.kit.trainers.trainer import tensors_of
from tests.kit.trainers.trl_weights_client import run_trl_weights, update_by_trl

GENERATE = (
    "client.generate([[5, 6, 7, 8, 9, 10, 11]], temperature=0.0, max_tokens=10,"
    " generation_kwargs={'ignore_eos': True})"
)


@pytest.fixture
def server(weights_server: Server, tiny_model: str) -> Server:
    """Workers that serve the tiny model again, whatever a test before has loaded."""
    client = weights_client(weights_server, timeout_s=30)
    client.update(tensors_of(tiny_model), policy="abort")
    client.close()
    return weights_server


# Both versions send the same calls.
@pytest.mark.parametrize("version", [pytest.param("0.29.1", marks=pytest.mark.variant), "1.9.2"])
def test_an_update_ends_at_reset_prefix_cache(
    server: Server, tiny_model: str, other_model: str, version: str
):
    script = f"""
client.init_communicator(device=device)
before = {GENERATE}
client.update_model_params(module({other_model!r}))
client.reset_prefix_cache()
answer([before, {GENERATE}])
client.update_model_params(module({tiny_model!r}))
client.reset_prefix_cache()
client.close_communicator()
"""
    before, after = run_trl_weights(version, server.url, script)
    assert before["completion_ids"] != after["completion_ids"]
    answer = assert_serves(server, tiny_model, times=4)
    assert before["completion_ids"] == answer["completion_ids"]
    assert states(server) == ["closed", "closed"]


def test_an_update_ends_at_a_generation_and_outlives_its_client(
    server: Server, tiny_model: str, other_model: str
):
    script = f"""
client.init_communicator(device=device)
client.update_model_params(module({other_model!r}))
answer({GENERATE})
"""
    found = run_trl_weights("1.9.2", server.url, script)
    answer = assert_serves(server, other_model, times=4)
    assert found["completion_ids"] == answer["completion_ids"]


def test_generations_during_an_update_use_the_old_weights(
    server: Server, tiny_model: str, other_model: str
):
    """Another client generates while the tensors are sent one by one."""
    script = f"""
named = tensors({other_model!r})
client.init_communicator(device=device)
for name, weight in named[:20]:
    client.update_named_param(name, weight.data)
amid = {GENERATE}
for name, weight in named[20:]:
    client.update_named_param(name, weight.data)
client.reset_prefix_cache()
answer([amid, {GENERATE}])
"""
    old = assert_serves(server, tiny_model, times=2)["completion_ids"]
    during, after = run_trl_weights("1.9.2", server.url, script)
    assert during["completion_ids"] == old
    new = assert_serves(server, other_model, times=4)["completion_ids"]
    assert after["completion_ids"] == new


def test_an_unfinished_update_is_never_applied(server: Server, tiny_model: str, other_model: str):
    """A trainer that dies between two layers."""
    old = assert_serves(server, tiny_model, times=2)["completion_ids"]
    script = f"""
import time
client.init_communicator(device=device)
for name, weight in tensors({other_model!r}):
    if "layers.0." in name:
        client.update_named_param(name, weight.data)
time.sleep(3)
answer({GENERATE})
sys.stdout.flush()
os._exit(0)
"""
    during = run_trl_weights("1.9.2", server.url, script)
    assert during["completion_ids"] == old
    assert_serves(server, tiny_model, times=4)
    assert server.get("/ready").json()["num_ready"] == 2
    update_by_trl(server.url, other_model)
    assert_serves(server, other_model, times=4)


def test_a_wrong_tensor_raises_in_the_client_and_the_next_client_works(
    server: Server, tiny_model: str, other_model: str
):
    script = f"""
client.init_communicator(device=device)
named = tensors({other_model!r})
errors = []
for name, weight in [named[0], ("model.nothing.weight", named[1][1])]:
    try:
        client.update_named_param(name, weight.data)
    except Exception as error:
        errors.append(str(error))
try:
    client.update_named_param(*named[2])
except Exception as error:
    errors.append(str(error))
client.communicator = None
answer(errors)
"""
    unknown, closed = run_trl_weights("1.9.2", server.url, script)
    assert "400" in unknown
    assert "model.nothing.weight: the model has no such tensor" in unknown
    assert "409" in closed
    assert "expected a call of init_communicator first" in closed
    assert_serves(server, tiny_model, times=2)
    update_by_trl(server.url, other_model)
    assert_serves(server, other_model, times=4)


def test_the_next_client_replaces_one_that_died_during_an_update(
    server: Server, tiny_model: str, other_model: str
):
    script = f"""
client.init_communicator(device=device)
for name, weight in tensors({other_model!r})[:30]:
    client.update_named_param(name, weight.data)
answer(None)
import os
sys.stdout.flush()
os._exit(0)
"""
    run_trl_weights("1.9.2", server.url, script)
    assert states(server) == ["receiving", "receiving"]
    assert_serves(server, tiny_model, times=2)
    update_by_trl(server.url, other_model)
    assert_serves(server, other_model, times=4)


def test_a_partly_sent_layer_is_not_loaded(server: Server, tiny_model: str, other_model: str):
    script = f"""
client.init_communicator(device=device)
name = "model.layers.0.self_attn.q_proj.weight"
client.update_named_param(name, dict(tensors({other_model!r}))[name].data)
try:
    client.reset_prefix_cache()
except Exception as error:
    answer(str(error))
"""
    text = run_trl_weights("1.9.2", server.url, script)
    assert "send these too: model.layers.0.self_attn.k_proj.weight" in text
    assert_serves(server, tiny_model, times=2)
