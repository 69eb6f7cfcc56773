"""A worker's response to the calls of vLLM's routes, with an engine that records its calls."""

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from tests.kit.workers.recording_engine import (
    TIMEOUT_S,
    RecordingEngine,
    Worker,
    announcement,
    run,
)
from titopool.errors import InvalidRequest, WeightUpdateFailed
from titopool.wire.commands import (
    AbortUpdate,
    AnnounceTensors,
    ApplyUpdate,
    AwaitStep,
    ClearCaches,
    EndTensors,
    GetStatus,
    JoinGroup,
    LeaveGroup,
    Pause,
    PrepareUpdate,
    Resume,
    SetLabel,
    TensorInfo,
)
from titopool.wire.pool_state import PoolWeights
from workers.weights import list_trainer

Q, K, V, NORM = (TensorInfo(name, "float32", [2, 2]) for name in ("q", "k", "v", "norm"))
LAYER, MODEL = [Q, K, V], [Q, K, V, NORM]


def receive(list_id: str, tensors: list[TensorInfo], **fields: Any) -> AnnounceTensors:
    return AnnounceTensors("lists", list_id=list_id, tensors=tensors, **fields)


class ModelEngine(RecordingEngine):
    """A model of one fused layer (q, k, v) and one norm; it has what was taken, unless it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[list[str], int]] = []
        # Whether the trainer sends nothing.
        self.waits = False
        self.refuses = ""
        self.num_announced = 0

    async def call(self, method: str, *args: Any) -> list[Any]:
        names = []
        if method in ("check", "take"):
            names = [one[0] for one in msgspec.msgpack.decode(args[0])]
            if self.refuses in names:
                raise InvalidRequest(f"{self.refuses}: staged refusal")
        if method == "take":
            self.taken.append((names, args[1]))
            self.num_announced += len(names)
        if method == "drop":
            self.num_announced = 0
        answers = await super().call(method, *args)
        if method == "check":
            begun = {"q", "k", "v"} & set(names)
            split = {"q", "k", "v"} - begun if begun else set()
            missing = sorted({one.name for one in MODEL} - set(names))
            answers = [{**answers[0], "missing": missing, "split_layers": ", ".join(sorted(split))}]
        elif method == "status":
            num_received = 0 if self.waits else self.num_announced
            counts = {"num_announced": self.num_announced, "num_received": num_received}
            awaited = {"rank": 1, "tensor": "q", "bytes_received": 0, "bytes_announced": 64}
            answers = [
                {**answers[0], **counts, "awaited": {**awaited, **counts} if self.waits else None}
            ]
        elif method == "set_aside":
            answers = [True]
        elif method == "digests":
            answers = [{"dp0:tp0:w": "a" * 64}]
        return answers


class StockWorker(Worker):
    """A worker to which a trainer at `port` speaks through vLLM's routes."""

    engine: ModelEngine

    def __init__(self, port: int, **init_info: Any):
        super().__init__()
        engine = ModelEngine()
        self.engine = engine
        self.control._model = engine  # type: ignore[assignment]
        self.port = port
        self.init_info = init_info

    def group(self, session: str = "s", port: int = 0) -> JoinGroup:
        return JoinGroup(
            session, "vllm", "gloo", "127.0.0.1", port or self.port, 1, 2,
            calls="lists", **self.init_info,
        )  # fmt: skip

    async def init(self, session: str = "s", port: int = 0) -> None:
        await self.good(self.group(session, port))
        await self.good(AwaitStep("join", session))

    async def start(self, update_id: str = "u") -> dict[str, Any]:
        return await self.good(AnnounceTensors("lists", update_id))

    async def send(self, tensors: list[TensorInfo], name: str = "list", **fields: Any) -> None:
        accepted = await self.good(receive(name, tensors, **fields))
        await self.good(AwaitStep("receive", accepted["list_id"]))

    async def end(self, label: str = "") -> dict[str, Any]:
        return await self.good(EndTensors(label=label))

    async def commit(self, update_id: str = "u") -> None:
        await self.good(PrepareUpdate(update_id, None))
        await self.good(AwaitStep("prepare", update_id))
        await self.good(ApplyUpdate(update_id))
        await self.good(AwaitStep("apply", update_id))


