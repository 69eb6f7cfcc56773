"""The rendezvous and the chunks, between workers' receivers and both kinds of trainers, over gloo."""

import contextlib
import pickle
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.servers import free_port, wait_until
from harness.stub_tensors import StubModel
from tests.kit.trainers import stock_trainer
from titopool.client.weights.trainer_group import NO_ID, TrainerGroup
from titopool.wire.commands import TensorInfo
from titopool.wire.rendezvous import ID_KEY, nccl_id_in, rank_key
from titopool.wire.weight_plan import checksum, plan_chunks
from workers.in_model.checkpoint_files import Refused
from workers.in_model.receiving import group as workers_group
from workers.in_model.receiving import host_memory
from workers.in_model.receiving.arrivals import LEAVE_TIMEOUT_S, Arrivals
from workers.in_model.receiving.group import Group, GroupArgs
from workers.in_model.receiving.host_memory import HostMemory
from workers.in_model.receiving.receiver import Receiver
from workers.in_model.receiving.staging import Beside, InHost, InKvCache, KvCacheMemory

CPU = torch.device("cpu")
TIMEOUT_S = 60.0
# How soon a wait must end once it is closed or its trainer is gone.
SOON_S = 5.0
ID = bytes(range(100, 228))


def receiver_of(port: int, rank: int, world_size: int, timeout_s: float = TIMEOUT_S) -> Receiver:
    args = GroupArgs("vllm", "gloo", "127.0.0.1", port, rank, world_size, timeout_s)
    return Receiver(args, CPU)


@pytest.fixture
def receivers() -> Iterator[Callable[[int, int], list[Receiver]]]:
    made: list[Receiver] = []

    def start(port: int, num_ranks: int) -> list[Receiver]:
        made.extend(receiver_of(port, rank, num_ranks + 1) for rank in range(1, num_ranks + 1))
        return made

    yield start
    for receiver in made:
        receiver.close()
        assert receiver.has_ended(10)


def in_thread(do: Callable[[], Any]) -> Callable[[], Any]:
    """Starts `do`; the returned function waits for it and returns what it returned."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(do()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(TIMEOUT_S)
        assert done, "it failed or takes too long"
        return done[0]

    return result


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_receiver_leaves_an_address_that_is_no_store(
    monkeypatch: pytest.MonkeyPatch, answer: bytes
):
    monkeypatch.setattr(workers_group, "ATTEMPT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse_all() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    connection.sendall(answer)
                    connection.close()

        threading.Thread(target=refuse_all, daemon=True).start()
        receiver = receiver_of(listening.getsockname()[1], 1, 2)
        assert not receiver.has_ended(0.1)
        receiver.close()
        # Before `CannotLeave`, with which the worker would restart.
        assert receiver.has_ended(LEAVE_TIMEOUT_S)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_receiver_leaves_an_address_that_stays_silent(host: str):
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        # Engines have Unix sockets too.
        for one in socket.socketpair():
            stack.enter_context(one)
        port = listening.getsockname()[1]
        args = GroupArgs("vllm", "gloo", host, port, 1, 2, TIMEOUT_S)
        receiver = Receiver(args, CPU)
        connection, _ = listening.accept()
        with connection:
            # The store waits for the answer to its first message.
            assert connection.recv(1)
            assert not receiver.has_ended(0.5)
            receiver.close()
            assert receiver.has_ended(LEAVE_TIMEOUT_S)


def test_a_receiver_gives_up_at_its_deadline_when_the_address_stays_silent():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        receiver = receiver_of(listening.getsockname()[1], 1, 2, timeout_s=1.0)
        assert receiver.has_ended(2 * SOON_S)
        assert receiver.error


def random_tensors(seed: int) -> list[tuple[str, Any]]:
    """Tensors of mixed dtypes, so that some begin at odd offsets; some are empty."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtypes = [torch.bfloat16, torch.float32, torch.int8, torch.float64, torch.float16]
    return [
        (
            f"t{index}",
            (torch.randn(chance.randrange(0, 40), chance.randrange(1, 9)) * 50).to(
                chance.choice(dtypes)
            ),
        )
        for index in range(chance.randrange(1, 30))
    ]


def infos_of(tensors: list[tuple[str, Any]]) -> list[TensorInfo]:
    return [
        TensorInfo(name, str(one.dtype).removeprefix("torch."), list(one.shape))
        for name, one in tensors
    ]


