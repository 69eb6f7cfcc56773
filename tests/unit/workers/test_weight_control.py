"""A worker's response to each step of an update, with an engine that records its calls."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from tests.kit.workers.recording_engine import Worker, announcement, pool_state, run
from titopool.errors import InvalidRequest, TitopoolError, WeightUpdateFailed
from titopool.wire.commands import (
    AbortUpdate,
    AcceptInitialWeights,
    Action,
    ApplyUpdate,
    AwaitStep,
    BeginFolder,
    Command,
    EndTensors,
    GetStatus,
    JoinGroup,
    LeaveGroup,
    Pause,
    PrepareUpdate,
    Resume,
)
from titopool.wire.pool_state import PoolPause, PoolWeights
from titopool.wire.run_dir import forget_workers
from workers.in_model.checkpoint_files import digest_of_files
from workers.ledger import Ledger
from workers.weights import awaited
from workers.weights.steps import Steps


def test_a_worker_that_is_not_ready_refuses_commands():
    done = asyncio.run(Worker().ask(GetStatus()))
    assert done.code == "no_ready_worker"


def test_a_worker_has_a_method_for_each_command():
    assert set(Worker().control._methods) == set(get_args(Action))


def test_generation_is_paused_and_caches_are_cleared_before_weights_change():
    async def story(worker: Worker) -> None:
        await worker.begin()
        await worker.good(PrepareUpdate("u", "abort"))
        await worker.good(AwaitStep("prepare", "u"))
        await worker.good(ApplyUpdate("u"))
        await worker.good(AwaitStep("apply", "u"))

    worker = run(story)
    assert worker.engine.calls[-4:] == ["pause abort", "clear", "apply", "resume"]
    assert worker.engine.versions.current == 7
    assert worker.control.weights.clock == 2


def test_generation_is_paused_before_weights_arrive_in_the_kv_cache():
    async def story(worker: Worker) -> None:
        worker.engine.staging = "kv"
        await worker.begin()
        await worker.good(PrepareUpdate("u", "abort"))
        await worker.good(AwaitStep("prepare", "u"))
        await worker.good(ApplyUpdate("u"))
        result = await worker.good(AwaitStep("apply", "u"))
        assert result["staging"] == "kv"
        assert 0 < result["paused_s"] < 20

    worker = run(story)
    assert worker.engine.calls == [
        "join", "begin", "pause keep", "receive", "clear", "apply", "resume",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "cache, staging, policy, expected",
    [
        ("keep", "host", "keep", "keep keys"), ("prefer_keep", "beside", "keep", "keep keys"),
        ("prefer_keep", "kv", "keep", "clear"), ("clear", "beside", "keep", "clear"),
        # No request goes on that needs them.
        ("keep", "beside", "drain", "clear"), ("keep", "beside", "abort", "clear"),
    ],
)  # fmt: skip
def test_caches_are_kept_for_requests_that_go_on_where_weights_wait_elsewhere(
    cache: Any, staging: str, policy: Any, expected: str
):
    async def update(worker: Worker, name: str, **fields: Any) -> dict[str, Any]:
        await worker.good(announcement(name, **fields))
        await worker.good(PrepareUpdate(name, policy))
        await worker.good(AwaitStep("prepare", name))
        await worker.good(ApplyUpdate(name))
        return dict(await worker.good(AwaitStep("apply", name)))

    async def story(worker: Worker) -> None:
        worker.engine.staging = staging
        await worker.good(JoinGroup("s", "trl", "gloo", "127.0.0.1", 1, 0, 2))
        await worker.good(AwaitStep("join", "s"))
        result = await update(worker, "u", cache=cache)
        assert result["cache"] == ("keep" if expected == "keep keys" else "clear")
        # It holds for one update.
        assert (await update(worker, "v"))["cache"] == "clear"

    worker = run(story)
    cleared = [one for one in worker.engine.calls if one in ("keep keys", "clear")]
    assert cleared == [expected, "clear"]


@pytest.mark.parametrize("protocol", ["trl", "vllm"])
def test_a_tied_head_that_was_trained_leaves_the_old_weights(protocol: Any):
    async def story(worker: Worker) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            await worker.good(JoinGroup("s", protocol, "gloo", "127.0.0.1", port, 1, 2))
            await worker.good(AwaitStep("join", "s"))
            for update_id, ignored in (("u", []), ("v", ["lm_head.weight"])):
                worker.engine.ignored = ignored
                await worker.good(announcement(update_id))
                await worker.good(PrepareUpdate(update_id, "keep"))
                worker.engine.head_error = InvalidRequest("lm_head.weight: staged")
                done = await worker.ask(AwaitStep("prepare", update_id))
                if not ignored:
                    await worker.good(ApplyUpdate(update_id))
                    await worker.good(AwaitStep("apply", update_id))
        assert (done.code, done.message) == ("invalid_request", "lm_head.weight: staged")

    worker = run(story)
    assert worker.control.weights.version == 1
    assert worker.engine.calls.count("compare_heads") == 1


@pytest.mark.parametrize("lost", [{"num_received": 0}, {"error": "the peer is gone"}])
def test_generation_resumes_when_weights_do_not_arrive_in_the_kv_cache(lost: dict[str, Any]):
    async def story(worker: Worker) -> None:
        worker.engine.staging = "kv"
        await worker.begin()
        worker.engine.status.update(lost)
        while await worker.state() != "closed":
            await asyncio.sleep(0.05)

    worker = run(story)
    assert worker.engine.calls[-2:] == ["drop", "resume"]
    assert "apply" not in worker.engine.calls


def test_a_trainer_that_takes_over_resumes_generation_after_the_kv_cache_is_cleared():
    async def story(worker: Worker) -> None:
        worker.engine.staging = "kv"
        join = JoinGroup("s", "trl", "gloo", "127.0.0.1", 1, 0, 2, "gpu")
        await worker.good(join)
        await worker.good(AwaitStep("join", "s"))
        worker.engine.status["num_received"] = 0
        await worker.good(announcement("u", 7))
        while "clear" not in worker.engine.calls:
            await asyncio.sleep(0.01)
        await worker.good(msgspec.structs.replace(join, session="s2"))

    calls = run(story).engine.calls
    assert calls[calls.index("clear") + 1 :][:3] == ["drop", "resume", "join"]


def test_a_policy_that_cannot_be_followed_is_refused_before_anything_is_sent():
    async def story(worker: Worker) -> None:
        worker.engine.staging, worker.engine.can_keep = "kv", False
        await worker.good(JoinGroup("s", "trl", "gloo", "127.0.0.1", 1, 0, 2))
        await worker.good(AwaitStep("join", "s"))
        done = await worker.ask(announcement("u", 7, policy="keep"))
        assert (done.code, "policy" in done.message) == ("invalid_request", True)
        assert await worker.state() == "open"

    assert run(story).engine.calls == ["join"]


@pytest.mark.parametrize("is_clear", [True, False])
def test_generation_resumes_only_after_the_caches_that_weights_overwrite_are_clear(is_clear: bool):
    async def story(worker: Worker) -> None:
        worker.engine.staging = "kv"
        worker.engine.may_clear.clear()
        await worker.begin()
        while "clear" not in worker.engine.calls:
            await asyncio.sleep(0.01)
        worker.engine.may_clear.set()
        worker.engine.has_stuck_caches = not is_clear
        await worker.ask(AbortUpdate("u", "the trainer gave up"))

    worker = run(story)
    calls = worker.engine.calls
    assert calls[calls.index("receive") + 1 :][:3] == ["clear", "drop", "clear"]
    assert ("resume" in calls, bool(worker.broken)) == (is_clear, not is_clear)


@pytest.mark.parametrize("staging, is_safe", [("kv", False), ("beside", True)])
def test_a_kv_cache_that_is_not_cleared_ends_the_worker(staging: str, is_safe: bool):
    async def story(worker: Worker) -> None:
        worker.engine.staging = staging
        await worker.begin()
        while not is_safe and "receive" not in worker.engine.calls:
            await asyncio.sleep(0.01)
        worker.engine.drop_error = WeightUpdateFailed("staged: the receiver does not end")
        await worker.ask(AbortUpdate("u", "the trainer gave up"))
        assert "resume" not in worker.engine.calls
        assert bool(worker.broken) is not is_safe

    worker = run(story)
    assert ("pause keep" in worker.engine.calls) is not is_safe


def test_weights_in_place_are_loaded_while_generation_stands_and_then_committed():
    async def story(worker: Worker) -> None:
        worker.engine.staging = "in_place"
        await worker.begin()
        done = await worker.ask(PrepareUpdate("u", "abort", with_checksum=True))
        assert (done.code, "checksum: expected none" in done.message) == ("invalid_request", True)
        await worker.good(PrepareUpdate("u", "abort"))
        await worker.good(AwaitStep("prepare", "u"))
        assert worker.engine.calls[-1] == "load"
        await worker.good(ApplyUpdate("u"))
        assert (await worker.good(AwaitStep("apply", "u")))["staging"] == "in_place"
        totals = worker.control.update_totals["in_place"]
        assert (totals.num_applied, totals.num_failed) == (1, 0)
        assert 0 < totals.paused_s <= totals.update_s < 20
        # The next one may end without harm before its first byte.
        worker.engine.status["num_received"] = 0
        await worker.good(announcement("u2", 8))
        while worker.engine.calls.count("receive") < 2:
            await asyncio.sleep(0.01)
        await worker.good(AbortUpdate("u2", "the trainer gave up"))
        assert not worker.broken
        assert worker.control.update_totals["in_place"].num_failed == 1

    worker = run(story)
    assert worker.engine.calls[:7] == [
        "join", "begin", "pause keep", "receive", "clear", "load", "apply",
    ]  # fmt: skip
    assert worker.engine.calls.count("load") == 1
    assert worker.engine.calls.count("resume") == 2


@pytest.mark.parametrize(
    "stage, end",
    [
        # The trainer is gone, or the deadline passes.
        ({"load_error": WeightUpdateFailed("a chunk did not come")}, None),
        ({"load_waits": True}, None),
        ({"load_waits": True}, AbortUpdate("u", "the trainer gave up")),
        ({"load_waits": True}, LeaveGroup("s")),
        ({"load_waits": True}, JoinGroup("s2", "trl", "gloo", "127.0.0.1", 1, 0, 2, "gpu")),
        # All tensors are in the model, but another worker has failed.
        ({}, AbortUpdate("u", "another worker failed to prepare the update")),
    ],
    ids=["error", "deadline", "abort", "leave", "takeover", "after-the-load"],
)
def test_an_update_in_place_that_ends_ends_the_worker(stage: dict[str, Any], end: Action | None):
    async def story(worker: Worker) -> None:
        worker.engine.staging = "in_place"
        vars(worker.engine).update(stage)
        await worker.good(JoinGroup("s", "trl", "gloo", "127.0.0.1", 1, 0, 2, "gpu"))
        await worker.good(AwaitStep("join", "s"))
        await worker.good(announcement("u", 7))
        while "load" not in worker.engine.calls:
            await asyncio.sleep(0.01)
        if end is not None:
            await worker.ask(end)
        while not worker.broken:
            await asyncio.sleep(0.01)
        assert "an update in place has ended: " in worker.broken[0]
        # Nothing resumes until the process ends.
        done = await worker.ask(JoinGroup("s3", "trl", "gloo", "127.0.0.1", 1, 0, 2, "gpu"))
        assert (done.code, "this worker restarts" in done.message) == ("weight_update_failed", True)
        assert (await worker.good(GetStatus()))["is_restarting"]
        assert worker.control.phase == "catching_up"
        await asyncio.sleep(0.6)

    worker = run(story)
    assert "resume" not in worker.engine.calls
    assert worker.control.weights.is_initial
    assert worker.control.update_totals["in_place"].num_failed == 1


@pytest.mark.parametrize(
    "error, state", [(InvalidRequest("staged"), "open"), (WeightUpdateFailed("staged"), "closed")]
)
def test_refused_tensors_keep_the_group_and_a_failure_closes_it(error: TitopoolError, state: str):
    async def story(worker: Worker) -> None:
        worker.engine.begin_error = error
        with socket.create_server(("127.0.0.1", 0)) as trainer:
            port = trainer.getsockname()[1]
            await worker.good(JoinGroup("s", "vllm", "gloo", "127.0.0.1", port, 1, 2))
            await worker.good(AwaitStep("join", "s"))
            done = await worker.ask(announcement("u", 7))
        assert done.code == error.code
        assert await worker.state() == state

    run(story)


def test_a_trainer_with_an_nccl_id_need_not_listen():
    async def story(worker: Worker) -> None:
        worker.engine.status.update(num_received=0)
        join = JoinGroup("s", "vllm", "nccl", "", 0, 1, 2, nccl_id=bytes(range(128)))
        await worker.good(join)
        await worker.good(AwaitStep("join", "s"))
        assert worker.engine.join_args["nccl_id"] == bytes(range(128))
        await worker.good(announcement("u", 7))
        # The watch looks for a trainer that is gone several times.
        await asyncio.sleep(0.6)
        assert await worker.state() == "receiving"

    run(story, Worker(timeout_s=30))


def test_what_an_update_waits_for_is_shown_and_logged_once_a_stall(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(awaited, "STALL_S", 0.3)

    async def until(condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.02)

    async def shown(worker: Worker) -> Any:
        return (await worker.good(GetStatus()))["awaited"]

    async def story(worker: Worker) -> None:
        status = worker.engine.status
        status.update(is_joined=False, awaited={"rank": 1, "missing_ranks": [2, 3]})
        await worker.good(JoinGroup("s", "trl", "gloo", "127.0.0.1", 1, 0, 2))
        await until(lambda: "ranks 2, 3 to join the group" in caplog.text)
        found = {"ranks": [1], "missing_ranks": [2, 3]}
        assert await shown(worker) == {
            **found, "message": "rank 1 waits for ranks 2, 3 to join the group"
        }  # fmt: skip
        status.update(is_joined=True, awaited=None)
        await worker.good(AwaitStep("join", "s"))
        assert await shown(worker) is None
        await worker.good(announcement("u", 7))
        counts = {"num_received": 3, "num_announced": 9, "bytes_announced": 900}
        for num_bytes in (300, 600):
            waiting = {"rank": 1, "tensor": "w", **counts, "bytes_received": num_bytes}
            status.update(num_received=0, awaited=waiting)
            text = f"rank 1 waits for w: 3 of 9 tensors have come, {num_bytes} of 900 bytes"
            await until(lambda text=text: text in caplog.text)  # type: ignore[misc]
            assert (await shown(worker))["message"] == text
        # Several more looks.
        status["num_looks"] = 0
        await until(lambda: status["num_looks"] > 3)
        status.update(num_received=1, awaited=None)
        await worker.good(PrepareUpdate("u", "keep"))
        await worker.good(AwaitStep("prepare", "u"))
        assert await shown(worker) is None

    run(story, Worker(timeout_s=30))
    stalls = [one.getMessage() for one in caplog.records if "nothing has come" in one.getMessage()]
    assert len(stalls) == 3, stalls


def test_the_slowest_of_a_worker_s_processes_decides_what_is_awaited():
    def process(rank: int, name: str, num_bytes: int) -> dict[str, Any]:
        return {"rank": rank, "tensor": name, "num_received": 1, "num_announced": 2,
                "bytes_received": num_bytes, "bytes_announced": 64}  # fmt: skip

    found = awaited.awaited_by([process(4, "late", 32), process(3, "early", 16)])
    assert (found["ranks"], found["tensor"], found["bytes_received"]) == ([3, 4], "early", 16)
    joining = [{"rank": 2, "missing_ranks": [0]}, {"rank": 1, "missing_ranks": [3]}]
    assert awaited.awaited_by(joining)["missing_ranks"] == [0, 3]
    unknown = awaited.awaited_by([*joining, {"rank": 4, "missing_ranks": None}])
    assert (unknown["missing_ranks"], "in NCCL" in unknown["message"]) == (None, True)


@pytest.mark.parametrize(
    "stage, code",
    [
        (lambda engine: setattr(engine, "has_stuck_caches", True), "weight_update_failed"),
        (lambda engine: setattr(engine, "is_stuck", True), "deadline_passed"),
        (lambda engine: engine.status.update(num_received=0), "deadline_passed"),
        (lambda engine: engine.status.update(error="the peer is gone"), "weight_update_failed"),
    ],
    ids=["caches-stay", "drain-hangs", "nothing-comes", "receiver-fails"],
)
def test_a_failure_before_apply_keeps_the_old_weights(stage: Any, code: str):
    async def story(worker: Worker) -> None:
        await worker.begin()
        stage(worker.engine)
        await worker.good(PrepareUpdate("u", "drain"))
        done = await worker.ask(AwaitStep("prepare", "u"))
        assert done.code == code, done
        assert await worker.state() == "closed"
        assert (await worker.ask(ApplyUpdate("u"))).code == "conflict"

    worker = run(story)
    assert "apply" not in worker.engine.calls
    assert worker.engine.calls[-1] in ("drop", "resume")
    # Every pause has been resumed.
    assert worker.engine.calls.count("resume") == sum("pause" in one for one in worker.engine.calls)
    assert not worker.broken


def test_generation_resumes_when_a_prepared_update_is_not_applied():
    """As when the front end that leads the commit dies after preparing."""

    async def story(worker: Worker) -> None:
        await worker.begin()
        await worker.good(PrepareUpdate("u", "keep"))
        await worker.good(AwaitStep("prepare", "u"))
        assert await worker.state() == "prepared"
        while await worker.state() != "closed":
            await asyncio.sleep(0.05)

    worker = run(story)
    assert worker.engine.calls[-2:] == ["drop", "resume"]
    assert worker.engine.versions.current == 0


def test_a_lease_is_renewed_and_expires():
    async def story(worker: Worker) -> None:
        for _ in range(3):
            await worker.good(Pause("keep", 0.5))
            await asyncio.sleep(0.3)
        assert worker.engine.calls == ["pause keep"]
        await asyncio.sleep(0.7)
        assert worker.engine.calls == ["pause keep", "resume"]
        assert await worker.good(Resume()) == {"was_paused": False}

    run(story)


def test_a_restarted_worker_waits_for_weights_or_loads_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "root" / "weights"
    folder.mkdir(parents=True)
    ledger = Ledger(str(tmp_path), "0")

    async def do_nothing(worker: Worker) -> None:
        return None

    def restarted() -> Worker:
        return run(do_nothing, Worker(str(tmp_path), str(tmp_path / "root")))

    assert restarted().control.phase == "ready"
    ledger.write(pool_state(PoolWeights(3, "u", 5, False)))
    worker = restarted()
    assert worker.control.phase == "waiting_for_weights"
    assert worker.engine.calls == []
    files = digest_of_files(str(folder))
    ledger.write(pool_state(PoolWeights(3, "u", 5, False, str(folder), files)))
    worker = restarted()
    assert worker.control.phase == "ready"
    assert (worker.engine.versions.current, worker.control.weights.clock) == (5, 3)
    folder.rmdir()
    assert restarted().control.phase == "catching_up"
    monkeypatch.setattr("workers.serving.catch_up.MAX_TRIES", 1)
    assert restarted().control.phase == "waiting_for_weights"
    forget_workers(str(tmp_path))
    assert restarted().control.phase == "ready"


def written_during(worker: Worker, method: str, folder: Path) -> None:
    """Lets a trainer write to `folder` while the engine runs `method`."""
    call = worker.engine.call

    async def call_and_write(name: str, *args: Any) -> list[Any]:
        if name == method:
            (folder / "model.safetensors").write_text("of the next step")
        return await call(name, *args)

    worker.engine.call = call_and_write  # type: ignore[method-assign]


@pytest.mark.parametrize("method", ["check_folder", "apply"])
def test_a_folder_that_changes_while_it_is_loaded_does_not_serve(tmp_path: Path, method: str):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_text("of this step")

    async def story(worker: Worker) -> None:
        written_during(worker, method, folder)
        await worker.good(BeginFolder("f", 9, 1, str(folder)))
        for late in ("optimizer.pt", "training_state.safetensors", "adapter_model.safetensors"):
            (folder / late).write_text("comes after the weights, and counts for nothing")
        await worker.good(PrepareUpdate("f", "keep"))
        failed = await worker.ask(AwaitStep("prepare", "f"))
        if method == "apply":
            assert not failed.code
            await worker.good(ApplyUpdate("f"))
            failed = await worker.ask(AwaitStep("apply", "f"))
        assert f"{folder}: expected the files that were there" in failed.message

    worker = run(story, Worker(root=str(tmp_path)))
    assert worker.engine.versions.current == worker.control.weights.version == 0
    # Before the load the old weights serve on; after it the model has both.
    assert len(worker.broken) == (method == "apply")
    assert ("resume" in worker.engine.calls) == (method != "apply")


def test_workers_that_see_different_folders_do_not_load_them(tmp_path: Path):
    folder = tmp_path / "weights"
    folder.mkdir()

    async def story(worker: Worker) -> None:
        first = await worker.good(BeginFolder("f", 9, 1, str(folder)))
        await worker.good(AbortUpdate("f", "staged"))
        (folder / "model.safetensors").write_text("elsewhere")
        again = BeginFolder("g", 9, 1, str(folder), files=first["files"])
        done = await worker.ask(again)
        assert done.code == "conflict"
        assert "workers see different folders" in done.message
        assert await worker.state() == "closed"

    run(story, Worker(root=str(tmp_path)))


def test_a_folder_that_changes_while_a_worker_catches_up_does_not_serve(tmp_path: Path):
    folder = tmp_path / "weights"
    folder.mkdir()
    wanted = PoolWeights(3, "u", 5, False, str(folder), digest_of_files(str(folder)))

    async def story(worker: Worker) -> None:
        written_during(worker, "check_folder", folder)
        worker.control.merge_pool_state(pool_state(wanted))
        while worker.control.phase != "waiting_for_weights":
            await asyncio.sleep(0.02)
        status = await worker.good(GetStatus())
        assert "has changed since the update" in status["why_behind"]
        assert "apply" not in worker.engine.calls

    run(story, Worker(root=str(tmp_path)))


def test_a_worker_that_starts_loads_the_folder_once(tmp_path: Path):
    folder = tmp_path / "weights"
    folder.mkdir()
    weights = PoolWeights(3, "u", 5, False, str(folder), digest_of_files(str(folder)))
    worker = Worker(root=str(tmp_path))
    call = worker.engine.call

    async def call_slowly(*args: Any) -> list[Any]:
        await asyncio.sleep(0.05)
        return await call(*args)

    async def start() -> None:
        worker.engine.call = call_slowly  # type: ignore[method-assign]
        following = asyncio.create_task(worker.control.follow_pool())
        worker.control.merge_pool_state(pool_state(weights))
        starting = asyncio.create_task(worker.control.start("m"))
        await asyncio.sleep(0.02)
        # A front end's greeting comes while the worker starts.
        worker.control.merge_pool_state(pool_state(weights, PoolPause(1)))
        await asyncio.wait_for(starting, 10)
        async with asyncio.timeout(10):
            while worker.control.phase != "ready":
                await asyncio.sleep(0.01)
        following.cancel()

    asyncio.run(start())
    assert worker.engine.calls.count("check_folder") == 1


def test_a_waiting_worker_accepts_only_complete_updates(tmp_path: Path):
    Ledger(str(tmp_path), "0").write(pool_state(PoolWeights(3, "before", 5, False)))

    async def story(worker: Worker) -> None:
        await worker.good(JoinGroup("s", "trl", "gloo", "127.0.0.1", 1, 0, 2))
        await worker.good(AwaitStep("join", "s"))
        done = await worker.ask(announcement("u", 6, is_partial=True))
        assert done.code == "conflict"
        assert "send a complete update" in done.message
        await worker.good(announcement("u", 6))
        await worker.good(PrepareUpdate("u", "keep"))
        await worker.good(AwaitStep("prepare", "u"))
        await worker.good(ApplyUpdate("u"))
        await worker.good(AwaitStep("apply", "u"))

    worker = run(story, Worker(str(tmp_path)))
    assert worker.control.phase == "ready"
    assert Ledger(str(tmp_path), "0").read().weights == PoolWeights(4, "u", 6, False)


def test_folders_outside_the_root_are_refused(tmp_path: Path):
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")

    async def story(worker: Worker) -> None:
        for path in ("/", str(tmp_path / "secret"), str(tmp_path / "root" / "link"), "", "root"):
            done = await worker.ask(BeginFolder("u", None, 0, path))
            assert done.code == "invalid_request", path
        assert await worker.state() == "closed"

    run(story, Worker(root=str(tmp_path / "root")))


# ---- what holds generation ---------------------------------------------------------------


@pytest.mark.parametrize("phase", ["preparing", "prepared"])
def test_a_session_is_not_closed_during_a_commit(phase: str):
    async def story(worker: Worker) -> None:
        worker.engine.is_stuck = phase == "preparing"
        await worker.begin()
        await worker.good(PrepareUpdate("u", "drain"))
        if phase == "prepared":
            await worker.good(AwaitStep("prepare", "u"))
        while "pause drain" not in worker.engine.calls:
            await asyncio.sleep(0.01)
        done = await worker.ask(LeaveGroup("s"))
        assert done.code == "conflict"
        assert "no commit in progress" in done.message
        assert await worker.state() == phase
        await worker.good(AbortUpdate("u", "the trainer gave up"))
        assert await worker.state() == "closed"

    assert run(story).engine.calls[-1] == "resume"


def test_generation_never_stays_paused_without_a_reason():
    """If no step resumes generation, the watch does."""

    async def story(worker: Worker) -> None:
        await worker.control._pauses.begin_commit(worker.engine, "keep")
        while worker.control._pauses.is_committing:
            await asyncio.sleep(0.05)

    assert run(story).engine.calls == ["pause keep", "resume"]


def test_a_pause_during_a_commit_begins_after_it():
    async def story(worker: Worker) -> None:
        await worker.begin()
        await worker.good(PrepareUpdate("u", "keep"))
        await worker.good(AwaitStep("prepare", "u"))
        pausing = asyncio.create_task(worker.good(Pause("abort", 30)))
        await asyncio.sleep(0)
        await worker.good(ApplyUpdate("u"))
        await worker.good(AwaitStep("apply", "u"))
        await pausing
        assert (await worker.good(GetStatus()))["is_paused"]
        await worker.good(Resume())

    assert run(story).engine.calls[-4:] == ["clear", "apply", "pause abort", "resume"]


def test_a_lost_front_end_that_leads_a_commit_ends_the_update():
    async def story(worker: Worker) -> None:
        await worker.begin()
        prepare = Command("i", 1, PrepareUpdate("u", "keep"))
        assert (await worker.control.answer(prepare, b"leader")).code == ""
        await worker.good(AwaitStep("prepare", "u"))
        await worker.control.on_front_end_lost(b"another")
        assert await worker.state() == "prepared"
        await worker.control.on_front_end_lost(b"leader")
        assert await worker.state() == "closed"

    worker = run(story)
    assert worker.engine.calls[-1] == "resume"
    assert worker.engine.versions.current == 0


def test_a_prepared_worker_applies_when_the_pool_has_applied():
    async def story(worker: Worker) -> None:
        await worker.begin()
        await worker.good(PrepareUpdate("u", "keep"))
        await worker.good(AwaitStep("prepare", "u"))
        worker.control.merge_pool_state(pool_state(PoolWeights(2, "u", 7, False)))
        while await worker.state() != "open":
            await asyncio.sleep(0.02)
        assert worker.engine.versions.current == 7
        # The apply command itself arrives late.
        await worker.good(ApplyUpdate("u"))
        assert (await worker.good(AwaitStep("apply", "u")))["version"] == 7

    assert run(story).engine.calls.count("apply") == 1


def test_a_prepared_worker_aborts_when_the_pool_has_another_update():
    async def story(worker: Worker) -> None:
        await worker.begin()
        await worker.good(PrepareUpdate("u", "keep"))
        await worker.good(AwaitStep("prepare", "u"))
        worker.control.merge_pool_state(pool_state(PoolWeights(2, "other", 9, False)))
        while await worker.state() != "closed":
            await asyncio.sleep(0.02)
        assert worker.control.phase == "waiting_for_weights"

    assert "apply" not in run(story).engine.calls


def test_a_drain_beyond_its_lease_does_not_block_catching_up():
    async def story(worker: Worker) -> None:
        # vLLM answers a drain when nothing is in flight; under load that may never happen.
        worker.engine.is_stuck = True
        worker.control.merge_pool_state(pool_state(PoolWeights(), PoolPause(1, "drain", 60.0)))
        while "pause drain" not in worker.engine.calls:
            await asyncio.sleep(0.02)
        worker.control.merge_pool_state(
            pool_state(PoolWeights(3, "v", 9, False), PoolPause(2, "keep", 600.0))
        )
        while (await worker.good(GetStatus()))["lease_left_s"] < 100:
            await asyncio.sleep(0.02)
        assert worker.control.phase == "waiting_for_weights"
        worker.control.merge_pool_state(pool_state(PoolWeights(3, "v", 9, False), PoolPause(3)))
        while (await worker.good(GetStatus()))["is_paused"]:
            await asyncio.sleep(0.02)

    assert run(story).engine.calls[-1] == "resume"


def test_a_folder_that_fails_to_load_is_tried_again(tmp_path: Path):
    folder = tmp_path / "root" / "weights"
    folder.mkdir(parents=True)
    files = digest_of_files(str(folder))

    async def story(worker: Worker) -> None:
        worker.engine.begin_error = InvalidRequest("staged: the file server is away")
        # A model that cannot keep requests, in a pool that is paused with mode `keep`.
        worker.engine.can_keep = False
        wanted = PoolWeights(3, "v", 9, False, str(folder), files)
        worker.control.merge_pool_state(pool_state(wanted, PoolPause(1, "keep", 60.0)))
        await asyncio.sleep(0.2)
        assert worker.control.phase == "catching_up"
        assert await worker.state() == "closed"
        worker.engine.begin_error = None
        while worker.control.phase != "ready":
            await asyncio.sleep(0.02)
        assert worker.control.weights.version == 9
        assert (await worker.good(GetStatus()))["is_paused"]

    assert "pause abort" in run(story, Worker(root=str(tmp_path / "root"))).engine.calls


def test_a_folder_update_in_a_trl_session_is_separate_from_its_updates(
    tmp_path: Path,
):
    folder = tmp_path / "root" / "weights"
    folder.mkdir(parents=True)

    async def story(worker: Worker) -> None:
        await worker.good(JoinGroup("s", "trl", "gloo", "127.0.0.1", 1, 0, 2, calls="tensors"))
        await worker.good(AwaitStep("join", "s"))
        await worker.good(BeginFolder("f", 9, 1, str(folder)))
        # Neither a job nor the client's call ends the update.
        await worker.control.before_job()
        await worker.good(EndTensors(is_last_call=True))
        await worker.good(AwaitStep("finish", "tensors"))
        assert await worker.state() == "receiving"
        await worker.good(PrepareUpdate("f", "keep"))
        await worker.good(AwaitStep("prepare", "f"))
        await worker.good(ApplyUpdate("f"))
        assert (await worker.good(AwaitStep("apply", "f")))["version"] == 9
        assert await worker.state() == "open"

    run(story, Worker(root=str(tmp_path / "root")))


def test_a_worker_with_initial_weights_accepts_them_without_restart():
    async def story(worker: Worker) -> None:
        worker.control.merge_pool_state(pool_state(PoolWeights(4, "u", 9, False)))
        assert worker.control.phase == "waiting_for_weights"
        assert await worker.good(AcceptInitialWeights("own", 5)) == {"restarts": False}
        assert worker.control.phase == "ready"
        done = await worker.ask(AcceptInitialWeights("own-2", 6))
        assert done.code == "conflict"

    assert not run(story).broken


def test_a_worker_with_other_weights_restarts_to_accept_initial_ones():
    async def story(worker: Worker) -> None:
        await worker.begin()
        await worker.good(PrepareUpdate("u", "keep"))
        await worker.good(AwaitStep("prepare", "u"))
        await worker.good(ApplyUpdate("u"))
        await worker.good(AwaitStep("apply", "u"))
        worker.control.merge_pool_state(pool_state(PoolWeights(4, "v", 9, False)))
        assert worker.control.phase == "stale"
        num_before = worker.num_changes
        assert await worker.good(AcceptInitialWeights("own", 5)) == {"restarts": True}
        # Front ends learn it before the worker ends.
        assert worker.num_changes > num_before

    assert "own weights" in run(story).broken[0]


def test_a_repeated_finish_step_outlives_many_pauses():
    async def story(worker: Worker) -> None:
        steps = Steps()
        ends = asyncio.Event()

        async def quick() -> dict[str, Any]:
            return {}

        async def slow() -> dict[str, Any]:
            await ends.wait()
            return {"is": "there"}

        steps.start("finish", "trl", quick())
        for index in range(40):
            steps.start("pause", str(index), quick())
        await asyncio.sleep(0)
        steps.start("finish", "trl", slow())
        for index in range(40, 80):
            steps.start("pause", str(index), quick())
            await asyncio.sleep(0)
        assert steps.is_running("finish", "trl")
        ends.set()
        assert await steps.wait("finish", "trl") == {"is": "there"}

    run(story)


def test_an_update_from_a_folder_renews_a_pause_and_brings_its_label(tmp_path: Path):
    folder = tmp_path / "root" / "weights"
    folder.mkdir(parents=True)
    steps = [
        BeginFolder("f", 9, 1, str(folder), "step-9"), PrepareUpdate("f", "keep"), ApplyUpdate("f"),
    ]  # fmt: skip

    async def story(worker: Worker) -> None:
        await worker.good(Pause("keep", 1000, is_renewed=True))
        for step in steps:
            # As if the rest of the lease had passed.
            worker.control._pauses._set_lease("keep", 500)
            await worker.good(step)
            assert (await worker.good(GetStatus()))["lease_left_s"] > 500, step
            if isinstance(step, PrepareUpdate):
                await worker.good(AwaitStep("prepare", "f"))
        assert (await worker.good(AwaitStep("apply", "f")))["version"] == 9
        assert worker.control.weights.shown_label == "step-9"
        assert "resume" not in worker.engine.calls

    run(story, Worker(root=str(tmp_path / "root")))
