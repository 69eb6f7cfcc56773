"""Updates that fit nowhere and are loaded as they come: exact, or the worker restarts."""

from collections.abc import Iterator
from typing import Any

import pytest

from harness.servers import (
    START_TIMEOUT_S,
    Server,
    need_gpus,
    phases,
    running_server,
    wait_until,
    worker_pids,
)
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models.weights import (
    LONGEST,
    Generation,
    assert_serves,
    begun,
    states,
    trainer,
    weights_client,
)
from tests.kit.trainers.rl_trainer import stock_trainer
from tests.kit.trainers.trainer import CHUNK_BYTES, tensors_of
from titopool.client.weights_client import WeightsClient, WeightsError

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    need_gpus(2)
    options = (
        *ENGINE_OPTIONS, "--max-model-len", "1024", "--num-workers", "1", "--num-front-ends", "1",
        "--weight-staging", "in_place", "--weight-update-timeout-s", str(TIMEOUT_S),
        "--worker-extension-cls", "tests.kit.extensions.crowded_extension.CrowdedExtension",
    )  # fmt: skip
    log = tmp_path_factory.mktemp("in-place") / "log"
    with running_server(tiny_model, *options, log=log) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[WeightsClient]:
    made = weights_client(server, timeout_s=60, chunk_bytes=CHUNK_BYTES)
    yield made
    made.close()


def status(server: Server) -> dict[str, Any]:
    """The worker's entry in `GET /weights`."""
    (worker,) = server.get("/weights").json()["workers"]
    return dict(worker)


def kill_while_the_model_is_written(server: Server, folder: str) -> None:
    """Returns when the worker has restarted."""
    (pid,) = worker_pids(server)
    with trainer(server, folder, "sending"):
        wait_until(lambda: status(server)["is_written_in_place"], 20)
    wait_until(lambda: worker_pids(server) not in ([], [pid]), 20)
    is_loaded = lambda: phases(server)[0] in ("ready", "waiting_for_weights")  # noqa: E731
    wait_until(is_loaded, START_TIMEOUT_S)


def test_a_trainer_that_dies_before_its_first_byte_changes_nothing(
    server: Server, tiny_model: str, other_model: str
):
    pids = worker_pids(server)
    with trainer(server, other_model, "begun"):
        wait_until(lambda: states(server) == ["receiving"], 20)
    wait_until(lambda: states(server) == ["closed"], 20)
    assert_serves(server, tiny_model)
    assert worker_pids(server) == pids


def test_a_trainer_that_dies_half_way_costs_the_worker_its_weights(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    # The pool has the weights with which every worker starts.
    kill_while_the_model_is_written(server, other_model)
    assert phases(server) == ["ready"]
    assert_serves(server, tiny_model)
    client.update(tensors_of(other_model), policy="keep")
    client.close()
    # Now it has weights that no worker can load again.
    kill_while_the_model_is_written(server, tiny_model)
    assert phases(server) == ["waiting_for_weights"]
    assert server.post("/generate/", {"prompts": [[1, 2]]}).status_code == 503
    client.update(tensors_of(other_model), policy="keep")
    assert_serves(server, other_model)


def test_an_update_in_place_is_exact(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    client.open()
    generation = Generation(server, num_tokens=LONGEST)
    wait_until(lambda: begun(server, 2), 20)
    result = client.update(tensors_of(other_model), policy="keep", version=50)
    assert (result["staging"], result["loaded"]) == ("in_place", len(tensors_of(other_model)))
    spans = generation.join()["weight_versions"]
    assert [[version for version, _ in one][-1] for one in spans] == [50, 50]
    assert_serves(server, other_model, times=2)
    # Whole layers of the model, too.
    half = [one for one in tensors_of(tiny_model) if ".layers.0." in one[0]]
    client.update(half, policy="keep", partial=True)
    client.update(tensors_of(tiny_model), policy="drain")
    assert_serves(server, tiny_model, times=2)
    assert status(server)["last_staging"] == "in_place"
    assert status(server)["last_paused_s"] > 0
    # A heartbeat brings the metrics.
    lines = (
        'weight_updates_total{outcome="applied",staging="in_place",worker="0"} ',
        'weight_update_seconds{staging="in_place",worker="0"} ',
        'weight_paused_seconds{staging="in_place",worker="0"} ',
    )
    wait_until(lambda: all(one in server.get("/metrics").text for one in lines), 10)
    assert "weight_staging=in_place: an update that fits neither" in server.log


def test_one_list_of_vllm_s_routes_goes_in_place(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    client.update(tensors_of(tiny_model), policy="keep")
    client.close()
    packed = {"packed": True, "packed_buffer_size_bytes": CHUNK_BYTES}
    other = tensors_of(other_model)
    with stock_trainer(server, **packed) as stock:
        assert stock.update(other)["staging"] == "in_place"
        assert_serves(server, other_model)
        stock.call("/start_weight_update")
        answer = stock.send(other[:-1], num_sent=0)
        assert answer.status_code == 400
        assert "a list without all tensors of the model cannot go in place" in answer.text
    assert_serves(server, other_model)


def test_a_checksum_is_refused_at_begin_and_keeps_the_weights(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    client.update(tensors_of(tiny_model), policy="keep")
    pids = worker_pids(server)
    with pytest.raises(WeightsError, match="a checksum cannot go in place") as caught:
        client.update(tensors_of(other_model), policy="keep", with_checksum=True)
    assert caught.value.status == 400
    assert_serves(server, tiny_model)
    assert worker_pids(server) == pids