def assert_received(receiver: Receiver, tensors: list[tuple[str, Any]]) -> None:
    wait_until(
        lambda: bool(receiver.error) or receiver.num_received == len(tensors), TIMEOUT_S, str
    )
    assert receiver.error == ""
    # Also the order, on which the checksum depends.
    assert list(receiver.staged) == [name for name, _ in tensors]
    for name, tensor in tensors:
        found = receiver.staged[name]
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert checksum(list(receiver.staged.values())) == checksum([one for _, one in tensors])


# ---- both kinds of trainers ----------------------------------------------------------


def test_a_stock_trainer_joins_and_sends(receivers):
    """vLLM's constructor returns when all ranks are registered; then chunks of all sizes."""
    stock_trainer.load_vllm()
    port = free_port()
    joined = in_thread(lambda: stock_trainer.stateless_group(port, 3))
    ranks = receivers(port, 2)
    communicator = stock_trainer.GlooCommunicator(joined())
    wait_until(lambda: all(one.is_joined for one in ranks), SOON_S)
    for seed, chunk_bytes in enumerate([0, 1, 300, 2_000, 10**6]):
        tensors = random_tensors(seed)
        for receiver in ranks:
            receiver.drop()
            receiver.announce(plan_chunks(infos_of(tensors), chunk_bytes), Beside(CPU))
        stock_trainer.send(communicator, tensors, chunk_bytes)
        for receiver in ranks:
            assert_received(receiver, tensors)


def test_the_client_s_group_joins_the_same_receivers(receivers):
    trainer = TrainerGroup(CPU, 3, timeout_s=TIMEOUT_S)
    ranks = receivers(trainer.port, 2)
    trainer.form(should_stop=lambda: False)
    tensors = [
        ("a", torch.arange(5.0)),
        ("none", torch.empty(0)),
        ("b", torch.ones(3, dtype=torch.bool)),
    ]
    for receiver in ranks:
        receiver.announce(plan_chunks(infos_of(tensors), 0), Beside(CPU))
    for _, tensor in tensors:
        trainer.broadcast(tensor, check_workers=lambda: None)()
    for receiver in ranks:
        assert_received(receiver, tensors)
    trainer.abort()


def test_the_client_s_group_names_the_ranks_that_are_missing(receivers):
    trainer = TrainerGroup(CPU, 4, timeout_s=1.0)
    (receiver,) = [receiver_of(trainer.port, 2, 4)]
    with pytest.raises(TimeoutError, match="got none of rank 1, 3;"):
        trainer.form(should_stop=lambda: False)
    trainer.abort()
    # The closed store ends the wait of the rank that had come.
    assert receiver.has_ended(SOON_S)
    assert receiver.error


def test_an_update_that_ends_takes_no_more_of_the_host_s_memory(
    receivers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """To register 60 GB with CUDA takes half a minute."""
    monkeypatch.setattr(host_memory, "CLAIMS", tmp_path / "claims")
    num_taken = 0

    def slowly(num_bytes: int, device: Any) -> torch.Tensor:
        nonlocal num_taken
        num_taken += 1
        time.sleep(0.3)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(host_memory, "_new_buffer", slowly)
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 64)
    trainer = TrainerGroup(CPU, 2, timeout_s=TIMEOUT_S)
    (receiver,) = receivers(trainer.port, 1)
    trainer.form(should_stop=lambda: False)
    wait_until(lambda: awaited(receiver) is None, SOON_S)
    chunks = plan_chunks(infos_of([(f"t{index}", torch.ones(16)) for index in range(40)]), 0)
    staging = InHost(HostMemory(CPU))
    assert staging.reserve(chunks)
    receiver.announce(chunks, staging)
    wait_until(lambda: num_taken > 0, SOON_S)
    receiver.close()
    assert receiver.has_ended(SOON_S)
    assert num_taken < len(chunks)
    trainer.abort()


# ---- what is awaited -----------------------------------------------------------------


def test_a_rank_that_joins_names_those_that_are_missing(receivers):
    trainer = TrainerGroup(CPU, 4, timeout_s=TIMEOUT_S)
    first = receiver_of(trainer.port, 2, 4)
    wait_until(lambda: awaited(first) == {"rank": 2, "missing_ranks": [1, 3]}, SOON_S)
    others = [receiver_of(trainer.port, rank, 4) for rank in (1, 3)]
    # The trainer has not begun to form the group.
    wait_until(lambda: awaited(first)["missing_ranks"] == [0], SOON_S)
    trainer.form(should_stop=lambda: False)
    wait_until(lambda: awaited(first) is None, SOON_S)
    for receiver in (first, *others):
        receiver.close()
    trainer.abort()


