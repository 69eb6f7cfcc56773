"""Updates through vLLM's routes with two real workers: exact at both, or the old weights at both."""

from typing import Any

import psutil
import pytest

from harness.servers import START_TIMEOUT_S, Server, phases, wait_until, worker_pids
from tests.kit.models.weights import assert_serves, states
from tests.kit.trainers.rl_trainer import InThread, StockTrainer, stock_trainer


@pytest.fixture(autouse=True)
def own_weights(weights_server: Server, own: Any) -> None:
    """Every test begins with the model's own weights."""
    with stock_trainer(weights_server) as trainer:
        trainer.update(own)


@pytest.mark.parametrize("init_info", [{}, {"packed": True, "packed_buffer_size_bytes": 100_000}])
def test_both_workers_are_exact(
    weights_server: Server, own: Any, other: Any, tiny_model: str, other_model: str,
    init_info: dict[str, Any],
):  # fmt: skip
    with stock_trainer(weights_server, **init_info) as trainer:
        for tensors, folder in ((other, other_model), (own, tiny_model)):
            answer = trainer.update(tensors[:7], tensors[7:])
            assert answer["lost"] == []
            assert_serves(weights_server, folder, times=4)
    versions = [one["weight_version"] for one in weights_server.get("/weights").json()["workers"]]
    assert versions == [answer["version"]] * 2


def test_a_worker_killed_in_a_list_is_named_and_the_next_update_reaches_both(
    weights_server: Server, other: Any, tiny_model: str, other_model: str
):
    server = weights_server
    with stock_trainer(server) as trainer:
        trainer.call("/start_weight_update")
        call = sending(trainer, other)
        for tensor in (one for _, one in other[:3]):
            trainer.group.broadcast(tensor, check_workers=lambda: None)()
        wait_until(lambda: awaited(server) == [other[3][0]] * 2, 10, lambda: str(awaited(server)))
        pid = worker_pids(server)[-1]
        psutil.Process(pid).kill()
        answer = call.answer()
        # Long before the deadline of the step, although the other worker still waits.
        assert answer.elapsed.total_seconds() < 10
        assert answer.status_code == 409, answer.text
        assert "worker-1 is lost" in answer.json()["error"]["message"]
        wait_until(lambda: states(server)[0] == "closed", 20)
        assert_serves(server, tiny_model, times=2)
    # It has lost the weights of the update before.
    wait_until(lambda: "waiting_for_weights" in phases(server), START_TIMEOUT_S)
    assert_serves(server, tiny_model, times=2)
    with stock_trainer(server) as trainer:
        assert trainer.update(other)["lost"] == []
    wait_until(lambda: set(phases(server)) == {"ready"}, 5)
    assert_serves(server, other_model, times=4)


def sending(trainer: StockTrainer, tensors: list[tuple[str, Any]]) -> InThread:
    """The call that announces `tensors`, of which none is sent."""
    info = {
        "names": [name for name, _ in tensors],
        "dtype_names": ["float32"] * len(tensors),
        "shapes": [list(one.shape) for _, one in tensors],
    }
    return InThread(trainer.server, "/update_weights", {"update_info": info})


def awaited(server: Server) -> list[str | None]:
    """The tensor that each worker waits for."""
    found = [one["awaited"] for one in server.get("/weights").json()["workers"]]
    return [one and one["tensor"] for one in found]
