"""Updates through vLLM's routes with a real engine: exact weights, or the old ones."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packaging.version import Version

from harness.servers import Server, wait_until
from tests.kit.models.weights import assert_serves, states
from tests.kit.trainers.rl_trainer import TIMEOUT_S, InThread, StockTrainer, stock_trainer
from tests.kit.trainers.trainer import DEVICE
from titopool.client.weights.trainer_group import TrainerGroup
from workers.vllm_internals import installed_version

LAYER = "model.layers.0.self_attn."


@pytest.fixture(autouse=True)
def own_weights(single_server: Server, own: Any, tiny_model: str) -> Iterator[None]:
    """The model's own weights serve before and afterwards; another module's tests may end with
    others."""

    def load_own() -> None:
        with stock_trainer(single_server) as trainer:
            trainer.update(own)
        assert_serves(single_server, tiny_model)

    load_own()
    yield
    load_own()


def split(tensors: list[Any], size: int) -> list[list[Any]]:
    return [tensors[begin : begin + size] for begin in range(0, len(tensors), size)]


def checksums(trainer: StockTrainer) -> dict[str, str] | None:
    """vLLM's digests of the parameters; None with vLLM before 0.31, which has none."""
    answer = trainer.server.post("/weight_checker", {"action": "checksum"})
    if Version(installed_version()) < Version("0.31"):
        assert answer.status_code == 400
        assert "expected vLLM 0.31 or later" in answer.json()["error"]["message"]
        return None
    assert answer.status_code == 200, answer.text
    result: dict[str, str] = answer.json()["checksums"]
    return result


PACKED = {"packed": True, "packed_buffer_size_bytes": 100_000}


@pytest.mark.parametrize(
    "size, init_info", [(1000, {}), (5, {}), (1, {}), (1000, PACKED), (7, PACKED)]
)
def test_an_update_is_exact_in_any_number_of_lists(
    single_server: Server, own: Any, other: Any, tiny_model: str, other_model: str, size: int,
    init_info: dict[str, Any],
):  # fmt: skip
    server = single_server
    with stock_trainer(server, **init_info) as trainer:
        before = checksums(trainer)
        first = trainer.update(*split(other, size), body={"weight_version": "other"})
        assert_serves(server, other_model)
        assert server.get("/weight_info").json() == {"weight_version": "other"}
        assert checksums(trainer) != before or before is None
        assert trainer.update(*split(own, size))["version"] == first["version"] + 1
        assert_serves(server, tiny_model)
        if before is not None:
            same = trainer.call("/weight_checker", {"action": "compare", "baseline": before})
            assert same == {"match": True, "mismatches": []}


def test_parts_of_a_layer_are_applied_when_it_is_whole(
    single_server: Server, own: Any, other: Any, tiny_model: str, other_model: str
):
    parts = {name.removeprefix(LAYER): (name, one) for name, one in other if name.startswith(LAYER)}
    fused = [parts.pop(f"{part}_proj.weight") for part in "qkv"]
    rest = [(name, one) for name, one in other if not name.startswith(LAYER)]
    with stock_trainer(single_server) as trainer:
        # As TRL's update_named_param: an update for each tensor.
        for part, waits_for in ((fused[0], ["k_proj", "v_proj"]), (fused[1], ["v_proj"])):
            found = trainer.update([part])["waits_for"]
            assert [name in found for name in ("q_proj", "k_proj", "v_proj")] == [
                name in waits_for for name in ("q_proj", "k_proj", "v_proj")
            ]
            assert_serves(single_server, tiny_model)
        trainer.update([fused[2]])
        trainer.update(*[[one] for one in (*parts.values(), *rest)])
        assert_serves(single_server, other_model)
        assert trainer.call("/reset_prefix_cache")["success"] is True
        trainer.update([fused[0]])
        answer = single_server.post("/reset_prefix_cache", None)
        assert answer.status_code == 400
        assert "send these too" in answer.json()["error"]["message"]
        assert_serves(single_server, other_model)


def test_a_list_that_does_not_fit_is_refused_before_it_is_received(
    single_server: Server, other: Any, tiny_model: str, other_model: str
):
    wrong = {
        "name": [("model.nothing", other[0][1]), *other[1:]],
        "shape": [(other[0][0], other[0][1][:-1]), *other[1:]],
        "dtype": [(other[0][0], other[0][1].int()), *other[1:]],
    }
    for tensors in wrong.values():
        with stock_trainer(single_server) as trainer:
            trainer.call("/start_weight_update")
            answer = trainer.send(tensors, num_sent=0)
            assert answer.status_code == 400, answer.text
            assert states(single_server) == ["closed"]
        assert_serves(single_server, tiny_model)
    with stock_trainer(single_server) as trainer:
        trainer.update(other)
        assert_serves(single_server, other_model)


def test_a_trainer_that_dies_in_a_list_leaves_the_old_weights(
    single_server: Server, other: Any, tiny_model: str
):
    with stock_trainer(single_server) as trainer:
        trainer.call("/start_weight_update")
        info = {
            "names": [name for name, _ in other],
            "dtype_names": ["float32"] * len(other),
            "shapes": [list(one.shape) for _, one in other],
        }
        call = InThread(single_server, "/update_weights", {"update_info": info})
        for _, tensor in other[:5]:
            trainer.group.broadcast(tensor, check_workers=lambda: None)()
        sizes = [tensor.nbytes for _, tensor in other]
        expected = {
            "ranks": [1], "tensor": info["names"][5], "num_received": 5,
            "num_announced": len(other), "bytes_received": sum(sizes[:5]),
            "bytes_announced": sum(sizes),
        }  # fmt: skip
        wait_until(lambda: without_message(awaited(single_server)) == expected, 10)
        found = awaited(single_server)
        assert found is not None
        # Once, however often it is asked for.
        line = f"nothing has come for 5 s: {found['message']}"
        wait_until(lambda: line in single_server.log and awaited(single_server), 10)
        assert single_server.log.count(line) == 1
        trainer.group.abort()
        answer = call.answer()
        assert answer.status_code == 409, answer.text
        wait_until(lambda: states(single_server) == ["closed"], 20)
    assert_serves(single_server, tiny_model)