def test_a_rank_names_the_first_tensor_of_the_first_chunk_that_has_not_come(receivers):
    trainer = TrainerGroup(CPU, 2, timeout_s=TIMEOUT_S)
    (receiver,) = receivers(trainer.port, 1)
    trainer.form(should_stop=lambda: False)
    sent = [
        ("a", torch.ones(3)),
        ("none", torch.empty(0)),
        ("b", torch.ones(2)),
        ("c", torch.ones(5)),
    ]
    # Of a second update too, which counts anew.
    for _ in range(2):
        wait_until(lambda: awaited(receiver) is None, SOON_S)
        receiver.drop()
        # Chunks of a, of none and b, and of c.
        receiver.announce(plan_chunks(infos_of(sent), 4), Beside(CPU))
        for tensor, num_tensors, num_bytes in (("a", 0, 0), ("none", 1, 12), ("c", 3, 20)):
            expected = {
                "rank": 1, "tensor": tensor, "num_received": num_tensors, "num_announced": 4,
                "bytes_received": num_bytes, "bytes_announced": 40,
            }  # fmt: skip
            wait_until(
                lambda e=expected: awaited(receiver) == e, SOON_S, lambda: str(awaited(receiver))
            )  # type: ignore[misc]
            size = {"a": 12, "none": 8, "c": 20}[tensor]
            trainer.broadcast(torch.ones(size, dtype=torch.uint8), check_workers=lambda: None)()
        wait_until(lambda: receiver.num_received == 4, SOON_S)
        assert awaited(receiver) is None
    trainer.abort()


def awaited(receiver: Receiver) -> Any:
    status = receiver.status()
    assert status["error"] == ""
    return status["awaited"]


# ---- waits end -----------------------------------------------------------------------


def test_a_receiver_that_waits_for_the_trainer_can_be_closed():
    trainer = TrainerGroup(CPU, 2, timeout_s=TIMEOUT_S)
    receiver = receiver_of(trainer.port, 1, 2)
    wait_until(lambda: bool(trainer._store.check([rank_key(1)])), SOON_S)
    receiver.close()
    assert receiver.has_ended(SOON_S)
    assert not receiver.is_joined
    trainer.abort()


def test_a_receiver_can_be_closed_in_a_broadcast_and_writes_nothing_afterwards(receivers):
    trainer = TrainerGroup(CPU, 2, timeout_s=TIMEOUT_S)
    (receiver,) = receivers(trainer.port, 1)
    trainer.form(should_stop=lambda: False)
    kv_cache = [torch.full((256,), 7.0)]
    chunks = plan_chunks([TensorInfo("a", "float32", [4]), TensorInfo("b", "float32", [4])], 0)
    staging = InKvCache(KvCacheMemory(kv_cache), CPU)
    assert staging.reserve(chunks, 0)
    receiver.announce(chunks, staging)
    wait_until(lambda: awaited(receiver).get("tensor") == "a", SOON_S)
    # Both are being received.
    wait_until(lambda: not staging._reserved, SOON_S)
    receiver.close()
    assert receiver.has_ended(SOON_S)
    for _ in range(2):
        trainer.broadcast(torch.ones(4), check_workers=lambda: None)()
    assert set(kv_cache[0].tolist()) == {7.0}
    trainer.abort()


def test_a_receiver_gives_up_at_its_deadline():
    trainer = TrainerGroup(CPU, 3, timeout_s=TIMEOUT_S)
    receiver = receiver_of(trainer.port, 1, 3, timeout_s=1.0)
    assert receiver.has_ended(SOON_S)
    assert "the other ranks did not join in time" in receiver.error
    trainer.abort()


# ---- NCCL's id -----------------------------------------------------------------------


class RecordedChannel:
    """Stands in for `NcclChannel`: keeps the id that vLLM's communicator would use."""

    def __init__(self, group: Any, device: Any, source: int):
        self.nccl_id = bytes(group.broadcast_obj(stock_trainer.unique_id(bytes(128)), src=0))
        self.source, self.place = source, (group.rank, group.world_size)

    def close(self) -> None:
        pass


def joined_over_nccl(monkeypatch: pytest.MonkeyPatch, port: int, nccl_id: bytes = b"") -> Any:
    monkeypatch.setattr(workers_group, "NcclChannel", RecordedChannel)
    args = GroupArgs("vllm", "nccl", "127.0.0.1", port, 1, 2, TIMEOUT_S, nccl_id)
    return Group(args, CPU, None, lambda: False).channel


