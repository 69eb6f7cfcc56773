"""A worker's server: every job ends once, whatever fails."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from titopool.errors import InvalidRequest
from titopool.settings.config import ServerConfig
from titopool.wire.messages import Completed, Failed, Job
from workers.engine.base import Generated
from workers.engine.versions import Versions
from workers.serving.apart import ApartGroups
from workers.serving.jobs import FrontEnd
from workers.serving.server import WorkerServer

JOB = Job(7, 2, b"\0" * 4, 1, 1, b"")


class Engine:
    """Completes every job at once."""

    has_died = False

    def __init__(self) -> None:
        self.versions = Versions()
        self.adapters: Any = SimpleNamespace(versions={}, latest_versions={})

    async def run(self, job: Job, on_part: object) -> Generated:
        return Generated([])


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
        server = WorkerServer(
            Engine(),  # type: ignore[arg-type]
            endpoint="ipc://none", worker_id="0", config=ServerConfig(), report=print,
        )  # fmt: skip
        posted: list[Any] = []
        monkeypatch.setattr(server, "_post", lambda front_end, result: posted.append(result))
        owner, _, name = place.rpartition(".")
        if owner:
            monkeypatch.setattr(getattr(server, owner), name, error)
        elif place != "nowhere":
            monkeypatch.setattr(f"workers.serving.server.{place}", error)
        await server._run_job(FrontEnd(0.0), JOB)
        return posted

    (end,) = asyncio.run(story())
    assert (end.job_id, end.attempt) == (7, 2)
    if code:
        assert isinstance(end, Failed)
        assert end.code == code
    else:
        assert isinstance(end, Completed)


def test_a_worker_that_was_blocked_drops_no_front_end(monkeypatch: pytest.MonkeyPatch):
    """The worker has not yet read what front ends sent while its event loop was blocked."""

    async def story() -> bool:
        config = ServerConfig(heartbeat_interval_s=0.1, heartbeat_timeout_s=0.5)
        server = WorkerServer(
            Engine(),  # type: ignore[arg-type]
            endpoint="ipc://none", worker_id="0", config=config, report=print,
        )  # fmt: skip
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


def test_jobs_that_run_apart_take_turns():
    async def story() -> None:
        groups = ApartGroups()
        first = groups.add(2, b"a", "token")
        (second,) = groups.add(1, b"b", "end")
        waiting = asyncio.ensure_future(second.wait())
        await asyncio.wait_for(first[1].wait(), 1)
        assert (groups.of_others(b"a"), groups.of_others(b"b")) == ("", "token")
        first[0].has_token()
        await asyncio.sleep(0)
        assert not waiting.done()
        for _ in range(2):
            first[1].end()
        await asyncio.wait_for(waiting, 1)
        # The second group runs until its end.
        second.has_token()
        assert (groups.of_others(b"a"), groups.of_others(b"b")) == ("end", "")
        second.end()
        assert groups.of_others(b"a") == ""

    asyncio.run(story())
