"""A worker's server: every job ends once, whatever fails."""

import asyncio
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from harness.servers import STALL_S
from tests.kit.workers.idle_worker import Engine, make_server
from titopool.errors import InvalidRequest
from titopool.settings.config import ServerConfig
from titopool.settings.grammars import StructuredOutputs
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.wire.messages import (
    Apart,
    Chunk,
    Completed,
    Completion,
    Failed,
    FrontEndTotals,
    Hello,
    Job,
    JobProgress,
    decode_from_worker,
)
from titopool.wire.pool_state import PoolState
from titopool.wire.run_dir import is_endpoint
from workers.serving import apart
from workers.serving.apart import ApartGroups
from workers.serving.jobs import FrontEnd
from workers.serving.server import MAX_LOST, WorkerServer, in_groups
from workers.serving.slots import JobSlots

JOB = Job(7, 2, b"\0" * 4, 1, 1, b"")


def front_end_with_job(server: WorkerServer) -> tuple[FrontEnd, JobSlots]:
    """A front end, and the slots of `JOB`, which may start."""
    front_end = server._front_ends[b"f"] = FrontEnd(0.0)
    slots = JobSlots(server._slots, front_end.slots, (7, 2), 1, lambda num_ended: None, is_new=True)
    slots.grant(1)
    return front_end, slots


async def fail(*_: object) -> Any:
    raise TimeoutError("a call to the engine")


def raise_at_once(*_: object) -> Any:
    raise KeyError("staged")


async def refuse(*_: object) -> Any:
    raise InvalidRequest("staged: no", param="n")


@pytest.mark.parametrize(
    "place, error, code",
    [
        ("_control.before_job", fail, "generation_failed"),
        ("_engine.run", fail, "generation_failed"),
        ("_engine.run", refuse, "invalid_request"),
        ("_control.before_job", refuse, "invalid_request"),
        ("count_job", raise_at_once, "generation_failed"),
        ("prefix_of", raise_at_once, "generation_failed"),
        ("nowhere", fail, ""),
    ],
)
def test_a_job_ends_once_whatever_raises(
    monkeypatch: pytest.MonkeyPatch, place: str, error: Any, code: str
):
    async def story() -> list[Any]:
        server = make_server(ServerConfig())
        posted: list[Any] = []
        monkeypatch.setattr(server, "_post", lambda front_end, result: posted.append(result))
        owner, _, name = place.rpartition(".")
        if owner:
            monkeypatch.setattr(getattr(server, owner), name, error)
        elif place != "nowhere":
            monkeypatch.setattr(f"workers.serving.server.{place}", error)
        front_end, slots = front_end_with_job(server)
        await server._run_job(front_end, JOB, slots)
        return posted

    (end,) = asyncio.run(story())
    assert (end.job_id, end.attempt) == (7, 2)
    if code:
        assert isinstance(end, Failed)
        assert end.code == code
    else:
        assert isinstance(end, Completed)


def test_a_job_runs_no_code_of_weight_updates(monkeypatch: pytest.MonkeyPatch):
    """Unless a trainer that sends tensor by tensor has a group: its update may have to end first."""

    async def story(calls: str) -> list[Any]:
        server = make_server(ServerConfig())
        posted: list[Any] = []
        monkeypatch.setattr(server, "_post", lambda front_end, result: posted.append(result))
        # What else is asked of them is missing.
        updates = SimpleNamespace(group=SimpleNamespace(calls=calls))
        monkeypatch.setattr(server._control, "_updates", updates)
        front_end, slots = front_end_with_job(server)
        await server._run_job(front_end, JOB, slots)
        return posted

    assert [type(one) for one in asyncio.run(story("lists"))] == [Completed]
    assert [type(one) for one in asyncio.run(story("tensors"))] == [Failed]


def test_a_worker_that_was_blocked_drops_no_front_end(monkeypatch: pytest.MonkeyPatch):
    """The worker has not yet read what front ends sent while its event loop was blocked."""

    async def story() -> bool:
        config = ServerConfig(heartbeat_interval_s=0.1, heartbeat_timeout_s=0.5)
        server = make_server(config)
        monkeypatch.setattr(server, "_send", lambda *_: None)
        was_known: list[bool] = []
        monkeypatch.setattr(
            server, "_send_heartbeats", lambda: was_known.append(b"f" in server._front_ends)
        )
        beating = asyncio.create_task(server._heartbeat_loop())
        await asyncio.sleep(0)
        server._front_ends[b"f"] = FrontEnd(last_hello=time.monotonic())
        time.sleep(1)
        was_known.clear()
        while not was_known:
            await asyncio.sleep(0)
        beating.cancel()
        return was_known[0]

    assert asyncio.run(story())