def test_the_id_of_a_stock_trainer_is_read_from_its_pickle(monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    joined = in_thread(lambda: stock_trainer.stateless_group(port, 2))
    channel = in_thread(lambda: joined_over_nccl(monkeypatch, port))
    group = joined()
    group.broadcast_obj(stock_trainer.unique_id(ID), src=0)
    assert channel().nccl_id == ID
    assert (channel().source, channel().place) == (0, (1, 2))


def test_the_id_of_the_client_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch):
    trainer = TrainerGroup(CPU, 2, timeout_s=TIMEOUT_S)
    trainer._store.set(ID_KEY, ID)
    assert joined_over_nccl(monkeypatch, trainer.port).nccl_id == ID
    trainer._store.set(ID_KEY, NO_ID)
    with pytest.raises(ValueError, match="expected NCCL's id, 128 bytes"):
        joined_over_nccl(monkeypatch, trainer.port)
    trainer.abort()


def test_an_id_that_is_given_needs_no_store(monkeypatch: pytest.MonkeyPatch):
    # Nothing listens at port 1.
    assert joined_over_nccl(monkeypatch, 1, ID).nccl_id == ID
    with pytest.raises(ValueError, match="expected 128 bytes, got 4"):
        joined_over_nccl(monkeypatch, 1, b"1234")


def test_a_worker_without_a_gpu_refuses_an_id():
    arrivals = Arrivals(StubModel(torch.nn.Module()))
    with pytest.raises(Refused, match="nccl_id: expected a worker with a GPU"):
        arrivals.join(GroupArgs("vllm", "auto", "", 0, 1, 2, TIMEOUT_S, ID))


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_the_id_is_found_in_every_form_of_pickle(protocol: int):
    assert nccl_id_in(pickle.dumps(stock_trainer.unique_id(ID), protocol)) == ID


def test_no_pickle_is_loaded(tmp_path: Path):
    file = tmp_path / "it-ran"

    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(file), "w")

    payloads = [
        pickle.dumps(Evil()),
        pickle.dumps((ID, ID[::-1])),
        pickle.dumps(ID[:-1]),
        pickle.dumps([stock_trainer.unique_id(ID), b"x" * 5000]),
        ID[:-1],
        b"",
        bytes(range(256)) * 3,
    ]
    for payload in payloads:
        with pytest.raises(ValueError, match="expected NCCL's id"):
            nccl_id_in(payload)
    # The id beside it does not make it run either.
    assert nccl_id_in(pickle.dumps((Evil(), ID))) == ID
    assert not file.exists()


def test_a_disabled_communicator_is_refused(monkeypatch: pytest.MonkeyPatch):
    """It would receive nothing and raise nothing."""
    from contextlib import nullcontext

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(
        "vllm.distributed.device_communicators.pynccl.PyNcclCommunicator",
        lambda group, device: SimpleNamespace(disabled=True),
    )
    with pytest.raises(RuntimeError, match="VLLM_DISABLE_PYNCCL"):
        workers_group.NcclChannel(SimpleNamespace(), CPU, 0)


# ---- vLLM's chunks -------------------------------------------------------------------

# Bytes; two tensors of 100 and one of 60 follow each other.
LIMITS = [1, 99, 100, 101, 199, 200, 201, 259, 260, 261, 10**6]


@pytest.mark.parametrize("limit", LIMITS)
def test_chunks_end_where_vllm_s_end_at_the_limit_and_beside_it(limit: int):
    tensors = [
        ("a", torch.zeros(50, dtype=torch.bfloat16)),
        ("b", torch.zeros(25, dtype=torch.float32)),
        ("c", torch.zeros(0, dtype=torch.float32)),
        ("d", torch.zeros(60, dtype=torch.int8)),
        ("e", torch.zeros(0, 3, dtype=torch.bfloat16)),
    ]
    assert_same_chunks(tensors, limit)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_of_any_tensors_end_where_vllm_s_end(seed: int):
    assert_same_chunks(random_tensors(seed), random.Random(seed).choice([1, 63, 300, 2_000, 10**6]))


def assert_same_chunks(tensors: list[tuple[str, Any]], limit: int) -> None:
    found = [chunk.num_bytes for chunk in plan_chunks(infos_of(tensors), limit)]
    assert found == [len(chunk) for chunk in stock_trainer.packed_chunks(tensors, limit)]
