"""Three stub workers behind proxies and two front ends, all of which faults may hit."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from app.conversations.store import FILE
from harness.servers import REPOSITORY, environment, free_port
from tests.all.chaos.front import NAME
from tests.all.chaos.proxy import Proxy
from titopool.demo_model import make_tokenizer
from titopool.wire.run_dir import SESSIONS

NUM_WORKERS, NUM_FRONT_ENDS = 3, 2
# Of each worker.
NUM_SLOTS = 64
HEARTBEAT_TIMEOUT_S = 2.0
HANG_TIMEOUT_S = 3.0
UPDATE_TIMEOUT_S = 4.0
# A prepared worker waits for the others for two update timeouts: the longest wait.
LONGEST_TIMEOUT_S = 2 * UPDATE_TIMEOUT_S
SETTINGS = {
    "TITOPOOL_HEARTBEAT_INTERVAL_S": "0.2",
    "TITOPOOL_HEARTBEAT_TIMEOUT_S": str(HEARTBEAT_TIMEOUT_S),
    "TITOPOOL_WORKER_HANG_TIMEOUT_S": str(HANG_TIMEOUT_S),
    "TITOPOOL_REQUEST_TIMEOUT_S": "30",
    # Less than the answers of `answers_unread` take.
    "TITOPOOL_MEMORY_BUDGET_BYTES": str(32 * 2**20),
    "TITOPOOL_WORKER_START_TIMEOUT_S": "20",
    "TITOPOOL_LOG_LEVEL": "info",
}
START_TIMEOUT_S = 60.0
# Seconds that a restarted worker loads its engine, so that calls arrive during the load.
RELOAD_S = 0.4


class Member:
    """One worker: its process, its proxy, and its connection to the harness."""

    def __init__(self, cluster: "Cluster", index: int, shared_port: int):
        self.cluster, self.index = cluster, index
        self.port = free_port()
        self.address = f"127.0.0.{index + 2}"
        self.proxy = Proxy(self.address, shared_port, self.port)
        self.run_dir = cluster.folder / f"worker-{index}"
        self.run_dir.mkdir()
        self.process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._has_run = False
        # Two faults may hit one worker at once.
        self._restart_lock = asyncio.Lock()
        self._connected = asyncio.Event()
        self._reached = asyncio.Event()
        self._states: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    @property
    def ledger(self) -> Path:
        return self.run_dir / f"worker-state-w{self.index}"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self, *arguments: str) -> None:
        self._connected.clear()
        variables = {
            **self.cluster.settings,
            "TITOPOOL_RUN_DIR": str(self.run_dir),
            "TITOPOOL_WEIGHTS_ROOT": str(self.cluster.root),
            "TITOPOOL_CURVE_KEY_FILE": str(self.cluster.folder / "key"),
        }
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.all.chaos.worker",
            "--endpoint", f"tcp://127.0.0.1:{self.port}", "--worker-id", f"w{self.index}",
            "--control", str(self.cluster.control), "--delay-s", "0.05",
            "--max-num-seqs", str(NUM_SLOTS), "--in-slots",
            *self.cluster.text_options,
            "--load-s", str(RELOAD_S if self._has_run else 0), *arguments, env=environment(**variables), cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        self._has_run = True
        self._logging = asyncio.create_task(self._log(self.process))
        # Another fault may end it before; then that one starts it again.
        waits = [asyncio.create_task(one) for one in (self._connected.wait(), self.process.wait())]
        ended, others = await asyncio.wait(
            waits, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        for one in others:
            one.cancel()
        assert ended, f"worker {self.index} does not start\n{self.cluster.tail()}"

    async def _log(self, process: asyncio.subprocess.Process) -> None:
        # The process writes to a pipe, because `fill_disk` keeps it from writing to files.
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self.cluster.log.write(f"w{self.index} | ".encode() + line)
            self.cluster.log.flush()

    def signal(self, number: int) -> None:
        if self.is_alive:
            assert self.process is not None
            self.process.send_signal(number)

    async def kill(self) -> None:
        async with self._restart_lock:
            await self._kill()

    async def _kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        await self.process.wait()

    async def revive(self) -> None:
        """Starts the process unless it runs."""
        async with self._restart_lock:
            if not self.is_alive:
                await self.start()

    async def restart(self, *arguments: str, before: Callable[[], None] = lambda: None) -> None:
        """Kills the process, calls `before`, and starts the process again."""
        async with self._restart_lock:
            await self._kill()
            before()
            await self.start(*arguments)

    def forget(self) -> None:
        """Deletes the ledger."""
        self.ledger.unlink(missing_ok=True)

    def fill_disk(self, *, is_full: bool) -> None:
        """Makes the process's writes to files fail, as on a full disk."""
        if self.is_alive:
            assert self.process is not None
            limit = 0 if is_full else resource.RLIM_INFINITY
            resource.prlimit(
                self.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)
            )

    # ---- the connection to the harness -----------------------------------------------------

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._reached.clear()
        self._connected.set()
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                message = json.loads(line)
                if "reached" in message:
                    self._reached.set()
                elif "state" in message:
                    self._states.put_nowait(message["state"])

    def _send(self, **message: Any) -> None:
        assert self._writer is not None
        with contextlib.suppress(OSError):
            self._writer.write(json.dumps(message).encode() + b"\n")

    def arm(self, point: str) -> None:
        self._reached.clear()
        self._send(arm=point)

    def release(self) -> None:
        self._send(go=True)

    async def wait_reached(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._reached.wait()
        return self._reached.is_set()

    async def state(self) -> dict[str, Any]:
        while not self._states.empty():
            self._states.get_nowait()
        self._send(state=True)
        async with asyncio.timeout(10):
            return await self._states.get()


class Cluster:
    """The pool and its front ends."""

    def __init__(
        self,
        folder: Path,
        *,
        update_timeout_s: float = UPDATE_TIMEOUT_S,
        has_tokenizer: bool = False,
    ):
        """`has_tokenizer`: chats are possible; a front end imports what reads it with the first one."""
        self.update_timeout_s = update_timeout_s
        self.settings = SETTINGS | {"TITOPOOL_WEIGHT_UPDATE_TIMEOUT_S": str(update_timeout_s)}
        self.folder = folder
        self.root = folder / "root"
        self.control = folder / "control"
        self.hosts = folder / "hosts"
        self.port, self._shared_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = (folder / "log").open("ab")
        self.members: list[Member] = []
        for name in ("one", "two"):
            (self.root / name).mkdir(parents=True)
            (self.root / name / "weights").write_text(name)
            (self.root / name / "adapter_config.json").write_text('{"r": 8}')
            (self.root / name / "adapter_model.safetensors").write_text(name)
        self.text_options = ("--tokenizer", str(folder), "--texts") if has_tokenizer else ()
        if has_tokenizer:
            make_tokenizer(folder)
        self.run_dir = folder / "front-ends"

    async def start(self) -> None:
        self._listening = await asyncio.start_unix_server(self._connect, str(self.control))
        self.members = [Member(self, index, self._shared_port) for index in range(NUM_WORKERS)]
        self.set_hosts(*self.members)
        for member in self.members:
            await member.proxy.start()
            await member.start()
        await self.start_server()

    async def start_server(self) -> None:
        variables = {
            **self.settings,
            "TITOPOOL_PORT": str(self.port),
            "TITOPOOL_NUM_FRONT_ENDS": str(NUM_FRONT_ENDS),
            "TITOPOOL_ENDPOINTS": f"tcp://{NAME}:{self._shared_port}",
            "TITOPOOL_CURVE_KEY_FILE": str(self.folder / "key"),
            "TITOPOOL_RUN_DIR": str(self.run_dir),
            "CHAOS_HOSTS": str(self.hosts),
        }
        self.server = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gunicorn", "-c", "python:app.gunicorn_hooks",
            "tests.all.chaos.front:create_app()",
            env=environment(**variables), cwd=REPOSITORY, stdout=self.log, stderr=self.log,
        )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await self.all_ready():
            assert time.monotonic() < deadline, self.tail()
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        front_ends = psutil.Process(self.server.pid).children(recursive=True)
        self.server.terminate()
        async with asyncio.timeout(20):
            await self.server.wait()
        for member in self.members:
            member.signal(signal.SIGCONT)
            await member.kill()
            await member.proxy.close()
        self._listening.close()
        _, alive = psutil.wait_procs(front_ends, timeout=5)
        assert not alive, alive

    def set_hosts(self, *members: Member) -> None:
        """Sets the addresses that the pool's name resolves to."""
        draft = self.hosts.with_suffix(".new")
        draft.write_text(json.dumps([member.address for member in members]))
        os.replace(draft, self.hosts)

    def tail(self) -> str:
        """The last lines that the processes wrote."""
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-60:])

    def front_ends(self) -> list[psutil.Process]:
        return psutil.Process(self.server.pid).children()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        await self.members[int(hello["worker"])].connect(reader, writer)

    # ---- requests --------------------------------------------------------------------------

    async def request(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float = 40
    ) -> tuple[int, dict[str, Any]]:
        """Status and body of a POST of `body`, or of a GET without one, from either front end."""
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            method = "GET" if body is None else "POST"
            async with session.request(method, self.url + path, json=body) as answer:
                return answer.status, await answer.json()

    async def phases(self) -> list[str]:
        """The workers' phases as one of the front ends reports them."""
        _, answer = await self.request("/ready", timeout_s=5)
        return [one["phase"] for one in answer["workers"]]

    async def all_ready(self) -> bool:
        """Whether both front ends report all workers ready."""
        try:
            for _ in range(6):
                if await self.phases() != ["ready"] * NUM_WORKERS:
                    return False
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        return True

    async def resources_in_use(self) -> dict[int, dict[str, Any]]:
        """The resources in use at each front end, by process id."""
        found: dict[int, dict[str, Any]] = {}
        for _ in range(200):
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                _, answer = await self.request("/chaos/held", timeout_s=5)
                found[answer["pid"]] = answer
            if len(found) >= NUM_FRONT_ENDS:
                return found
        raise AssertionError(f"only {list(found)} answer")

    def rows_of_sessions(self) -> dict[str, int]:
        """What the front ends' file has of sessions that have ended."""
        path = self.run_dir / SESSIONS / FILE
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
            counts = {
                name: file.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
                for name in ("turns", "running")
            }
        return {name: count for name, count in counts.items() if count}
