"""Weight updates with real vLLM over gloo: exact, or not applied."""

# `client` is imported, and an argument of tests.
# ruff: noqa: F811

import contextlib
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from harness.servers import START_TIMEOUT_S, Server, free_port, phases, wait_until, worker_pids
from tests.kit.models.weights import (
    LONGEST,
    Generation,
    assert_serves,
    begun,
    states,
    trainer,
    weights_client,
)
from tests.kit.trainers import stock_trainer
from tests.kit.trainers.trainer import CHUNK_BYTES, DEVICE, tensors_of
from tests.kit.trainers.weight_transfers import (  # noqa: F401
    LAYER,
    TIMEOUT_S,
    client,
    own_weights,
    refused,
    test_a_restarted_worker_serves_only_the_pool_s_weights,
    test_keep_continues_with_new_weights_and_reports_the_switch,
    test_new_weights_are_exact_and_old_ones_can_be_restored,
    test_q_k_and_v_may_be_sent_fused,
)
from titopool.client.weights.trainer_group import run_in_thread
from titopool.client.weights_client import WeightsClient, WeightsError
from titopool.wire.weight_plan import Checksum, checksum


@pytest.fixture
def server(weights_server: Server) -> Server:
    """Most failures need two workers; `tests/engine/weights/test_weights_one_worker.py` has one."""
    return weights_server


# ---- exact ---------------------------------------------------------------------------


def test_a_tied_head_may_be_sent_and_tensors_one_at_a_time(
    server: Server, tiny_model: str, other_model: str
):
    tensors = tensors_of(other_model)
    tensors.append(("lm_head.weight", dict(tensors)["model.embed_tokens.weight"]))
    client = weights_client(server, timeout_s=TIMEOUT_S, chunk_bytes=0)
    result = client.update(tensors, policy="keep")
    client.close()
    assert result["ignored"] == ["lm_head.weight"]
    assert_serves(server, other_model)


