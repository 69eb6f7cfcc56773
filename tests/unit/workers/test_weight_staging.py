"""Where received weights wait: parts of a KV cache, and the choice between the places."""

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import Chunk, plan_chunks
from workers.in_model.checkpoint_files import Refused
from workers.in_model.receiving.staging import InKvCache, InPlace, KvCacheMemory, StagingRoom

CPU = torch.device("cpu")
# Bytes of a layer's KV cache.
LAYER = 4096


def layers(num: int) -> list[torch.Tensor]:
    return [torch.full((LAYER // 4,), 7.0) for _ in range(num)]


def tensors(*lengths: int) -> list[TensorInfo]:
    return [TensorInfo(f"t{index}", "float32", [one]) for index, one in enumerate(lengths)]


class Sender:
    """A channel whose trainer sends bytes that count on."""

    def __init__(self) -> None:
        self._next = 0

    def start(self, buffer: Any) -> None:
        count = torch.arange(self._next, self._next + buffer.numel() * buffer.element_size())
        self._next += len(count)
        buffer.view(torch.uint8).copy_(count % 251)

    def copy(self, targets: list[Any], sources: list[Any]) -> None:
        torch._foreach_copy_(targets, sources)

    def wait(self, deadline: float) -> None:
        pass


def received(staging: InKvCache, chunks: list[Chunk]) -> list[int]:
    """The bytes of all tensors, in the order in which they were sent."""
    sender: Any = Sender()
    found = [staging.receive(sender, chunk, 0.0) for chunk in chunks]
    return [
        int(one) for part in found for tensor in part.values() for one in tensor.view(torch.uint8)
    ]


@pytest.mark.parametrize(
    "lengths, chunk_bytes",
    [
        pytest.param([200, 100, 300, 50], 512, id="whole-chunks"),
        # Chunks of 3,200 bytes fill a layer each; their tensors fit side by side.
        pytest.param([600, 200] * 4 + [400] * 2, 3000, id="tensors-by-a-bounce-buffer"),
        pytest.param([900, 900, 900], 0, id="a-part-elsewhere"),
    ],
)
def test_tensors_arrive_in_the_kv_cache(lengths: list[int], chunk_bytes: int):
    kv = layers(2 if chunk_bytes == 0 else 4)
    staging = InKvCache(KvCacheMemory(kv), CPU)
    chunks = plan_chunks(tensors(*lengths), chunk_bytes)
    assert staging.reserve(chunks, 100_000)
    expected = [one % 251 for one in range(4 * sum(lengths))]
    assert received(staging, chunks) == expected
    staging.release()
    for layer in kv:
        # What was written is zero, the rest untouched.
        assert set(layer.tolist()) <= {0.0, 7.0}
    assert any(0.0 in layer.tolist() for layer in kv)


def test_a_bounce_buffer_needs_room():
    # 4,800 bytes, more than a layer has.
    chunks = plan_chunks(tensors(600, 600), 10_000)
    assert not InKvCache(KvCacheMemory(layers(4)), CPU).reserve(chunks, 4799)
    assert InKvCache(KvCacheMemory(layers(4)), CPU).reserve(chunks, 4800)


def test_a_released_cache_is_used_again():
    memory = KvCacheMemory(layers(1))
    assert memory.reserve([LAYER]) is not None
    assert memory.reserve([1]) is None
    memory.free()
    assert memory.reserve([LAYER]) is not None


def test_a_cache_into_which_nothing_came_stays_as_it_is():
    """An update may end while requests in flight, which read the cache, still drain."""
    kv = layers(2)
    memory = KvCacheMemory(kv)
    staging = InKvCache(memory, CPU)
    assert staging.reserve(plan_chunks(tensors(1000, 1000), 0), 0)
    staging.release()
    assert all(set(layer.tolist()) == {7.0} for layer in kv)
    assert memory.reserve([LAYER, LAYER]) is not None


def test_what_does_not_fit_reserves_nothing():
    memory = KvCacheMemory(layers(2))
    assert memory.reserve([3000, 3000, 3000]) is None
    parts = memory.reserve([3000, 1000, 3000, 1000])
    assert parts is not None
    ranges = sorted((one.data_ptr(), one.data_ptr() + one.numel()) for one in parts)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))


def test_the_memory_is_found_in_any_nesting_once():
    (first, second) = layers(2)
    nested = {"a": [first, first[:10]], "b": ((second.view(2, -1),),)}
    assert KvCacheMemory(nested).num_bytes == 2 * LAYER


def room(setting: str, kv: Any, free: int, monkeypatch: pytest.MonkeyPatch) -> StagingRoom:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
    return StagingRoom(setting, CPU, kv)


@pytest.mark.parametrize(
    "setting, free, expected",
    [
        ("auto", 9000, "beside"), ("auto", 7000, "kv"), ("kv", 9000, "kv"), ("beside", 9000, "beside"),
        ("host", 0, "host"), ("in_place", 9000, "beside"), ("in_place", 7000, "kv"),
    ],
)  # fmt: skip
def test_weights_wait_beside_the_model_or_in_the_kv_cache(
    setting: str, free: int, expected: str, monkeypatch: pytest.MonkeyPatch
):
    chunks = plan_chunks(tensors(1000, 1000), 0)
    assert room(setting, layers(2), free, monkeypatch).choose(chunks, 0).name == expected


@pytest.mark.parametrize(
    "setting, num_layers, free, extra",
    [
        ("auto", 1, 7000, 0), ("beside", 4, 7000, 0), ("kv", 1, 9000, 5000), ("auto", 0, 7000, 0),
        # Loading needs more than is free.
        ("auto", 4, 7000, 7001),
    ],
)  # fmt: skip
def test_an_update_that_fits_nowhere_is_refused(
    setting: str, num_layers: int, free: int, extra: int, monkeypatch: pytest.MonkeyPatch
):
    chunks = plan_chunks(tensors(1000, 1000, 600), 0)
    kv = layers(num_layers) if num_layers else None
    with pytest.raises(Refused, match=rf"weight_staging={setting}.*lower gpu_memory_utilization"):
        room(setting, kv, free, monkeypatch).choose(chunks, extra)
    # What else the setting may be, and what that costs.
    with pytest.raises(Refused, match=r"in_place \(.*\) or to host"):
        room("auto", None, 0, monkeypatch).choose(chunks, 0)


# ---- in place ------------------------------------------------------------------------

# Of four bytes each; chunks of one tensor.
IN_PLACE = [1000, 600, 200, 400, 800]


@pytest.mark.parametrize(
    "free, not_in_place, refused",
    [
        (12_000, "", ""),
        (11_999, "", "three chunks, 0.0 GiB, cannot go in place.*in smaller chunks"),
        (12_000, "a checksum", "a checksum cannot go in place.*without a checksum"),
    ],
)
def test_in_place_needs_room_for_three_chunks(
    free: int, not_in_place: str, refused: str, monkeypatch: pytest.MonkeyPatch
):
    chunks = plan_chunks(tensors(*IN_PLACE, *IN_PLACE), 0)
    # The KV cache cannot hold 24,000 bytes either.
    staging = room("in_place", layers(1), free, monkeypatch)
    if refused:
        with pytest.raises(Refused, match=refused):
            staging.choose(chunks, 0, not_in_place)
    else:
        assert staging.choose(chunks, 0, not_in_place).name == "in_place"


def received_in_thread(staging: InPlace, chunks: list[Chunk], channel: Any) -> threading.Thread:
    def receive() -> None:
        try:
            for chunk in chunks:
                staging.receive(channel, chunk, time.monotonic() + 10.0)
        except RuntimeError:
            # The test reads it where the model is loaded.
            pass

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    return thread


class CountingSender(Sender):
    """Counts the broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_started = 0

    def start(self, buffer: Any) -> None:
        self.num_started += 1
        if self.num_started == 4:
            raise RuntimeError("the trainer is gone")
        super().start(buffer)


def test_chunks_are_handed_on_one_by_one_and_only_the_next_one_comes_during_a_load():
    chunks = plan_chunks(tensors(*IN_PLACE[:3]), 0)
    staging, sender = InPlace(CPU, chunks), CountingSender()
    thread = received_in_thread(staging, chunks, sender)
    found: list[int] = []
    for number, chunk in enumerate(staging.chunks(10.0), start=1):
        # While this one is loaded, only the next one comes.
        assert sender.num_started <= number + 1
        found += [int(one) for tensor in chunk.values() for one in tensor.view(torch.uint8)]
    thread.join(10)
    assert found == [one % 251 for one in range(4 * sum(IN_PLACE[:3]))]


def test_a_chunk_that_does_not_come_fails_the_load():
    chunks = plan_chunks(tensors(*IN_PLACE), 0)
    staging = InPlace(CPU, chunks)
    received_in_thread(staging, chunks, CountingSender())
    loaded = staging.chunks(10.0)
    assert [list(next(loaded)) for _ in range(3)] == [["t0"], ["t1"], ["t2"]]
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        next(loaded)
    # A trainer that hangs.
    with pytest.raises(TimeoutError, match="did not send in time"):
        next(InPlace(CPU, chunks).chunks(0.05))


def test_the_end_of_an_update_wakes_a_receiver_that_waits_for_the_model():
    chunks = plan_chunks(tensors(*IN_PLACE), 0)
    staging = InPlace(CPU, chunks)
    thread = received_in_thread(staging, chunks, Sender())
    staging.release()
    thread.join(10)
    assert not thread.is_alive()
