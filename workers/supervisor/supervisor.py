"""Starts one worker process for each engine, restarts workers that die, and scales the pool.

Runs in: the supervisor's process, a child of gunicorn's master, in one thread. Owns: the workers'
processes, the template of which they are forks (`forking.py`), the pipes on which they log and report
their phase, and the file of endpoints. If the first start of one of the first workers fails, or the last
three restarts of every worker, the server stops with the cause. Otherwise a dead worker is restarted: at
once, or after a growing delay if it died early.
"""

import contextlib
import http.client
import logging
import os
import selectors
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from titopool.errors import ConfigError
from titopool.settings.config import ServerConfig
from titopool.settings.gpus import visible_gpus
from titopool.settings.logs import configure_logging, show
from titopool.settings.sources import from_environment
from titopool.wire.run_dir import (
    ENDS,
    RESTARTS,
    EndpointsFile,
    WorkerEnd,
    forget_workers,
    own_run_dir,
    write_endpoints,
    write_record,
)
from titopool.wire.sockets import ANY_PORT, worker_endpoint
from workers.process import EXIT_HUNG, STACKS_SIGNAL, reason_of
from workers.supervisor.forking import ForkedWorker, Template, reason_for_new_interpreters
from workers.supervisor.hub import wanted_model
from workers.supervisor.master import end_master, parser_of, remove_orphaned_run_dir
from workers.supervisor.phase_pipe import Load, Report
from workers.supervisor.resources import Resources, resources_of_worker
from workers.supervisor.scale import Scale
from workers.supervisor.screen import Screen, progress_of
from workers.supervisor.worker_log import WorkerLog, root_cause

# Not __name__, in which `supervisor` comes twice.
logger = logging.getLogger("workers.supervisor")

# Between two looks at the workers when no pipe is readable.
POLL_S = 0.2
# From SIGINT to SIGKILL.
STOP_TIMEOUT_S = 4.0
# A worker that leaves may take so much longer than its jobs.
LEAVE_MARGIN_S = 10.0
# Phases of a worker whose engine is loaded.
LOADED = ("ready", "draining", "leaving")
# Of the longest line of each pipe; the rest of a longer one becomes another line.
MAX_LINE_BYTES = {"log": 2**16, "status": 2**20}
# Log lines that are kept for the message of a failed start.
LAST_LINES = 300
MAX_RESTART_DELAY_S = 60.0
# A worker that dies sooner after it was ready has died early.
EARLY_DEATH_S = 60.0
# What a turn of the supervisor's loop takes longer is no silence of its workers: the process was
# suspended, as they may have been.
MAX_TURN_S = 1.5
# For the stacks of a worker that hangs, before it is killed.
STACKS_S = 0.2
# Failed restarts in a row of every worker, after which the server stops.
MAX_FAILED_STARTS = 3