def test_front_ends_that_have_ended_cost_a_worker_no_more_and_no_sum_falls(
    monkeypatch: pytest.MonkeyPatch,
):
    async def story() -> None:
        server = make_server(ServerConfig())
        monkeypatch.setattr(server, "_send", lambda *_: None)
        monkeypatch.setattr(server, "_spawn", lambda work: work.close())
        totals = FrontEndTotals(memory_taken=5, num_waiting=1, refused={"conflict": 1})
        for number in range(1, 201):
            server._front_ends[b"%d" % number] = FrontEnd(-math.inf, totals)
            server._drop_lost_front_ends()
            assert server._front_end_totals() == FrontEndTotals(refused={"conflict": number})
        assert len(server._lost_totals) <= MAX_LOST
        # The last one was only slow.
        server._on_hello(b"200", Hello(PoolState(), front_end=totals))
        assert server._front_end_totals().refused == {"conflict": 200}

    asyncio.run(story())


def test_a_job_with_a_grammar_is_a_risk_until_it_has_ended():
    options = SamplingOptions(structured_outputs=StructuredOutputs(regex="a"))
    job = msgspec.structs.replace(JOB, sampling=msgspec.Raw(encode_options(options)))
    front_end, slots = front_end_with_job(make_server(ServerConfig()))
    front_end.add((7, 2), job, asyncio.Future, slots)  # type: ignore[arg-type]
    front_end.start((7, 2), job)
    front_end.new.discard((7, 2))
    assert front_end.risks == {(7, 2)}
    front_end.remove((7, 2))
    assert front_end.risks == set()


def test_jobs_that_run_apart_take_turns():
    async def story() -> None:
        groups = ApartGroups(lambda *, with_token: False)
        first = groups.add(2, b"a", "token")
        (second,) = groups.add(1, b"b", "end")
        waiting = asyncio.ensure_future(second.wait())
        await asyncio.wait_for(first[1].wait(), STALL_S)
        assert (groups.of_others(b"a"), groups.of_others(b"b")) == ("", "token")
        first[0].has_token()
        await asyncio.sleep(0)
        assert not waiting.done()
        for _ in range(2):
            first[1].end()
        await asyncio.wait_for(waiting, STALL_S)
        # The second group runs until its end.
        second.has_token()
        assert (groups.of_others(b"a"), groups.of_others(b"b")) == ("end", "")
        second.end()
        assert groups.of_others(b"a") == ""

    asyncio.run(story())


@pytest.mark.parametrize("risk, hold_s", [("new", 3600.0), ("grammar", 3600.0), ("grammar", 0.1)])
def test_a_group_waits_for_what_may_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, risk: str, hold_s: float
):
    """For a job without a token at any time, for one with a grammar only so long."""
    monkeypatch.setattr(apart, "HOLD_S", hold_s)

    async def story() -> None:
        risks = {risk}
        groups = ApartGroups(
            lambda *, with_token: bool(risks if with_token else risks - {"grammar"})
        )
        (turn,) = groups.add(1, b"a", "token")
        waiting = asyncio.ensure_future(turn.wait())
        if hold_s > 1:
            await asyncio.sleep(0.2)
            assert not waiting.done()
            risks.clear()
            groups.start_first()
        await asyncio.wait_for(waiting, 20)

    asyncio.run(story())


@pytest.mark.parametrize("until, hold_s", [("token", 0.0), ("end", 3600.0), ("end", 0.1)])
def test_jobs_that_come_later_are_held_beside_a_group(
    monkeypatch: pytest.MonkeyPatch, until: Apart, hold_s: float
):
    """Until its token however long that takes, else only so long."""
    monkeypatch.setattr(apart, "HOLD_S", hold_s)

    async def story() -> None:
        groups = ApartGroups(lambda *, with_token: False)
        await asyncio.wait_for(groups.wait_beside(), 20)
        (turn,) = groups.add(1, b"a", until)
        waiting = asyncio.ensure_future(groups.wait_beside())
        if until == "token" or hold_s > 1:
            await asyncio.sleep(0.2)
            assert not waiting.done()
            turn.end()
        await asyncio.wait_for(waiting, 20)

    asyncio.run(story())


def test_a_job_that_was_held_says_when_it_starts(monkeypatch: pytest.MonkeyPatch):
    """So a front end does not take it for the cause of a death while it was held."""

    async def story() -> list[Any]:
        server = make_server(ServerConfig())
        server._loop = asyncio.get_running_loop()
        sent: list[Any] = []
        monkeypatch.setattr(server, "_send_results", lambda identity, results: sent.extend(results))
        (turn,) = server._apart.add(1, b"other", "token")
        front_end, slots = front_end_with_job(server)
        # It has its slot.
        front_end.changed.add((7, 2))
        running = asyncio.create_task(server._run_job(front_end, JOB, slots))
        await asyncio.sleep(0.1)
        server._flush()
        assert sent == []
        turn.end()
        await asyncio.wait_for(running, 20)
        await asyncio.sleep(0)
        return sent

    started, end = asyncio.run(story())
    assert started == JobProgress(7, 2, has_token=False, num_started=1)
    assert isinstance(end, Completed)