@pytest.mark.parametrize("sent", [(), (5, 0)])
def test_a_trainer_that_dies_between_its_calls_leaves_the_old_weights(
    single_server: Server, other: Any, tiny_model: str, other_model: str, sent: tuple[int, ...]
):
    """After a start, and in a list of which nothing came after another one."""
    with stock_trainer(single_server) as trainer:
        trainer.call("/start_weight_update")
        begin = 0
        for number in filter(None, sent):
            assert trainer.send(other[begin : begin + number]).status_code == 200
            begin += number
        if 0 in sent:
            rest = other[begin:]
            info = {
                "names": [name for name, _ in rest],
                "dtype_names": ["float32"] * len(rest),
                "shapes": [list(one.shape) for _, one in rest],
            }
            call = InThread(single_server, "/update_weights", {"update_info": info})
            wait_until(lambda: awaited(single_server) is not None, 20)
        trainer.group.abort()
        wait_until(lambda: states(single_server) == ["closed"], 40)
        if 0 in sent:
            assert call.answer().status_code == 409
        assert_serves(single_server, tiny_model)
    with stock_trainer(single_server) as trainer:
        trainer.update(other)
        assert_serves(single_server, other_model)


def test_what_titopool_s_own_client_has_not_sent_is_named(single_server: Server, other: Any):
    size = single_server.get("/get_world_size").json()["world_size"] + 1
    group = TrainerGroup(torch.device(DEVICE), size, timeout_s=TIMEOUT_S)
    session = {
        "session": uuid.uuid4().hex, "backend": group.backend, "host": "127.0.0.1",
        "port": group.port, "world_size": size,
    }  # fmt: skip
    call = InThread(single_server, "/weights/init", session)
    wait_until(lambda: (awaited(single_server) or {}).get("missing_ranks") == [0], 10)
    group.form(should_stop=lambda: call.has_failed)
    assert call.answer().ok
    begun = {
        "session": session["session"], "names": [name for name, _ in other], "chunk_bytes": 0,
        "dtypes": [str(one.dtype) for _, one in other], "shapes": [list(one.shape) for _, one in other],
    }  # fmt: skip
    update = single_server.post("/weights/begin", begun).json()["update"]
    for number, (name, tensor) in enumerate(other[:3]):
        wait_until(lambda n=name: (awaited(single_server) or {}).get("tensor") == n, 10)  # type: ignore[misc]
        found = awaited(single_server)
        assert found is not None
        assert (found["ranks"], found["num_received"]) == ([1], number)
        group.broadcast(tensor, check_workers=lambda: None)()
    assert single_server.post("/weights/abort", {"update": update}).ok
    assert awaited(single_server) is None
    group.abort()


def without_message(found: dict[str, Any] | None) -> dict[str, Any] | None:
    return found and {name: one for name, one in found.items() if name != "message"}


def awaited(server: Server) -> dict[str, Any] | None:
    (worker,) = server.get("/weights").json()["workers"]
    found: dict[str, Any] | None = worker["awaited"]
    return found


def test_a_stock_trainer_finds_what_it_reads(single_server: Server):
    config = single_server.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["model_config"] == {
        "logprobs_mode": "processed_logprobs",
        "dtype": "torch.float32",
    }
    assert config["weight_transfer_config"]["backend"] in ("gloo", "nccl")
    assert config["lora_config"] is None


def test_requests_are_aborted_by_their_ids_or_all(single_server: Server):
    body = {
        "prompts": [[1, 2, 3]], "n": 2, "max_tokens": 900,
        "generation_kwargs": {"ignore_eos": True},
    }  # fmt: skip

    def ask(name: str) -> InThread:
        return InThread(single_server, "/generate/", body, headers={"X-Request-Id": name})

    first, second = ask("first"), ask("second")
    wait_until(lambda: sum(single_server.metrics("sequences").values()) == 4, 20)
    for ids, call in ((["first"], first), ([], second)):
        answer = single_server.post("/abort_requests", {"request_ids": ids})
        assert answer.json() == {"status": "aborted", "aborted": 1}, answer.text
        result = call.answer().json()
        assert result["finish_reasons"] == ["abort", "abort"]
        assert all(len(one) < 900 for one in result["completion_ids"])
    # More than the engine takes: the rest waits in the front end, which keeps two slots free.
    body |= {"prompts": [[1, 2, 3]] * 200, "n": 1}
    many = ask("many")
    wait_until(lambda: sum(single_server.metrics("sequences").values()) == 126, 20)
    answer = single_server.post("/abort_requests", {"request_ids": ["many"]})
    assert answer.json() == {"status": "aborted", "aborted": 200}, answer.text
    assert many.answer().json()["finish_reasons"] == ["abort"] * 200
    assert single_server.generate([[1, 2]], max_tokens=2)["finish_reasons"] != ["abort"]