@dataclass
class WorkerProcess:
    """One worker over all its restarts; `process` is None while it waits for a restart."""

    index: int
    log: WorkerLog
    # It was added to a pool that serves: a failed start does not stop the server.
    is_added: bool = False
    # It is not started again. The time is that of its end, if it does not end before.
    is_leaving: bool = False
    leave_by: float = float("inf")
    load: Load | None = None
    # Where it listens, if it chose the port itself.
    endpoint: str = ""
    process: subprocess.Popen[bytes] | ForkedWorker | None = None
    started_at: float = 0.0
    start_after: float = 0.0
    # When it last reported that it runs; 0: it has not yet.
    alive_at: float = 0.0
    is_hung: bool = False
    phase: str = ""
    failure: str = ""
    has_been_ready: bool = False
    num_failed_starts: int = 0
    ready_at: float = 0.0
    # Ends after which it was started again, by reason.
    restarts: dict[str, int] = field(default_factory=dict)
    num_early_deaths: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    # The unfinished last line of each pipe.
    pending: dict[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"worker {self.index}"


class StartFailed(Exception):
    """A worker cannot start; the message is the cause."""


class Supervisor:
    """Runs the workers of one server."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        parent_pid: int,
        url: str | None,
        requires_key: bool = False,
        keeps_run_dir: bool = True,
        worker_command: Sequence[str] = (),
        of_one: tuple[int, str] | None = None,
    ):
        """`parent_pid` is gunicorn's master; `url` is the server's address, for the greeting.

        Without `keeps_run_dir`, the log of a failed start is copied to the user's cache.

        Args:
            of_one: index and endpoint of the only worker, which is one of a larger pool's: there is
                no greeting, and `run` returns when the worker has left. With port 0 each process of
                the worker listens at a free port.
        """
        self._config = config
        self._parent_pid = parent_pid
        self._url = url
        self._requires_key = requires_key
        self._has_own_command = bool(worker_command or config.worker_command)
        self._worker_command = worker_command or config.worker_argv
        self._gpus = visible_gpus()
        self._keeps_run_dir = keeps_run_dir
        self._of_one = of_one
        self._scale = Scale(config, least=0 if of_one else 1)
        self._workers: list[WorkerProcess] = []
        self._endpoints_file = EndpointsFile(config.run_dir)
        # Of the processes that ended unasked, by the worker's name.
        self._ends: dict[str, WorkerEnd] = {}
        for _ in range(config.num_workers):
            self._add_worker()
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._polled_at = 0.0
        self._has_greeted = of_one is not None
        self._screen = Screen()
        # INFO, because vLLM's log goes to a file.
        self._environ = {"VLLM_LOGGING_LEVEL": "INFO", **os.environ}
        self._template: Template | None = None

    def state(self) -> tuple[str, str, Load | None]:
        """Endpoint ("": not known yet), phase and load of the first worker.

        Another thread may ask.
        """
        for worker in list(self._workers):
            endpoint = self._endpoint_of(worker)
            known = "" if endpoint.endswith(ANY_PORT) else endpoint
            return worker.endpoint or known, worker.phase, worker.load
        return "", "", None

    def stop(self, *_: object) -> None:
        """Makes `run` return; a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Keeps the workers running until `stop` is called or the parent has ended.

        Raises:
            StartFailed: a worker cannot start.
            OSError: `run_dir` cannot be written at the start.
        """
        self._template = self._make_template()
        forget_workers(self._config.run_dir)
        self._write_ends()
        write_endpoints(self._config.run_dir, self._endpoints())
        if self._of_one is None:
            self._download()
        if self._config.log_level != "debug":
            logs = ", ".join(str(worker.log.path) for worker in self._workers)
            logger.info("vLLM's log goes to %s; log_level debug shows it here", logs)
        try:
            while self._goes_on() and self._workers:
                self._poll()
        finally:
            self._stopping = True
            self._screen.close()
            self._stop_all()

    def _goes_on(self) -> bool:
        return not self._stopping and os.getppid() == self._parent_pid

    def _download(self) -> None:
        """Brings the model into the cache before several workers would each download it.

        Raises:
            StartFailed: the hub does not give it.
        """
        if wanted_model(self._config, os.environ) is None:
            return
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.supervisor.downloads"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        # Its own deadline is that of a transfer without bytes.
        while process.poll() is None and self._goes_on():
            time.sleep(POLL_S)
        if process.poll() is None:
            process.kill()
        cause, _ = process.communicate()
        if process.returncode and self._goes_on():
            raise StartFailed(
                cause.strip() or f"the download ended: {describe_exit(process.returncode)}"
            )

    def _poll(self) -> None:
        """One turn of the loop: reads the pipes, then compares what runs with what should run."""
        self._read_pipes()
        self._follow_template()
        now = time.monotonic()
        suspended_s = max(0.0, now - self._polled_at - MAX_TURN_S)
        self._polled_at = now
        for worker in list(self._workers):
            if worker.alive_at:
                worker.alive_at = min(now, worker.alive_at + suspended_s)
            self._reap(worker)
            self._check_deadlines(worker)
            if worker.is_leaving and worker.process is None:
                self._remove(worker)
            elif worker.process is None and self._may_start(worker):
                self._start(worker)
        self._greet_when_ready()
        self._screen.tick()
        self._follow_scale()
        self._endpoints_file.keep(self._endpoints())

    # ---- scaling ---------------------------------------------------------------------

    def _follow_scale(self) -> None:
        """Adds workers, or lets some leave, until there are as many as are wanted."""
        staying = [worker for worker in self._workers if not worker.is_leaving]
        ready = [worker for worker in staying if worker.phase == "ready"]
        loads = [worker.load for worker in ready if worker.load is not None]
        self._scale.follow(loads, len(staying) - len(ready), time.monotonic())
        num_missing = self._scale.wanted - len(staying)
        if self._gpus and not self._of_one:
            # A worker that leaves has its GPUs until it is gone.
            num_shares = len(self._gpus) // self._config.gpus_per_worker
            num_missing = min(num_missing, num_shares - len(self._workers))
        for _ in range(num_missing):
            worker = self._add_worker(is_added=True)
            logger.info("%s joins: %d workers are wanted", worker.name, self._scale.wanted)
        # First those that do not serve yet, then the youngest.
        staying.sort(key=lambda worker: (worker.phase != "ready", worker.index))
        for worker in staying[self._scale.wanted :]:
            logger.info("%s leaves: %d workers are wanted", worker.name, self._scale.wanted)
            self._let_go(worker)

    def _add_worker(self, *, is_added: bool = False) -> WorkerProcess:
        # Its GPUs are free, too.
        first = self._of_one[0] if self._of_one else 0
        taken = {one.index for one in self._workers}
        index = min(set(range(first, first + len(taken) + 1)) - taken)
        log = WorkerLog(
            self._config.run_dir, index,
            is_kept=self._keeps_run_dir, log_format=self._config.log_format,
        )  # fmt: skip
        worker = WorkerProcess(index, log, is_added=is_added)
        self._workers.append(worker)
        return worker

    def _let_go(self, worker: WorkerProcess) -> None:
        worker.is_leaving = True
        worker.leave_by = time.monotonic() + self._config.drain_timeout_s + LEAVE_MARGIN_S
        if worker.process is not None:
            worker.process.terminate()

    def _remove(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        try:
            forget_workers(self._config.run_dir, str(worker.index))
        except OSError as error:
            logger.error("the files of %s stay in run_dir: %s", worker.name, error)
        logger.info("%s has left; %d workers stay", worker.name, len(self._workers))

    def _endpoints(self) -> list[str]:
        return [self._endpoint_of(worker) for worker in self._workers]

    def _endpoint_of(self, worker: WorkerProcess) -> str:
        if self._of_one is not None:
            return self._of_one[1]
        return worker_endpoint(self._config.run_dir, worker.index)

    # ---- starting --------------------------------------------------------------------

    def _make_template(self) -> Template | None:
        """The process that workers are forks of, where they are."""
        reason = reason_for_new_interpreters(
            self._environ,
            has_own_command=self._has_own_command,
            is_one_of_a_pool=self._of_one is not None,
        )
        if reason:
            logger.info("each worker starts a new interpreter: %s", reason)
            return None
        first = resources_of_worker(
            0, self._config.num_workers, config=self._config, gpus=self._gpus
        ).variables
        all_gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus)} if self._gpus else {}
        return Template(self._environ | first | all_gpus, self._config.worker_start_timeout_s)

    def _follow_template(self) -> None:
        if self._template is None:
            return
        self._template.follow()
        if self._template.is_importing and not self._has_greeted:
            self._screen.set("workers", "importing")
        else:
            self._screen.remove("workers")

    def _may_start(self, worker: WorkerProcess) -> bool:
        is_waiting = self._template is not None and self._template.is_importing
        return not is_waiting and time.monotonic() >= worker.start_after

    def _start(self, worker: WorkerProcess) -> None:
        worker.started_at = time.monotonic()
        worker.phase = worker.failure = worker.endpoint = ""
        worker.load = None
        worker.alive_at, worker.is_hung = 0.0, False
        worker.last_lines.clear()
        try:
            self._start_process(worker)
        except OSError as error:
            # The system has no memory, process or descriptor for it, or the command is not there.
            self._count_restart(worker, 0)
            self._on_failed_start(worker, f"its process cannot be started: {error}")

    def _start_process(self, worker: WorkerProcess) -> None:
        endpoint = self._endpoint_of(worker)
        if endpoint.startswith("ipc://"):
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        resources = resources_of_worker(
            0 if self._of_one else worker.index,
            self._config.num_workers,
            config=self._config,
            gpus=self._gpus,
        )
        status_read, status_write = os.pipe()
        words = [
            "--endpoint", endpoint, "--worker-id", str(worker.index), "--parent-pid", str(os.getpid()),
        ]  # fmt: skip
        try:
            worker.process = self._new_process(words, resources, status_write)
        except OSError:
            os.close(status_read)
            raise
        finally:
            os.close(status_write)
        if resources.cores:
            try:
                os.sched_setaffinity(worker.process.pid, resources.cores)
            except OSError as error:
                # It has ended already, or cores were taken from this server meanwhile.
                logger.warning("%s runs on any core: %s", worker.name, error)
        worker.log.write(
            f"---- {worker.name} starts, process {worker.process.pid}, {time.strftime('%F %T')} ----"
        )
        worker.pending = {"log": b"", "status": b""}
        assert worker.process.stdout is not None
        self._watch(worker.process.stdout, worker, "log")
        self._watch(os.fdopen(status_read, "rb", buffering=0), worker, "status")

    def _new_process(
        self, words: Sequence[str], resources: Resources, status: int
    ) -> subprocess.Popen[bytes] | ForkedWorker:
        forked = None
        if self._template is not None and self._template.forks(resources.variables):
            forked = self._template.fork(words, resources.variables, resources.cores, status)
        return forked or subprocess.Popen(
            [*self._worker_command, *words, "--status-fd", str(status)],
            env=self._environ | resources.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(status,),
            # A new process group: killing the group also kills vLLM's processes.
            start_new_session=True,
        )

    def _watch(self, pipe: IO[bytes], worker: WorkerProcess, kind: str) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, (worker, kind))

    # ---- reading ---------------------------------------------------------------------

    def _read_pipes(self) -> None:
        for key, _ in self._selector.select(POLL_S):
            worker, kind = key.data
            chunk = os.read(key.fd, 65_536)
            if not chunk:
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                if kind != "log" or not worker.pending[kind]:
                    continue
                # A killed process leaves its last line without a line break.
                chunk = b"\n"
            text = worker.pending[kind] + chunk
            if kind == "log" and not self._has_greeted:
                self._show_progress(worker, text)
            *lines, worker.pending[kind] = text.split(b"\n")
            if len(worker.pending[kind]) > MAX_LINE_BYTES[kind]:
                lines.append(worker.pending[kind])
                worker.pending[kind] = b""
            for line in lines:
                if kind == "log":
                    self._on_log_line(worker, line)
                else:
                    self._on_status_line(worker, line)

    def _show_progress(self, worker: WorkerProcess, chunk: bytes) -> None:
        """Shows what a progress bar in the worker's output says of its phase."""
        if worker.phase not in LOADED and (found := progress_of(chunk.decode(errors="replace"))):
            _, done, total = found
            self._screen.set(worker.name, worker.phase or "starting", done, total)

    def _on_log_line(self, worker: WorkerProcess, line: bytes) -> None:
        # A progress bar overwrites its line: only the last state is kept.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        worker.last_lines.append(text)
        worker.log.write(text)
        if self._config.log_level == "debug":
            self._screen.show(partial(worker.log.show, text))
        elif worker.phase == "ready" and not self._stopping:
            worker.log.show_error(text)

    def _on_status_line(self, worker: WorkerProcess, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=Report)
        except msgspec.DecodeError as error:
            # One worker's fault must not end the server.
            logger.warning("%s: dropped an unreadable report: %s", worker.name, error)
            self._on_log_line(worker, line)
        else:
            self._on_report(worker, report)

    def _on_report(self, worker: WorkerProcess, report: Report) -> None:
        worker.phase = report.phase or worker.phase
        worker.failure = report.failure or worker.failure
        worker.load = report.load or worker.load
        worker.endpoint = report.endpoint or worker.endpoint
        if report.is_alive:
            worker.alive_at = time.monotonic()
        if report.phase in LOADED:
            self._screen.remove(worker.name)
        elif report.phase and not self._has_greeted:
            self._screen.set(worker.name, report.phase)
        if report.phase == "leaving" and not worker.is_leaving:
            # A client has asked it to.
            self._scale.forget_one()
            worker.is_leaving = True
            worker.leave_by = time.monotonic() + self._config.drain_timeout_s + LEAVE_MARGIN_S
        for line in report.log.splitlines():
            worker.last_lines.append(line)
            worker.log.write(line)
            self._screen.show(partial(worker.log.show, line))
        if report.phase == "ready":
            worker.has_been_ready = True
            worker.num_failed_starts = 0
            worker.ready_at = time.monotonic()

    # ---- ending ----------------------------------------------------------------------

    def _reap(self, worker: WorkerProcess) -> None:
        if worker.process is None or (code := worker.process.poll()) is None:
            return
        code = EXIT_HUNG if worker.is_hung else code
        kill_group(worker.process)
        # The pipes may still hold the worker's last lines.
        self._read_pipes()
        worker.process = None
        self._screen.remove(worker.name)
        if worker.is_leaving:
            return
        cause = worker.failure or describe_exit(code)
        self._count_restart(worker, code)
        if worker.phase in LOADED:
            what = "died" if worker.phase == "ready" else "was asked to end"
            self._restart_later(worker, what, cause, self._delay_after_death(worker))
        else:
            self._on_failed_start(worker, cause)

    def _on_failed_start(self, worker: WorkerProcess, cause: str) -> None:
        worker.num_failed_starts += 1
        is_first_start = not worker.has_been_ready and not worker.is_added
        if is_first_start or self._is_hopeless():
            raise StartFailed(self._describe_failed_start(worker, cause))
        self._restart_later(
            worker, "did not start", cause, restart_delay_s(worker.num_failed_starts)
        )

    def _restart_later(self, worker: WorkerProcess, what: str, cause: str, delay_s: float) -> None:
        logger.error(
            "%s %s: %s; restarting it in %g s; its log is %s",
            worker.name, what, cause, delay_s, worker.log.path,
        )  # fmt: skip
        worker.start_after = time.monotonic() + delay_s
        self._note_end(worker, f"{what}: {cause}")

    def _note_end(self, worker: WorkerProcess, reason: str) -> None:
        self._ends[str(worker.index)] = WorkerEnd(reason, time.time())
        self._write_ends()

    def _write_ends(self) -> None:
        write_record(
            self._config.run_dir, ENDS, self._ends, "how workers ended could not be written"
        )

    def _count_restart(self, worker: WorkerProcess, code: int) -> None:
        reason = reason_of(code, has_loaded=worker.phase in LOADED)
        worker.restarts[reason] = worker.restarts.get(reason, 0) + 1
        loss = f"/metrics lacks a restart of {worker.name}"
        write_record(self._config.run_dir, RESTARTS.format(worker.index), worker.restarts, loss)

    def _delay_after_death(self, worker: WorkerProcess) -> float:
        """0 s unless the worker has died early more than once in a row; then a growing delay."""
        is_early = time.monotonic() - worker.ready_at < EARLY_DEATH_S
        worker.num_early_deaths = worker.num_early_deaths + 1 if is_early else 0
        return restart_delay_s(worker.num_early_deaths) if worker.num_early_deaths > 1 else 0.0

    def _is_hopeless(self) -> bool:
        """Whether no worker runs and every worker's last restarts have failed."""
        return all(
            worker.process is None and worker.num_failed_starts >= MAX_FAILED_STARTS
            for worker in self._workers
        )

    def _describe_failed_start(self, worker: WorkerProcess, reason: str) -> str:
        cause, lines = root_cause([line for line in worker.last_lines if line.strip()], reason)
        phase = worker.phase or "starting"
        return f"{worker.name} could not start ({phase}): {cause}\n{worker.log.excerpt(lines)}"

    def _check_deadlines(self, worker: WorkerProcess) -> None:
        limit_s, hang_s = self._config.worker_start_timeout_s, self._config.worker_hang_timeout_s
        if worker.process is None:
            return
        now = time.monotonic()
        if worker.is_leaving:
            if now > worker.leave_by:
                kill_group(worker.process)
        elif worker.phase in LOADED:
            # Signs of life come as often as heartbeats.
            silent_s = now - worker.alive_at - 2 * self._config.heartbeat_interval_s
            if hang_s and worker.alive_at and silent_s > hang_s:
                worker.is_hung = True
                worker.failure = (
                    f"it hangs: no sign of life for {hang_s:g} s (worker_hang_timeout_s)"
                )
                worker.process.send_signal(STACKS_SIGNAL)
                time.sleep(STACKS_S)
                kill_group(worker.process)
        elif now - worker.started_at > limit_s:
            worker.failure = (
                f"not ready after {limit_s:g} s, still {worker.phase or 'starting'}; "
                "raise worker_start_timeout_s"
            )
            kill_group(worker.process)

    def _stop_all(self) -> None:
        if self._template is not None:
            self._template.close()
        processes = [worker.process for worker in self._workers if worker.process is not None]
        for process in processes:
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(one.poll() is None for one in processes) and time.monotonic() < deadline:
            # A worker that waits for space in a full pipe could not end.
            self._read_pipes()
        for process in processes:
            kill_group(process)
            process.wait()

    # ---- greeting --------------------------------------------------------------------

    def _greet_when_ready(self) -> None:
        if self._has_greeted or any(worker.phase != "ready" for worker in self._workers):
            return
        if self._url is not None and not is_healthy(self._url):
            return
        self._has_greeted = True
        self._screen.close()
        show(greeting(self._config, self._url, requires_key=self._requires_key))


def kill_group(process: subprocess.Popen[bytes] | ForkedWorker) -> None:
    """Kills a worker and its engine processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def restart_delay_s(num_failures: int) -> float:
    """Exponential backoff, in seconds."""
    # Bounded first: a power of floats overflows at 1,024 failures.
    return min(2.0 ** min(num_failures, 10), MAX_RESTART_DELAY_S)


def is_healthy(url: str) -> bool:
    """Whether `/health` of the server at `url` answers with 200 within a second."""
    handlers: list[urllib.request.BaseHandler] = [
        # A proxy of the environment does not reach this host.
        urllib.request.ProxyHandler({}),
        # The certificate is for the names that clients use, not for this address.
        urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),
    ]
    try:
        opener = urllib.request.build_opener(*handlers)
        with opener.open(url + "/health", timeout=1) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def greeting(config: ServerConfig, url: str | None, *, requires_key: bool = False) -> str:
    """The last lines of a start: the model, the server's address and a command to try."""
    model = (
        config.model or "a tiny random demo model, which writes nonsense (name yours with MODEL)"
    )
    if url is None:
        return f"\ntitopool serves {model}."
    key = ' -H "Authorization: Bearer $TITOPOOL_API_KEY"' if requires_key else ""
    return (
        f"\ntitopool serves {model} at {url}. Try it:\n\n"
        f"  curl -s {url}/generate/{key} -H 'Content-Type: application/json' \\\n"
        '    -d \'{"prompts": ["Hello, world"], "max_tokens": 8}\'\n'
    )


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code == EXIT_HUNG:
        return "its event loop stood for longer than worker_hang_timeout_s; the log has the stack"
    if code == -signal.SIGKILL:
        return "it was killed (SIGKILL); the machine is perhaps out of memory"
    if code < 0:
        # A real-time signal has no name.
        names = {one.value: one.name for one in signal.Signals}
        return f"it was ended by {names.get(-code, f'signal {-code}')}"
    return f"it exited with code {code}"


def main(argv: Sequence[str] | None = None, worker_command: Sequence[str] = ()) -> int:
    """Runs the supervisor; returns its exit code."""
    arguments = parser_of("python -m workers.supervisor").parse_args(argv)
    config = from_environment()
    configure_logging(config.log_level, log_format=config.log_format)
    own_run_dir(config.run_dir)
    supervisor = Supervisor(
        config,
        parent_pid=arguments.parent_pid,
        url=arguments.url,
        requires_key=arguments.requires_key,
        keeps_run_dir=not arguments.remove_run_dir,
        worker_command=worker_command,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.stop)
    try:
        supervisor.run()
        remove_orphaned_run_dir(arguments, config.run_dir)
        return 0
    except (StartFailed, ConfigError) as error:
        cause = str(error)
    except Exception as error:
        logger.exception("the supervisor failed")
        cause = f"the supervisor failed: {error}"
    end_master(arguments, config.run_dir, cause)
    return 1
