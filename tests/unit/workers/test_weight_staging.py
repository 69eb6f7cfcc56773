"""Where received weights wait: parts of a KV cache, and the choice between the places."""

import itertools
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import Chunk, plan_chunks
from workers.in_model.checkpoint_files import Refused
from workers.in_model.receiving import host_memory
from workers.in_model.receiving.host_memory import (
    BLOCK_BYTES,
    SPARE_BYTES,
    Claims,
    HostMemory,
    free_host_bytes,
)
from workers.in_model.receiving.staging import (
    InHost,
    InKvCache,
    InPlace,
    KvCacheMemory,
    StagingRoom,
    stagings,
)

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


def received(staging: InKvCache | InHost, chunks: list[Chunk]) -> list[int]:
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
        ("host", 2**27, "host"), ("in_place", 9000, "beside"), ("in_place", 7000, "kv"),
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
        ("auto", 4, 7000, 7001), ("host", 4, 10_399, 0),
    ],
)  # fmt: skip
def test_an_update_that_fits_nowhere_is_refused(
    setting: str, num_layers: int, free: int, extra: int, monkeypatch: pytest.MonkeyPatch
):
    chunks = plan_chunks(tensors(1000, 1000, 600), 0)
    kv = layers(num_layers) if num_layers else None
    with pytest.raises(Refused, match=rf"weight_staging={setting}") as caught:
        room(setting, kv, free, monkeypatch).choose(chunks, extra)
    # The GPU's memory does not help where only the host's may be used.
    assert ("lower gpu_memory_utilization" in str(caught.value)) == (setting != "host")
    # What else the setting may be, and what that costs.
    for setting, advice in (
        ("auto", "give the host or its container more memory"),
        ("kv", r"auto, which takes the host's memory too, or to in_place \(an update that fails"),
    ):
        with pytest.raises(Refused, match=advice):
            room(setting, None, 0, monkeypatch).choose(chunks, 0)


# ---- the host's memory ---------------------------------------------------------------


@pytest.fixture(autouse=True)
def claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_memory, "CLAIMS", tmp_path / "claims")
    return tmp_path / "claims"


def taken_by(memory: HostMemory) -> int:
    return sum(one.num_bytes for one in memory._blocks if one.buffer is not None)


@pytest.mark.parametrize(
    "host_free, extra, expected",
    [
        (BLOCK_BYTES, 4000, "host"),
        (
            BLOCK_BYTES - 1,
            0,
            r"0.1 GiB of the host's memory may be taken .*; or give the host or its",
        ),
        # The GPU has no room for what loading takes: more of the host's memory does not help.
        (BLOCK_BYTES, 4001, r"loading takes 0.0 GiB.*cache=clear\); lower gpu_memory_utilization$"),
    ],
)
def test_beside_a_gpu_weights_wait_in_the_host_s_memory_where_no_other_has_room(
    host_free: int, extra: int, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: SPARE_BYTES + host_free)
    monkeypatch.setattr(StagingRoom, "_num_free", lambda room: 4000)
    # Three chunks of 10,400 bytes in all, in one block; the KV cache has 4,096.
    found = StagingRoom("auto", SimpleNamespace(type="cuda"), layers(1))
    chunks = plan_chunks(tensors(1000, 1000, 600), 0)
    if expected == "host":
        assert found.choose(chunks, extra).name == "host"
    else:
        with pytest.raises(Refused, match=expected):
            found.choose(chunks, extra)


def test_weights_of_several_lists_do_not_stop_generation_from_the_first_one_on(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: SPARE_BYTES + BLOCK_BYTES)
    monkeypatch.setattr(StagingRoom, "_num_free", lambda room: 4000)
    found = StagingRoom("auto", SimpleNamespace(type="cuda"), layers(1))
    (chunk,) = plan_chunks(tensors(1000), 0)
    # The KV cache has 4,096 bytes.
    assert found.choose([chunk], 0, whole_bytes=4097).name == "host"
    assert found.choose([chunk], 0, whole_bytes=4096).name == "kv"


@pytest.mark.parametrize(
    "setting, cache, expected",
    [
        ("auto", "clear", ["beside", "kv", "host"]), ("auto", "keep", ["beside", "host"]),
        ("auto", "prefer_keep", ["beside", "host", "kv"]), ("host", "keep", ["host"]),
        ("in_place", "prefer_keep", ["beside", "kv", "in_place"]), ("kv", "keep", []),
    ],
)  # fmt: skip
def test_weights_wait_outside_of_a_cache_that_is_kept(
    setting: str, cache: Any, expected: list[str]
):
    assert stagings(setting, cache) == expected


def test_a_cache_that_cannot_be_kept_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch):
    chunks = plan_chunks(tensors(1000, 1000), 0)
    found = room("auto", layers(2), 7000, monkeypatch)
    with pytest.raises(Refused, match=r"cache=keep.*or let the caches be cleared \(cache: prefer"):
        found.choose(chunks, 0, cache="keep")
    assert found.choose(chunks, 0, cache="prefer_keep").name == "kv"