def test_a_tied_head_that_was_trained_is_refused(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str, weights_root: Path
):
    tensors = dict(tensors_of(other_model))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0.01
    text = "values other than those of model.embed_tokens.weight"
    assert text in str(refused(client, list(tensors.items())))
    folder = weights_root / "trained-head"
    folder.mkdir()
    save_file({name: one.cpu() for name, one in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=text):
        client.update_from_folder(str(folder), policy="keep")
    assert_serves(server, tiny_model)


@pytest.mark.parametrize("chunk_bytes", [0, CHUNK_BYTES], ids=["single", "packed"])
def test_what_vllm_s_own_trainer_sends_is_exact(server: Server, other_model: str, chunk_bytes: int):
    """vLLM's rendezvous, its communicator (gloo without a GPU) and its `pack_tensors`."""
    stock_trainer.load_vllm()
    world_size, port = server.get("/get_world_size").json()["world_size"] + 1, free_port()
    forms = run_in_thread(lambda: stock_trainer.communicator(port, world_size, DEVICE))
    init = {
        "session": uuid.uuid4().hex, "backend": "gloo" if DEVICE == "cpu" else "nccl",
        "host": "127.0.0.1", "port": port, "world_size": world_size,
    }  # fmt: skip
    assert server.post("/weights/init", init).ok
    communicator = forms.result(TIMEOUT_S)
    tensors = tensors_of(other_model)
    begun = {
        "session": init["session"], "names": [name for name, _ in tensors],
        "dtypes": [str(one.dtype) for _, one in tensors],
        "shapes": [list(one.shape) for _, one in tensors], "chunk_bytes": chunk_bytes,
    }  # fmt: skip
    update = server.post("/weights/begin", begun).json()["update"]
    stock_trainer.send(communicator, tensors, chunk_bytes)
    sums = checksum([one for _, one in tensors])
    commit = {"update": update, "policy": "keep", "checksum": sums}
    assert server.post("/weights/commit", commit).json()["loaded"] == len(tensors)
    assert_serves(server, other_model, times=2)
    assert server.post("/weights/close", {"session": init["session"]}).ok


@pytest.mark.parametrize("says", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_after_an_init_at_a_wrong_address_the_next_one_works(
    server: Server, client: WeightsClient, other: Any, other_model: str, says: bytes | None
):
    """What listens there stays silent, closes, or speaks another protocol."""
    pids = worker_pids(server)
    world_size = server.get("/get_world_size").json()["world_size"] + 1
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as accepted:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = accepted.enter_context(listening.accept()[0])
                    if says is not None:
                        connection.sendall(says)
                        connection.close()

        threading.Thread(target=accept, daemon=True).start()
        init = {
            "session": uuid.uuid4().hex, "backend": "gloo", "host": "127.0.0.1",
            "port": listening.getsockname()[1], "world_size": world_size,
        }  # fmt: skip
        first = run_in_thread(lambda: server.post("/weights/init", init))
        wait_until(lambda: states(server) == ["joining", "joining"], TIMEOUT_S)
        assert server.post("/weights/close", {"session": init["session"]}).ok
        assert first.result(TIMEOUT_S).status_code == 409
        client.update(other, policy="keep")
    assert_serves(server, other_model)
    assert worker_pids(server) == pids


def test_a_partial_update_needs_complete_layers(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    tensors = tensors_of(other_model)
    name = f"{LAYER}k_proj.weight"
    error = refused(client, [(name, dict(tensors)[name])], partial=True)
    assert error.status == 400
    assert f"{LAYER}q_proj.weight, {LAYER}v_proj.weight" in str(error)
    assert_serves(server, tiny_model)
    middle = [name for name, _ in tensors].index("model.layers.2.self_attn.q_proj.weight")
    result = client.update(tensors[:middle], policy="keep", partial=True)
    assert sorted(result["missing"]) == sorted(name for name, _ in tensors[middle:])
    client.update(tensors[middle:], policy="keep", partial=True)
    assert_serves(server, other_model)


def test_weights_are_loaded_from_a_folder(server: Server, other_model: str):
    client = weights_client(server)
    assert client.update_from_folder(other_model, policy="keep", version=3)["version"] == 3
    assert_serves(server, other_model, times=2)
    for path, text in [
        ("/etc", "below weights_root"),
        (other_model + "/../..", "below weights_root"),
        (other_model + "/none", "below weights_root"),
    ]:
        with pytest.raises(WeightsError, match=text) as caught:
            client.update_from_folder(path, policy="keep")
        assert caught.value.status == 400
    assert server.post("/update_weights", {"path": other_model}).status_code == 400
    assert server.post("/update_weights", {"weight_dir": other_model}).status_code == 200
    assert_serves(server, other_model)


# ---- in flight -----------------------------------------------------------------------


def test_drain_finishes_requests_with_the_old_weights(
    server: Server, client: WeightsClient, other_model: str
):
    client.open()
    generation = Generation(server, num_tokens=200)
    wait_until(lambda: begun(server, 2), 20)
    client.update(tensors_of(other_model), policy="drain", version=5)
    answer = generation.join()
    assert answer["weight_versions"] == [[[0, 0]], [[0, 0]]]
    assert [len(ids) for ids in answer["completion_ids"]] == [200, 200]
    assert_serves(server, other_model)


def test_requests_in_flight_keep_their_keys(
    server: Server, client: WeightsClient, other_model: str
):
    client.open()
    generation = Generation(server, num_tokens=LONGEST)
    wait_until(lambda: begun(server, 2), 20)
    result = client.update(tensors_of(other_model), policy="keep", version=5, cache="keep")
    assert (result["staging"], result["cache"]) == ("beside", "keep")
    answer = generation.join()
    assert [[version for version, _ in one] for one in answer["weight_versions"]] == [[0, 5]] * 2
    assert answer["kv_from"] == [[0, 0]] * 2
    assert_serves(server, other_model)


def test_abort_returns_the_tokens_so_far(server: Server, client: WeightsClient, other_model: str):
    client.open()
    generation = Generation(server, num_tokens=LONGEST, n=2)
    wait_until(lambda: begun(server, 4), 20)
    client.update(tensors_of(other_model), policy="abort", version=5)
    answer = generation.join()
    assert answer["finish_reasons"] == ["abort"] * 4
    assert answer["weight_versions"] == [[[0, 0]]] * 4
    assert all(0 < len(ids) < LONGEST for ids in answer["completion_ids"])
    assert_serves(server, other_model)


def test_a_pause_ends_by_resume_or_lease(server: Server):
    assert server.post("/pause", {"mode": "keep"}).status_code == 400
    assert server.post("/pause", {"mode": "keep", "lease_s": 30}).status_code == 200
    assert server.get("/is_paused").json()["is_paused"]
    generation = Generation(server, num_tokens=4)
    assert server.post("/resume", {}).json()["was_paused"] is True
    assert len(generation.join()["completion_ids"]) == 2
    assert server.post("/resume", {}).json()["was_paused"] is False
    server.post("/pause", {"mode": "abort", "lease_s": 1})
    # No resume is sent; the lease expires.
    assert len(Generation(server, num_tokens=4).join()["completion_ids"]) == 2
    assert not server.get("/is_paused").json()["is_paused"]


def test_a_pause_outlives_a_commit_and_does_not_block_a_drain(
    server: Server, client: WeightsClient, other_model: str
):
    client.open()
    server.post("/pause", {"mode": "keep", "lease_s": 60})
    error = refused_commit(client, tensors_of(other_model), "drain")
    assert error.status == 409
    client.update(tensors_of(other_model), policy="keep")
    assert server.get("/is_paused").json()["is_paused"]
    server.post("/resume", {})
    assert_serves(server, other_model)


def refused_commit(
    client: WeightsClient, tensors: list[tuple[str, Any]], policy: Any
) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        client.update(tensors, policy=policy)
    return caught.value


# ---- what goes wrong -----------------------------------------------------------------


def test_wrong_tensors_are_refused_before_any_is_sent(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    tensors = tensors_of(other_model)
    name, weight = tensors[3]
    for bad, text in [
        ([*tensors, ("model.layers.9.mlp.up_proj.weight", weight)], "no such tensor; did you mean"),
        ([*tensors[:3], (name, weight[:-1]), *tensors[4:]], f"{name}: expected shape"),
        (tensors[:-1], "1 are missing: model.norm.weight"),
        ([*tensors, (name, weight)], "expected it once"),
        ([*tensors[:3], (name, weight.to(torch.int8)), *tensors[4:]], "expected dtype float32"),
    ]:
        error = refused(client, bad)
        assert error.status == 400
        assert text in str(error)
    # The client refuses what it cannot pack.
    unknown = [*tensors[:3], (name, weight.to(torch.complex64)), *tensors[4:]]
    assert f"{name}: expected a dtype of" in str(refused(client, unknown))
    assert_serves(server, tiny_model)
    # The group is unchanged.
    client.update(tensors, policy="keep")
    assert_serves(server, other_model)


def test_a_trainer_that_fails_to_pack_keeps_the_old_weights_and_may_retry(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str, monkeypatch: Any
):
    def fail(*_: Any) -> Iterator[Any]:
        yield from ()
        raise MemoryError("staged")

    with monkeypatch.context() as patch:
        patch.setattr("titopool.client.weights_client.messages_of", fail)
        error = refused(client, tensors_of(other_model))
    assert "expected to send all tensors, got MemoryError: staged" in str(error)
    assert set(states(server)) == {"closed"}
    assert_serves(server, tiny_model)
    client.update(tensors_of(other_model), policy="keep")
    assert_serves(server, other_model)


def test_a_corrupted_tensor_is_found_by_its_checksum(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str, monkeypatch: Any
):
    # The workers have their own.
    monkeypatch.setattr(Checksum, "digest", lambda self: "0" * 16)
    error = refused(client, tensors_of(other_model), with_checksum=True)
    assert error.code == "weight_update_failed"
    assert_serves(server, tiny_model)


@pytest.mark.parametrize("stop_at", ["joined", "begun", "sending", "sent"])
def test_a_killed_trainer_keeps_the_old_weights_and_may_be_replaced(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str, stop_at: str
):
    with trainer(server, other_model, stop_at) as process:
        with pytest.raises(WeightsError) as caught:
            client.open()
        # The trainer is alive, so no other trainer replaces it.
        assert caught.value.status == 409
        process.kill()
        process.join()
        assert_serves(server, tiny_model)
        client.update(tensors_of(other_model), policy="keep")
        assert_serves(server, other_model, times=2)


def test_a_hanging_trainer_is_dropped_at_the_deadline(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    with trainer(server, other_model, "begun"):
        wait_until(lambda: set(states(server)) == {"closed"}, TIMEOUT_S + 10)
        assert_serves(server, tiny_model)
        client.update(tensors_of(other_model), policy="keep")
        assert_serves(server, other_model)


def test_a_worker_killed_during_an_update_waits_for_the_next(
    server: Server, client: WeightsClient, tiny_model: str, other_model: str
):
    with trainer(server, other_model, "begun"):
        pid = worker_pids(server)[-1]
        psutil.Process(pid).kill()
        wait_until(lambda: psutil.pid_exists(pid) is False or has_exited(pid), 10)
    if server.num_workers == 2:
        assert_serves(server, tiny_model, times=2)
    # Its weights came from a trainer and are lost.
    wait_until(lambda: "waiting_for_weights" in phases(server), START_TIMEOUT_S)
    client.update(tensors_of(other_model), policy="keep")
    assert_serves(server, other_model, times=4)


def test_sigterm_to_an_engine_fails_no_request(server: Server):
    """As when a service manager stops every process of a group: vLLM aborts its requests."""
    generation = Generation(server, num_tokens=LONGEST)
    wait_until(lambda: begun(server, 2), 20)
    for process in psutil.Process(worker_pids(server)[-1]).children():
        if "EngineCore" in process.name():
            process.terminate()
    answer = generation.join()
    assert answer["finish_reasons"] == ["length", "length"]
    assert [len(ids) for ids in answer["completion_ids"]] == [LONGEST, LONGEST]
    wait_until(lambda: "waiting_for_weights" in phases(server), START_TIMEOUT_S)


def test_a_restarted_worker_loads_the_pool_s_folder(server: Server, other_model: str):
    weights_client(server).update_from_folder(other_model, policy="keep", version=9)
    psutil.Process(worker_pids(server)[-1]).kill()
    wait_until(lambda: len(set(phases(server)) - {"ready"}) > 0, 20)
    server.wait_until_ready(server.num_workers)
    ready = server.get("/ready").json()["workers"]
    assert [one["weight_version"] for one in ready] == [9] * server.num_workers
    assert_serves(server, other_model, times=4)


def has_exited(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
