"""Weight updates of a worker with two processes: each loads its shard of every tensor."""

from collections.abc import Iterator

import pytest

from tests.conftest import ENGINE_OPTIONS
from tests.servers import Server, need_gpus, running_server
from tests.trainer import tensors_of
from tests.trl_weights_client import update_by_trl
from tests.weights import assert_serves, weights_client


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    need_gpus(3)
    log = tmp_path_factory.mktemp("tp-server") / "log"
    options = (
        "--num-workers", "1", "--num-front-ends", "1", "--tensor-parallel-size", "2",
        "--weight-update-timeout-s", "120", *ENGINE_OPTIONS,
    )  # fmt: skip
    with running_server(tiny_model, *options, log=log) as running:
        yield running


def test_both_protocols_update_all_processes_of_a_worker(
    server: Server, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
):
    from titopool.demo_model import make_model

    other_model = str(tmp_path_factory.mktemp("other-tp"))
    make_model(other_model, seed=1)
    assert server.get("/get_world_size").json() == {"world_size": 2}
    client = weights_client(server, timeout_s=120)
    client.update(tensors_of(other_model), policy="keep", with_checksum=True)
    assert_serves(server, other_model)
    client.close()
    update_by_trl(server.url, tiny_model)
    answer = assert_serves(server, tiny_model)
    assert answer["weight_versions"] == [[[2, 0]]]