def test_the_host_s_memory_is_kept_for_the_next_update():
    memory = HostMemory(CPU)
    chunks = plan_chunks(tensors(200, 100, 300, 50), 512)
    addresses = []
    for _ in range(2):
        staging = InHost(memory)
        assert staging.reserve(chunks)
        assert received(staging, chunks) == [one % 251 for one in range(2600)]
        assert taken_by(memory) == BLOCK_BYTES
        (place,) = memory.reserve([4]) or []
        addresses.append(memory.take(place).untyped_storage().data_ptr())
        staging.release()
    assert addresses[0] == addresses[1]


def test_parts_of_several_lists_do_not_overlap_and_are_aligned():
    memory = HostMemory(CPU)
    places = [*(memory.reserve([5, 300]) or []), *(memory.reserve([0, BLOCK_BYTES, 7]) or [])]
    parts = [memory.take(one) for one in places]
    assert [len(one) for one in parts] == [5, 300, 0, BLOCK_BYTES, 7]
    ranges = sorted((one.data_ptr(), one.data_ptr() + len(one)) for one in parts if len(one))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert all((one.begin % 256) == 0 for one in places)


@pytest.mark.parametrize(
    "sizes, expected",
    [
        # One block of three is large enough for each.
        ([BLOCK_BYTES // 2 + 1] * 3, 3), ([3 * BLOCK_BYTES], 3),
        # The first block has room for the first part; the others give way to the second one.
        ([BLOCK_BYTES, 3 * BLOCK_BYTES], 4),
    ],
)  # fmt: skip
def test_an_update_in_other_chunks_takes_no_second_memory(
    sizes: list[int], expected: int, monkeypatch: pytest.MonkeyPatch
):
    memory = HostMemory(CPU)
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 4 * BLOCK_BYTES - taken_by(memory))
    for one in memory.reserve([BLOCK_BYTES] * 3) or []:
        memory.take(one)
    memory.free()
    # A refusal changes nothing.
    assert memory.reserve([5 * BLOCK_BYTES]) is None
    places = memory.reserve(sizes)
    assert places is not None
    assert [len(memory.take(one)) for one in places] == sizes
    assert taken_by(memory) == expected * BLOCK_BYTES


def test_memory_that_others_have_taken_meanwhile_is_an_error(monkeypatch: pytest.MonkeyPatch):
    memory = HostMemory(CPU)
    (place,) = memory.reserve([BLOCK_BYTES]) or []
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(MemoryError, match=r"expected 0\.1 GiB of the host's memory, got 0\.0 GiB"):
        memory.take(place)


def test_what_other_processes_are_about_to_take_is_not_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 3 * BLOCK_BYTES)
    first, second = HostMemory(CPU), HostMemory(CPU)
    places = first.reserve([BLOCK_BYTES] * 2)
    assert places is not None
    assert second.free_bytes() == BLOCK_BYTES
    assert second.reserve([BLOCK_BYTES] * 2) is None
    # What is taken is free no more, which the kernel says.
    first.take(places[0])
    assert second.free_bytes() == 2 * BLOCK_BYTES
    # One that is ready again after a restart is told all that is left.
    first.take(places[1])
    first.free()
    assert second.free_bytes() == 3 * BLOCK_BYTES


def test_a_claim_ends_with_its_process(claims: Path):
    own, other = Claims(), Claims()
    for one, num_bytes in ((own, 5), (other, 1000)):
        with one.locked():
            one.add(num_bytes)
    assert (own.others(), other.others()) == (1000, 5)
    # As the kernel does.
    assert other._file is not None
    os.close(other._file)
    assert own.others() == 0
    assert len(list(claims.glob("*.claim"))) == 1
    # A folder that cannot be made: each counts for itself.
    claims.rename(claims.with_name("gone"))
    claims.write_text("")
    alone = Claims()
    with alone.locked():
        alone.add(7)
    assert alone.others() == 0


def cgroup(folder: Path, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached - 20}\nactive_file 20\n")


def test_the_least_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10_000))
    root, own = tmp_path / "cgroup", tmp_path / "own"
    # No cgroups at all.
    assert free_host_bytes(root, own) == 10_000
    own.write_text("0::/pod/container\n")
    assert free_host_bytes(root, own) == 10_000
    cgroup(root / "pod" / "container", "max", 700, 20)
    assert free_host_bytes(root, own) == 10_000
    cgroup(root / "pod", "8000", 3000, 1000)
    assert free_host_bytes(root, own) == 6000
    cgroup(root / "pod" / "container", "5000", 700, 50)
    assert free_host_bytes(root, own) == 4350
    cgroup(root / "pod" / "container", "600", 700, 20)
    assert free_host_bytes(root, own) == 0
    # Within a container the path is the mount's.
    own.write_text("0::/\n")
    cgroup(root, "2000", 100, 20)
    assert free_host_bytes(root, own) == 1920


def test_limits_of_the_first_version_of_cgroups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10_000))
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n")
    # In a container the path is the host's, and the folder is the container's.
    folder = root / "memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("5000\n")
    (folder / "memory.usage_in_bytes").write_text("1000\n")
    (folder / "memory.stat").write_text("cache 3\ntotal_inactive_file 30\ntotal_active_file 20\n")
    assert free_host_bytes(root, own) == 4050


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
