"""The supervisor or the gunicorn master of a server is killed during an operation, or a worker hangs.

All processes of the server must end, or the worker must be started again, and every request must end.
"""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import psutil
import pytest

from harness.servers import REPOSITORY, environment, free_port
from harness.stub_worker import BLOCK_SIGNAL
from tests.all.chaos.cluster import HANG_TIMEOUT_S, SETTINGS, UPDATE_TIMEOUT_S

NUM_CLIENTS = 32
# The supervisor gives its workers 4 s to end, gunicorn's master gives the front ends 3 s.
END_TIMEOUT_S = 20.0
# For a worker to start again, on a busy machine.
SLACK_S = 20.0


class Pool:
    """`titopool serve` with stub engines."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._lines: dict[str, asyncio.StreamWriter] = {}
        self.reached = asyncio.Event()
        self.outcomes: Counter[str] = Counter()
        (folder / "root" / "one").mkdir(parents=True)
        (folder / "root" / "one" / "weights").write_text("one")

    async def start(self) -> None:
        control = str(self.folder / "control")
        self._listening = await asyncio.start_unix_server(self._connect, control)
        variables = {
            **SETTINGS,
            "CHAOS_CONTROL": control,
            "PYTHONPATH": str(Path(__file__).with_name("site")),
            "TITOPOOL_WEIGHTS_ROOT": str(self.folder / "root"),
            "TITOPOOL_WEIGHT_UPDATE_TIMEOUT_S": str(UPDATE_TIMEOUT_S),
        }
        self._log = (self.folder / "log").open("wb")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "titopool.cli", "serve", "--port", str(self.port),
            "--num-workers", "2", "--num-front-ends", "2",
            # New interpreters, which read `site`.
            "--worker-command", f"{sys.executable} -m workers",
            env=environment(**variables), cwd=REPOSITORY, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while await self._num_ready() < 2:
            assert time.monotonic() < deadline, self.tail()
            await asyncio.sleep(0.2)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def tail(self, num_chars: int = 4000) -> str:
        return (self.folder / "log").read_text(errors="replace")[-num_chars:]

    async def _num_ready(self) -> int:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with (
                aiohttp.ClientSession() as session,
                session.get(self.url + "/ready") as answer,
            ):
                return int((await answer.json())["num_ready"])
        return -1

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        self._lines[hello["worker"]] = writer
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                if "reached" in json.loads(line):
                    self.reached.set()

    def arm(self, worker: str, point: str) -> None:
        self._lines[worker].write(json.dumps({"arm": point}).encode() + b"\n")

    def supervisor(self) -> psutil.Process:
        (found,) = [one for one in self.family if "workers.supervisor" in " ".join(one.cmdline())]
        return found

    async def client(self, index: int) -> None:
        """Generates until the server is gone; every request must end."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=40)) as session:
            while True:
                try:
                    body = {"prompts": [[index + 1, 7]]}
                    async with session.post(self.url + "/generate/", json=body) as answer:
                        reply = await answer.json()
                except aiohttp.ClientConnectorError:
                    return
                except (aiohttp.ClientError, OSError):
                    self.outcomes["connection broken"] += 1
                    continue
                if answer.status == 200:
                    assert reply["completion_ids"] == [[7, index + 1]]
                    self.outcomes["answered"] += 1
                else:
                    self.outcomes[reply["error"]["code"]] += 1

    def worker(self, name: str) -> psutil.Process:
        family = psutil.Process(self.process.pid).children(recursive=True)
        words = {one: one.cmdline() for one in family}
        (found,) = [
            one for one, has in words.items()
            if has[1:3] == ["-m", "workers"] and has[has.index("--worker-id") + 1] == name
        ]  # fmt: skip
        return found

    async def update(self) -> int:
        """Loads a folder; returns the status, or 0 if the server is gone."""
        body = {"path": str(self.folder / "root" / "one"), "policy": "keep"}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=40)) as session:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with session.post(self.url + "/update_weights", json=body) as answer:
                    await answer.read()
                    return answer.status
        return 0

    async def reach(self, point: str) -> tuple[list[asyncio.Task[None]], asyncio.Task[int]]:
        """Starts the server, its clients and an update; returns them once worker 1 is at `point`."""
        await self.start()
        clients = [asyncio.create_task(self.client(index)) for index in range(NUM_CLIENTS)]
        await asyncio.sleep(0.5)
        self.arm("1", point)
        updating = asyncio.create_task(self.update())
        async with asyncio.timeout(10):
            await self.reached.wait()
        return clients, updating


@pytest.mark.parametrize("point", ["PrepareUpdate:after", "ApplyUpdate:before", "Generate:before"])
@pytest.mark.parametrize("victim", ["supervisor", "master"])
def test_all_processes_end_when_the_supervisor_or_master_is_killed(
    tmp_path: Path, victim: str, point: str
):
    async def scenario() -> None:
        pool = Pool(tmp_path)
        clients, updating = await pool.reach(point)
        killed = pool.supervisor() if victim == "supervisor" else psutil.Process(pool.process.pid)
        killed.send_signal(signal.SIGKILL)
        async with asyncio.timeout(END_TIMEOUT_S + 45):
            await pool.process.wait()
            await asyncio.gather(*clients, updating)
        _, alive = psutil.wait_procs(pool.family, timeout=END_TIMEOUT_S)
        for one in alive:
            one.kill()
        assert not alive, f"{alive}\n{pool.tail()}"
        assert "Traceback" not in pool.tail(), pool.tail()
        assert pool.outcomes["answered"] > 0
        # No job is blamed for the death.
        assert "generation_failed" not in pool.outcomes
        print(victim, point, dict(pool.outcomes))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "number, point",
    [
        pytest.param(signal.SIGSTOP, "PrepareUpdate:after", id="stopped-prepared"),
        pytest.param(signal.SIGSTOP, "Generate:before", id="stopped-generating"),
        pytest.param(BLOCK_SIGNAL, "ApplyUpdate:before", id="loop-stands-applying"),
    ],
)
def test_a_worker_that_hangs_is_started_again_and_updates_go_on(
    tmp_path: Path, number: int, point: str
):
    async def scenario() -> None:
        pool = Pool(tmp_path)
        clients, updating = await pool.reach(point)
        hung = pool.worker("1")
        hung.send_signal(number)
        async with asyncio.timeout(HANG_TIMEOUT_S + UPDATE_TIMEOUT_S + SLACK_S):
            while hung.is_running() and hung.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.1)
            await updating
            while await pool._num_ready() < 2:
                await asyncio.sleep(0.1)
            # The other front end may not have learned yet that the worker is ready.
            while await pool.update() != 200:
                await asyncio.sleep(0.1)
        pool.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_TIMEOUT_S + 45):
            await pool.process.wait()
            await asyncio.gather(*clients)
        assert "worker 1 died" in pool.tail(2**20)
        assert pool.outcomes["answered"] > 0
        # No job is blamed, as each runs again at the other worker.
        assert "generation_failed" not in pool.outcomes
        print(signal.Signals(number).name, point, dict(pool.outcomes))

    asyncio.run(scenario())
