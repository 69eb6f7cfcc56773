"""A worker with two engine processes: completions, weight updates of each one's shards, its end."""

import psutil

from tests.conftest import ENGINE_OPTIONS
from tests.servers import alive, need_gpus, wait_until
from tests.trainer import tensors_of
from tests.trl_weights_client import update_by_trl
from tests.weights import assert_serves, weights_client


def test_both_protocols_update_all_processes_of_a_worker(
    start_server, tiny_model: str, other_model: str
):
    need_gpus(3)
    server = start_server(
        tiny_model, "--num-workers", "1", "--num-front-ends", "1", "--tensor-parallel-size", "2",
        "--weight-update-timeout-s", "120", *ENGINE_OPTIONS,
    )  # fmt: skip
    server.wait_until_ready()
    assert server.get("/get_world_size/").json() == {"world_size": 2}
    assert_serves(server, tiny_model)
    client = weights_client(server, timeout_s=120)
    client.update(tensors_of(other_model), policy="keep", with_checksum=True)
    assert_serves(server, other_model)
    client.close()
    update_by_trl(server.url, tiny_model)
    answer = assert_serves(server, tiny_model)
    assert answer["weight_versions"] == [[[2, 0]]]
    # No process outlives the master.
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    wait_until(lambda: not alive(children), 10, lambda: str(alive(children)))