def test_a_suspect_starts_though_jobs_that_wait_for_it_have_all_slots(
    monkeypatch: pytest.MonkeyPatch,
):
    async def story() -> list[int]:
        server = make_server(ServerConfig())
        server._loop = asyncio.get_running_loop()
        server._stop_reason = server._loop.create_future()
        server._slots.num_slots = 1
        server._facts = object()  # type: ignore[assignment]
        monkeypatch.setattr(server, "_send", lambda *_: None)
        ended: list[int] = []
        monkeypatch.setattr(server, "_post", lambda front_end, one: ended.append(one.job_id))
        for name in (b"f", b"g"):
            server._front_ends[name] = FrontEnd(0.0)
        risk = (1, 1)
        server._front_ends[b"f"].new.add(risk)
        jobs = [msgspec.structs.replace(JOB, job_id=job_id) for job_id in (2, 3)]
        (turn,) = server._apart.add(1, b"f", "token")
        server._start_job(b"f", jobs[0], turn, 1, is_new=False)
        server._start_job(b"g", jobs[1], None, 1, is_new=False)
        await asyncio.sleep(0.05)
        assert server._front_ends[b"g"].slots.num_running == 1
        assert ended == []
        # The last other job without a token has one.
        server._front_ends[b"f"].new.remove(risk)
        server._apart.start_first()
        async with asyncio.timeout(20):
            while len(ended) < 2:
                await asyncio.sleep(0.01)
        return ended

    assert asyncio.run(story()) == [2, 3]


def test_a_job_that_comes_after_the_stop_does_not_start():
    """Its front end does not know of the stop yet, and sends the job to another worker then."""

    async def story() -> list[bool]:
        server = make_server(ServerConfig())
        server._loop = asyncio.get_running_loop()
        server._stop_reason = server._loop.create_future()
        server._facts = object()  # type: ignore[assignment]
        server._front_ends[b"f"] = FrontEnd(0.0)
        have_started = []
        for job_id in (1, 2):
            job = msgspec.structs.replace(JOB, job_id=job_id)
            server._start_job(b"f", job, None, 1, is_new=False)
            have_started.append((job_id, job.attempt) in server._front_ends[b"f"].tasks)
            server.stop()
        return have_started

    assert asyncio.run(story()) == [True, False]


def test_a_worker_may_leave_its_port_to_the_kernel(tmp_path: Path):
    """Every process of it gets a free one, so no other program can have taken it."""

    async def story() -> list[str]:
        reported: list[str] = []
        engine: Any = Engine()
        engine.load, engine.close = raise_at_once, lambda: None
        for _ in range(2):
            server = WorkerServer(
                engine, endpoint="tcp://127.0.0.1:0", worker_id="0", report=lambda phase: None,
                config=ServerConfig(curve_key_file=str(tmp_path / "key")),
                report_endpoint=reported.append,
            )  # fmt: skip
            with pytest.raises(KeyError, match="staged"):
                await server.run()
        return reported

    reported = asyncio.run(story())
    assert len(reported) == 2
    assert all(is_endpoint(one) and one.startswith("tcp://127.0.0.1:") for one in reported), (
        reported
    )


def test_long_results_go_in_groups_in_their_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workers.serving.server.GROUP_BYTES", 100)
    results: list[Any] = [
        completed(0, 60), Failed(1, 1, "generation_failed", "x"), completed(2, 40), completed(3, 1),
        completed(4, 500), completed(5, 99), Chunk(6, 1, []), completed(7, 1),
    ]  # fmt: skip
    groups = [[one.job_id for one in group] for group in in_groups(results)]
    # A chunk has more than its arrays.
    assert groups == [[0, 1, 2], [3], [4], [5], [6], [7]]
    assert [*in_groups([])] == []


def test_results_arrive_in_order_though_one_cannot_be_encoded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workers.serving.server.GROUP_BYTES", 100)

    async def story() -> list[Any]:
        server = make_server(ServerConfig())
        sent: list[Any] = []
        server._router = SimpleNamespace(  # type: ignore[assignment]
            send_multipart=lambda frames, _: sent.extend(decode_from_worker(frames[1]).results),
            getsockopt=lambda _: 0,
        )
        unpaired = completed(2, 10, text="\ud800")
        server._front_ends[b"f"] = FrontEnd(0.0)
        server._front_ends[b"f"].outbox = [
            completed(0, 90), completed(1, 50), unpaired, completed(3, 10), completed(4, 90),
        ]  # fmt: skip
        server._flush()
        return sent

    sent = asyncio.run(story())
    assert [(one.job_id, isinstance(one, Failed)) for one in sent] == [
        (0, False), (1, False), (2, True), (3, False), (4, False),
    ]  # fmt: skip


def completed(job_id: int, num_bytes: int, text: str = "") -> Completed:
    completion = Completion(b"a" * num_bytes, "stop", None, [], text)
    return Completed(job_id, 1, [completion], 0)