def test_a_tied_head_that_was_trained_leaves_the_old_weights(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        worker.engine.ignored = ["lm_head.weight"]
        worker.engine.head_error = InvalidRequest("lm_head.weight: staged")
        await worker.send(MODEL)
        await worker.end()
        await worker.good(PrepareUpdate("u", None))
        done = await worker.ask(AwaitStep("prepare", "u"))
        assert (done.code, done.message) == ("invalid_request", "lm_head.weight: staged")

    worker = run(story, StockWorker(port))  # type: ignore[arg-type]
    assert worker.control.weights.version == 0


def test_an_update_is_staged_at_each_list_and_applied_at_the_commit(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        await worker.send([Q, K], "one")
        await worker.send([V, NORM], "two", packed=True, packed_bytes=64)
        assert "apply" not in worker.engine.calls
        assert "pause keep" not in worker.engine.calls
        ended = await worker.end("step-7")
        assert ended == {"update_id": "u", "is_ready": True, "split_layers": ""}
        await worker.commit()
        assert await worker.state() == "open"
        # The next update of the same session.
        await worker.start("u2")
        await worker.send(MODEL)
        await worker.end()
        await worker.commit("u2")

    worker = run(story, StockWorker(port))  # type: ignore[arg-type]
    assert worker.engine.taken == [
        (["q", "k"], 0),
        (["v", "norm"], 64),
        (["q", "k", "v", "norm"], 0),
    ]
    assert worker.engine.calls.count("apply") == 2
    # The first list, both together at the end, and the only list before it came.
    assert worker.engine.calls.count("check") == 3
    assert worker.control.weights.version == 2
    assert worker.control.weights.label == ""


@pytest.mark.parametrize(
    "session, call, chunk_bytes",
    [
        ({}, {}, 0),
        ({"packed": True}, {}, 2**30),
        ({"packed": True, "packed_bytes": 512}, {}, 512),
        ({"packed": True, "packed_bytes": 512}, {"packed_bytes": 64}, 64),
        ({"packed": True}, {"packed": False}, 0),
        ({}, {"packed": True}, 2**30),
        ({"packed_bytes": 512}, {"packed": True}, 512),
    ],
)
def test_a_call_overrides_how_the_session_packs(
    port: int, session: dict[str, Any], call: dict[str, Any], chunk_bytes: int
):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        await worker.send(MODEL, **call)

    worker = run(story, StockWorker(port, **session))  # type: ignore[arg-type]
    assert worker.engine.taken == [(["q", "k", "v", "norm"], chunk_bytes)]


def test_an_empty_list_repeats_the_last_list_of_the_session_only(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        done = await worker.ask(receive("list", []))
        assert (done.code, "send the names" in done.message) == ("invalid_request", True)
        await worker.send(LAYER)
        await worker.end()
        await worker.commit()
        await worker.start("u2")
        await worker.send([], "again")
        await worker.end()
        await worker.commit("u2")
        await worker.init("s2")
        await worker.start("u3")
        assert (await worker.ask(receive("third", []))).code == "invalid_request"

    worker = run(story, StockWorker(port))  # type: ignore[arg-type]
    assert worker.engine.taken == [(["q", "k", "v"], 0)] * 2


def test_a_repeated_list_joins_its_step_and_is_not_received_twice(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        worker.engine.waits = True
        first = await worker.good(receive("one", MODEL))
        assert await worker.good(receive("two", MODEL)) == first
        other = await worker.ask(receive("three", [NORM]))
        assert (other.code, "the end of the list before" in other.message) == ("conflict", True)
        assert (await worker.ask(EndTensors())).code == "conflict"
        while not (awaited := (await worker.good(GetStatus()))["awaited"]):
            await asyncio.sleep(0.01)
        message = "rank 1 waits for q: 0 of 4 tensors have come, 0 of 64 bytes"
        assert awaited == {
            "ranks": [1], "tensor": "q", "num_received": 0, "num_announced": 4,
            "bytes_received": 0, "bytes_announced": 64, "message": message,
        }  # fmt: skip
        worker.engine.waits = False
        await worker.good(AwaitStep("receive", "one"))
        assert (await worker.good(GetStatus()))["awaited"] is None
        # The connection may have been cut just before the answer.
        assert await worker.good(receive("four", MODEL)) == first
        await worker.end()
        await worker.commit()

    worker = run(story, StockWorker(port))  # type: ignore[arg-type]
    assert len(worker.engine.taken) == 1


def test_parts_of_a_layer_wait_for_the_rest_over_several_updates(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        first = await worker.start("first")
        await worker.send([Q])
        ended = await worker.end()
        assert (ended["is_ready"], ended["split_layers"]) == (False, "k, v")
        # The version is that of the update that the parts began.
        second = await worker.start("second")
        assert second == first
        # The same list again, with newer values.
        await worker.send([Q])
        await worker.send([K])
        assert not (await worker.end())["is_ready"]
        await worker.start("third")
        await worker.send([V])
        assert (await worker.end())["is_ready"]
        await worker.commit("first")
        # A layer that is whole by itself needs no other.
        await worker.start("fourth")
        await worker.send([NORM])
        assert (await worker.end())["is_ready"]

    worker = run(story, StockWorker(port))  # type: ignore[arg-type]
    assert worker.engine.taken[:3] == [(["q"], 0), (["q"], 0), (["k"], 0)]
    assert worker.engine.calls.count("apply") == 1
    assert worker.control.weights.version == 1


def test_the_last_call_refuses_what_no_layer_will_need(port: int):
    async def story(worker: StockWorker) -> None:
        assert (await worker.good(EndTensors(is_last_call=True)))["update_id"] is None
        await worker.init()
        assert (await worker.good(EndTensors(is_last_call=True)))["update_id"] is None
        await worker.start()
        await worker.send([Q])
        # The update has not ended: only the caches are emptied.
        assert (await worker.good(EndTensors(is_last_call=True)))["update_id"] is None
        await worker.end()
        done = await worker.ask(EndTensors(is_last_call=True))
        assert (done.code, "send these too: k, v" in done.message) == ("invalid_request", True)
        assert await worker.state() == "open"
        await worker.start("u2")
        await worker.send(LAYER)
        assert (await worker.end())["is_ready"]
        await worker.commit("u2")

    assert run(story, StockWorker(port)).engine.calls.count("apply") == 1  # type: ignore[arg-type]


def test_calls_in_a_wrong_order_change_nothing(port: int):
    async def story(worker: StockWorker) -> None:
        async def refused(action: Any, text: str) -> None:
            done = await worker.ask(action)
            assert (done.code, text in done.message) == ("conflict", True), done

        start, listed = AnnounceTensors("lists", "u"), receive("l", MODEL)
        await refused(start, "call init_weight_transfer_engine first")
        await refused(listed, "call start_weight_update first")
        await refused(EndTensors(), "call start_weight_update first")
        await worker.init()
        await refused(listed, "call start_weight_update first")
        await refused(EndTensors(), "call start_weight_update first")
        await worker.start()
        await refused(AnnounceTensors("lists", "u2"), "call finish_weight_update first")
        await refused(LeaveGroup(None, "lists"), "no update")
        await refused(PrepareUpdate("u", None), "call of finish_weight_update first")
        await refused(announcement("u3"), "without an update")
        # An update without tensors.
        assert await worker.end() == {"update_id": None, "is_ready": False, "split_layers": ""}
        await refused(EndTensors(), "call start_weight_update first")
        await worker.start("u4")
        await worker.send(MODEL)
        await worker.end()
        await worker.commit("u4")
        await worker.good(LeaveGroup(None, "lists"))
        await worker.good(LeaveGroup(None, "lists"))
        assert await worker.state() == "closed"

    worker = run(story, StockWorker(port))  # type: ignore[arg-type]
    assert worker.control.weights.version == 1


def test_the_first_update_of_a_pool_may_be_a_part_at_every_worker(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        # As the front end tells the second worker: without a known change the clock is the time.
        begun = AnnounceTensors("lists", "u", 1, 1_700_000_000, 0, "s")
        assert (await worker.good(begun))["clock"] == 1_700_000_000
        await worker.send(LAYER)
        await worker.end()
        await worker.commit()
        # This worker has missed an update that the front end knows of.
        await worker.good(AnnounceTensors("lists", "u2", 3, 1_700_000_005, 1_700_000_005, "s"))
        await worker.send(LAYER)
        await worker.end()
        await worker.good(PrepareUpdate("u2", None))
        done = await worker.ask(AwaitStep("prepare", "u2"))
        assert (done.code, "send a complete update" in done.message) == ("conflict", True)

    worker = run(story, StockWorker(port))  # type: ignore[arg-type]
    assert worker.control.weights.order == (1_700_000_001, "u")


def test_another_worker_s_update_is_refused(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        done = await worker.ask(AnnounceTensors("lists", "u", session="other"))
        assert done.code == "conflict"
        await worker.start()
        done = await worker.ask(receive("l", MODEL, update_id="other"))
        assert (done.code, "update other" in done.message) == ("conflict", True)
        assert (await worker.ask(EndTensors("other"))).code == "conflict"

    assert not run(story, StockWorker(port)).engine.taken  # type: ignore[arg-type,attr-defined]


# ---- failures ----------------------------------------------------------------------------


def test_a_refused_list_ends_the_group_because_the_trainer_sends_already(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        worker.engine.refuses = "norm"
        done = await worker.ask(receive("l", MODEL))
        assert done.code == "invalid_request"
        assert await worker.state() == "closed"
        worker.engine.refuses = ""
        await worker.init("s2")
        await worker.start("u2")
        await worker.send(MODEL)
        await worker.end()
        await worker.commit("u2")

    worker = run(story, StockWorker(port))  # type: ignore[arg-type]
    assert worker.control.weights.version == 1


def test_tensors_refused_at_the_end_leave_the_group_for_the_next_update(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        await worker.send([Q], "one")
        await worker.send([K, V], "two")
        worker.engine.refuses = "q"
        assert (await worker.ask(EndTensors())).code == "invalid_request"
        assert await worker.state() == "open"
        worker.engine.refuses = ""
        await worker.start("u2")
        await worker.send(LAYER)
        await worker.end()
        await worker.commit("u2")

    assert run(story, StockWorker(port)).control.weights.version == 1  # type: ignore[arg-type]


def test_tensors_that_do_not_come_end_the_update_and_the_group_at_the_deadline(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        worker.engine.waits = True
        await worker.good(receive("l", MODEL))
        done = await worker.ask(AwaitStep("receive", "l"))
        assert (done.code, "not within 0.8 s" in done.message) == ("deadline_passed", True)
        assert "rank 1 waits for q" in done.message
        assert await worker.state() == "closed"

    assert "apply" not in run(story, StockWorker(port)).engine.calls  # type: ignore[arg-type]


def test_a_trainer_that_dies_while_it_sends_ends_the_update():
    async def story(worker: StockWorker) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        await worker.init(port=listening.getsockname()[1])
        await worker.start()
        worker.engine.waits = True
        await worker.good(receive("l", MODEL))
        listening.close()
        done = await worker.ask(AwaitStep("receive", "l"))
        assert (done.code, "the trainer is gone" in done.message) == ("conflict", True), done
        assert await worker.state() == "closed"

    run(story, StockWorker(1))  # type: ignore[arg-type]


def test_a_receiver_that_fails_ends_the_update_with_its_error(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        worker.engine.waits = True
        await worker.good(receive("l", MODEL))
        worker.engine.status["error"] = "the peer is gone"
        done = await worker.ask(AwaitStep("receive", "l"))
        assert (done.code, "the peer is gone" in done.message) == (WeightUpdateFailed.code, True)
        assert await worker.state() == "closed"

    run(story, StockWorker(port))  # type: ignore[arg-type]


def test_an_abort_at_another_worker_keeps_the_group_between_lists(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        await worker.send(MODEL)
        await worker.end()
        await worker.good(PrepareUpdate("u", None))
        await worker.good(AwaitStep("prepare", "u"))
        await worker.good(AbortUpdate("u", "another worker failed"))
        assert await worker.state() == "open"
        await worker.start("u2")
        await worker.send(MODEL)
        await worker.good(AbortUpdate(None, "another worker failed", "lists"))
        assert await worker.state() == "open"
        await worker.start("u3")
        worker.engine.waits = True
        await worker.good(receive("l", MODEL))
        await worker.good(AbortUpdate(None, "another worker failed", "lists", leaves=True))
        assert await worker.state() == "closed"

    worker = run(story, StockWorker(port))  # type: ignore[arg-type]
    assert worker.engine.calls.count("resume") == 1


def test_an_undo_of_an_earlier_trainer_s_call_leaves_the_next_trainer_s_group(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        worker.engine.waits = True
        await worker.good(receive("l", MODEL))
        # The same trainer, which has given up its call.
        await worker.init("s2")
        undo = AbortUpdate(
            "u", "another worker could not receive the tensors", "lists", leaves=True
        )
        assert (await worker.ask(undo)).code == "conflict"
        assert (await worker.good(GetStatus()))["session"] == "s2"
        worker.engine.waits = False
        await worker.start("u2")
        assert (await worker.ask(undo)).code == "conflict"
        await worker.send(MODEL)
        await worker.end()
        await worker.commit("u2")

    run(story, StockWorker(port))  # type: ignore[arg-type]


@pytest.mark.parametrize("later", ["beside", "kv"])
def test_generation_resumes_between_lists_if_any_of_them_has_stopped_it(port: int, later: str):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        worker.engine.staging = "kv"
        await worker.send([Q], "one")
        worker.engine.staging = later
        await worker.send([K], "two")
        assert "resume" not in worker.engine.calls
        await worker.end()
        assert worker.engine.calls[-2:] == ["set_aside", "resume"]
        assert (await worker.good(GetStatus()))["last_staging"] == "kv"

    run(story, StockWorker(port))  # type: ignore[arg-type]


def test_generation_does_not_resume_between_the_pause_and_the_end_of_an_update(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        await worker.good(Pause("keep", 60.0))
        worker.engine.staging = "kv"
        # Both in one turn of the loop.
        await asyncio.gather(
            worker.good(Resume()), worker.good(receive("l", MODEL)), worker.good(Resume())
        )
        calls = worker.engine.calls
        assert "resume" not in calls[calls.index("receive") :]
        await worker.good(AwaitStep("receive", "l"))
        await worker.end()
        await worker.commit()

    assert run(story, StockWorker(port)).engine.calls[-1] == "resume"  # type: ignore[arg-type]


def test_an_update_that_nobody_continues_ends_at_its_deadline(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        await worker.send([Q])
        await worker.end()
        while await worker.state() != "open":
            await asyncio.sleep(0.05)
        await worker.start("u2")
        while await worker.state() != "open":
            await asyncio.sleep(0.05)
        await worker.good(LeaveGroup(None, "lists"))
        assert await worker.state() == "closed"

    run(story, StockWorker(port))  # type: ignore[arg-type]


# ---- groups ------------------------------------------------------------------------------


def test_the_worker_waits_for_a_trainer_that_begins_to_listen_after_its_call():
    async def story(worker: StockWorker) -> None:
        with socket.socket() as late:
            late.bind(("127.0.0.1", 0))
            worker.port = late.getsockname()[1]
            await worker.good(worker.group())
            await asyncio.sleep(0.2)
            assert "join" not in worker.engine.calls
            awaited = (await worker.good(GetStatus()))["awaited"]
            assert awaited["message"] == "rank 1 waits for rank 0 to join the group"
            # The same call, as a client repeats it after its connection was cut.
            assert await worker.good(worker.group("repeated")) == {"session": "s"}
            late.listen()
            await worker.good(AwaitStep("join", "s"))

    assert run(story, StockWorker(0)).engine.calls.count("join") == 1  # type: ignore[arg-type]


def test_an_address_where_nothing_listens_is_a_refusal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(list_trainer, "LISTEN_TIMEOUT_S", 0.3)

    async def story(worker: StockWorker) -> None:
        await worker.good(worker.group())
        done = await worker.ask(AwaitStep("join", "s"))
        assert (done.code, "nothing answered for 0.3 s" in done.message) == (
            "invalid_request",
            True,
        )
        assert await worker.state() == "closed"

    assert "join" not in run(story, StockWorker(9)).engine.calls  # type: ignore[arg-type]


def test_a_new_trainer_replaces_an_idle_one_but_does_not_break_an_update(port: int):
    async def story(worker: StockWorker) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            other_port = other.getsockname()[1]
            await worker.init("s")
            await worker.init("other", other_port)
            await worker.start()
            done = await worker.ask(worker.group("third"))
            assert (done.code, "no other trainer's session" in done.message) == ("conflict", True)
            # From the address of the trainer itself: it has begun anew.
            await worker.init("again", other_port)
            await worker.start("u2")
        # The trainer of the update has died.
        await worker.init("fourth")
        await worker.start("u3")

    run(story, StockWorker(port))  # type: ignore[arg-type]


def test_a_session_of_titopool_s_client_is_not_replaced(port: int):
    async def story(worker: StockWorker) -> None:
        own = JoinGroup("own", "vllm", "gloo", "127.0.0.1", port, 1, 2)
        await worker.good(own)
        await worker.good(AwaitStep("join", "own"))
        with socket.create_server(("127.0.0.1", 0)) as other:
            done = await worker.ask(worker.group("s", other.getsockname()[1]))
        assert done.code == "conflict"
        # vLLM's calls mean vLLM's sessions only.
        assert (await worker.ask(AnnounceTensors("lists", "u"))).code == "conflict"
        undo = AbortUpdate(None, "not mine", "lists", leaves=True)
        assert (await worker.ask(undo)).code == "conflict"
        assert (await worker.good(GetStatus()))["session"] == "own"

    run(story, StockWorker(port))  # type: ignore[arg-type]


def test_a_group_by_nccl_s_id_has_no_address():
    async def story(worker: StockWorker) -> None:
        group = JoinGroup("s", "vllm", "nccl", "", 0, 1, 2, nccl_id=b"\1" * 128, calls="lists")
        await worker.good(group)
        await worker.good(AwaitStep("join", "s"))
        await worker.start()
        await worker.send(MODEL)
        await asyncio.sleep(0.6)
        await worker.end()
        await worker.commit()

    assert run(story, StockWorker(0)).control.weights.version == 1  # type: ignore[arg-type]


# ---- pauses, caches, labels --------------------------------------------------------------


def test_calls_for_weights_renew_the_lease_of_vllm_s_pause(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.good(Pause("keep", 0.5, is_renewed=True))
        await asyncio.sleep(0.3)
        await worker.init()
        for turn in range(3):
            await asyncio.sleep(0.3)
            await worker.start(f"u{turn}")
            await worker.end()
        await worker.start("last")
        await worker.send(MODEL)
        await worker.end()
        await worker.commit("last")
        assert (await worker.good(GetStatus()))["is_paused"]
        assert "resume" not in worker.engine.calls
        while (await worker.good(GetStatus()))["is_paused"]:
            await asyncio.sleep(0.05)
        # titopool's own pauses are renewed by themselves only.
        await worker.good(Pause("keep", 0.3))
        await asyncio.sleep(0.2)
        await worker.start("u9")
        await asyncio.sleep(0.5)
        assert not (await worker.good(GetStatus()))["is_paused"]

    run(story, StockWorker(port))  # type: ignore[arg-type]


@pytest.mark.parametrize("clear", [EndTensors(is_last_call=True), ClearCaches("c")])
def test_caches_emptied_during_a_commit_do_not_resume_generation(port: int, clear: Any):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        await worker.send(MODEL)
        await worker.end()
        await worker.good(PrepareUpdate("u", None))
        await worker.good(AwaitStep("prepare", "u"))
        await worker.good(clear)
        await asyncio.sleep(0.1)
        assert "resume" not in worker.engine.calls
        await worker.good(ApplyUpdate("u"))
        await worker.good(AwaitStep("apply", "u"))
        step = "clear" if isinstance(clear, ClearCaches) else "finish"
        await worker.good(AwaitStep(step, "c" if step == "clear" else "tensors"))

    calls = run(story, StockWorker(port)).engine.calls  # type: ignore[arg-type]
    assert calls[-4:] == ["pause keep", "clear", "apply", "resume"]


def test_a_commit_waits_for_caches_that_are_being_emptied(port: int):
    async def story(worker: StockWorker) -> None:
        await worker.init()
        await worker.start()
        await worker.send(MODEL)
        await worker.end()
        gate, clear = asyncio.Event(), worker.engine.clear_caches

        async def slowly() -> None:
            await gate.wait()
            await clear()

        worker.engine.clear_caches = slowly  # type: ignore[method-assign]
        await worker.good(ClearCaches("c"))
        await asyncio.sleep(0.05)
        await worker.good(PrepareUpdate("u", None))
        await asyncio.sleep(0.1)
        assert worker.engine.calls.count("pause keep") == 1
        gate.set()
        await worker.good(AwaitStep("clear", "c"))
        await worker.good(AwaitStep("prepare", "u"))
        await worker.good(ApplyUpdate("u"))
        await worker.good(AwaitStep("apply", "u"))

    calls = run(story, StockWorker(port)).engine.calls  # type: ignore[arg-type]
    one, commit = ["pause keep", "clear", "resume"], ["pause keep", "clear", "apply", "resume"]
    assert [call for call in calls if call in {*one, *commit}] == [*one, *commit]


def test_a_label_belongs_to_one_version_and_can_be_changed(port: int):
    async def story(worker: StockWorker) -> None:
        def label() -> str:
            return worker.control.pool.weights.shown_label

        assert label() == "0"
        await worker.good(SetLabel("initial"))
        assert label() == "initial"
        await worker.init()
        for update_id, given in (("u", "step-7"), ("u2", "")):
            await worker.start(update_id)
            await worker.send(MODEL)
            await worker.end(given)
            await worker.commit(update_id)
            assert label() == (given or "2")
        # Parts of a layer make no version yet: the label waits with them.
        for part, given in ((Q, "first"), (K, "last"), (V, "")):
            await worker.start(f"u-{part.name}")
            await worker.send([part])
            assert label() == "2"
            ended = await worker.end(given)
        await worker.commit(ended["update_id"])
        assert label() == "last"
        await worker.good(SetLabel("later"))
        assert label() == "later"
        # The weights are the same: the worker still serves.
        assert worker.control.phase == "ready"
        older = PoolWeights(1, "u", 1, False, label="older", label_clock=2**39)
        worker.control.merge_pool_state(msgspec.structs.replace(worker.control.pool, weights=older))
        assert label() == "later"

    run(story, StockWorker(port))  # type: ignore[arg-type]


def test_the_timeout_of_these_tests_is_that_of_the_messages():
    assert TIMEOUT_S == 0.8
