"""Output of workers under a real supervisor: own lines on the screen, vLLM's in a file."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.servers import REPOSITORY, START_TIMEOUT_S, environment, kill_all, wait_until
from titopool.settings.config import ServerConfig
from titopool.wire.run_dir import ENDS, WorkerEnd, read_record
from workers.supervisor import worker_log
from workers.supervisor.supervisor import MAX_LINE_BYTES, Supervisor
from workers.supervisor.worker_log import WorkerLog, error_text

ENGINE_ERROR = "(EngineCore pid=7) ERROR 11-21 22:15:55 [core.py:12] "


def test_a_line_without_an_end_takes_bounded_memory(tmp_path: Path):
    config = ServerConfig(run_dir=str(tmp_path), num_workers=1)
    supervisor = Supervisor(config, parent_pid=os.getppid(), url=None)
    (worker,) = supervisor._workers
    worker.pending = {"log": b"", "status": b""}
    (log, into_log), (status, into_status) = os.pipe(), os.pipe()
    supervisor._watch(os.fdopen(log, "rb", buffering=0), worker, "log")
    supervisor._watch(os.fdopen(status, "rb", buffering=0), worker, "status")
    for _ in range(24):
        os.write(into_log, b"x" * 60_000)
        os.write(into_status, b"x" * 60_000)
        supervisor._read_pipes()
        assert len(worker.pending["log"]) <= MAX_LINE_BYTES["log"]
        assert len(worker.pending["status"]) <= MAX_LINE_BYTES["status"]
    os.close(into_log)
    os.close(into_status)
    supervisor._read_pipes()
    # Nothing of the log is lost; what is no report is there too.
    assert worker.log.path.read_text().count("x") >= 24 * 60_000


class Supervised:
    """A running supervisor."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path):
        self.process = process
        self.run_dir = folder / "run"
        self._screen = folder / "screen"

    @property
    def screen(self) -> str:
        return self._screen.read_text()

    def log(self, name: str = "worker-0.log") -> str:
        path = self.run_dir / name
        return path.read_text() if path.exists() else ""

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.screen, START_TIMEOUT_S, lambda: self.screen + self.log())

    def stop(self) -> None:
        """Stops the supervisor, and with it its parent."""
        (supervisor,) = psutil.Process(self.process.pid).children()
        supervisor.send_signal(signal.SIGTERM)
        self.process.wait(30)


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, *arguments: str, **variables: str) -> Supervised:
        (tmp_path / "run").mkdir(exist_ok=True)
        variables = {
            "TITOPOOL_RUN_DIR": str(tmp_path / "run"), "TITOPOOL_NUM_WORKERS": "1",
            "XDG_CACHE_HOME": str(tmp_path / "cache"), **variables,
        }  # fmt: skip
        # A parent that the supervisor may stop when a start fails, as it stops gunicorn's master.
        words = ["bash", "-c", 'trap : TERM; "$@"; exit $?', "-"]
        with (tmp_path / "screen").open("wb") as screen:
            process = subprocess.Popen(
                [*words, sys.executable, "-m", "tests.kit.workers.supervised", code, *arguments],
                env=environment(**variables), cwd=REPOSITORY, stderr=screen,
            )  # fmt: skip
        started.append(process)
        return Supervised(process, tmp_path)

    yield start
    for process in started:
        if process.poll() is None:
            kill_all(psutil.Process(process.pid).children(recursive=True))
            process.kill()
            process.wait()


NOISY = """
report("importing")
write("a library speaks")
library.warning("a library warns")
report("loading")
print("half a line", end="", flush=True)
report("ready")
logger.warning("a worker warns of \\udcff")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("a job failed")
wait()
logger.info("a worker ends")
write("a library ends")
"""


def test_own_lines_are_on_the_screen_and_all_lines_in_the_file(supervise):
    server = supervise(NOISY)
    server.wait_for("ZeroDivisionError")
    server.stop()
    own_lines = [
        "worker 0: importing", "worker 0: loading (importing took", "worker 0: ready (loading took",
        "worker 0 | ", "a worker warns of \\udcff", "a job failed",
        "worker 0 |   ZeroDivisionError: division by zero", "a worker ends",
    ]  # fmt: skip
    library_lines = ["a library speaks", "WARNING vllm.core: a library warns", "a library ends"]
    library_lines.append("half a line")
    for text in own_lines:
        assert text in server.screen
    assert f"goes to {server.run_dir}/worker-0.log" in server.screen
    for text in library_lines:
        assert text not in server.screen
    for text in [*library_lines, *own_lines[:3], *own_lines[4:6]]:
        assert text in server.log()


def test_an_unreadable_report_ends_nothing(supervise):
    code = 'os.write(report._status_fd, b\'{"phase": "rea{"log": 1}\\n\'); report("ready"); wait()'
    server = supervise(code)
    server.wait_for("worker 0: ready")
    assert "worker 0: dropped an unreadable report: " in server.screen
    assert '{"phase": "rea{"log": 1}' in server.log()
    server.stop()


def test_how_a_worker_ended_is_kept_for_the_front_ends(supervise):
    begun = time.time()
    server = supervise('report("ready"); time.sleep(0.2); os._exit(3)')
    server.wait_for("worker 0 died: it exited with code 3")

    def ends() -> dict[str, WorkerEnd]:
        return read_record(str(server.run_dir), ENDS, dict[str, WorkerEnd], {})

    wait_until(ends, 5)
    end = ends()["0"]
    assert end.reason == "died: it exited with code 3"
    assert begun <= end.ended_at <= time.time()
    server.stop()


def test_a_full_disk_behind_the_screen_stops_no_process(supervise):
    server = supervise(NOISY)
    server.wait_for("worker 0: ready")
    processes = psutil.Process(server.process.pid).children(recursive=True)
    for process in processes:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    length = len(server.screen)
    # The worker writes its last lines.
    worker = processes[-1]
    worker.send_signal(signal.SIGTERM)
    # The supervisor starts another worker.
    supervisor = psutil.Process(server.process.pid).children()[0]
    wait_until(lambda: [one.pid for one in supervisor.children()] not in ([], [worker.pid]), 20)
    assert len(server.screen) == length
    server.stop()


def test_debug_level_shows_all_lines(supervise):
    server = supervise(NOISY, TITOPOOL_LOG_LEVEL="debug")
    server.wait_for("ZeroDivisionError")
    server.stop()
    for text in ("worker 0 | a library speaks", "a library warns", "worker 0: importing"):
        assert text in server.screen
        assert text.removeprefix("worker 0 | ") in server.log()


def test_library_errors_are_shown_up_to_a_limit(supervise, tmp_path):
    flag = tmp_path / "is-seen"
    server = supervise(f"""
write("{ENGINE_ERROR}before it serves")
report("ready")
while not os.path.exists({str(flag)!r}): time.sleep(0.01)
write("{ENGINE_ERROR}it has failed")
write("{ENGINE_ERROR}Traceback (most recent call last):")
write('{ENGINE_ERROR}  File "core.py", line 12, in step')
write("{ENGINE_ERROR}RuntimeError: the cause")
write("(EngineCore pid=7) WARNING 11-21 22:15:55 [core.py:12] a warning")
for number in range(99):
    write("{ENGINE_ERROR}again %d" % number)
wait()
write("{ENGINE_ERROR}while it stops")
""")
    server.wait_for("worker 0: ready")
    flag.touch()
    wait_until(lambda: "again 98" in server.log(), 30)
    server.stop()
    shown = [error_text(line.removeprefix("worker 0 | ")) for line in server.screen.splitlines()]
    assert [text for text in shown if text] == [
        "it has failed", "RuntimeError: the cause", *(f"again {number}" for number in range(8)),
    ]  # fmt: skip
    assert server.screen.count("more errors are in") == 1
    assert "while it stops" in server.log()


@pytest.mark.parametrize(
    "line, text",
    [
        ("ERROR 11-21 22:15:55 [core.py:12] it failed", "it failed"),
        ("(Worker_TP1 pid=9) (x) CRITICAL 11-21 22:15:55 [a/b.py:1] it failed", "it failed"),
        ("2026-11-21 22:15:55,123 ERROR asyncio: it failed", "asyncio: it failed"),
        ("[rank1]:[E1121 22:15:55.123456 ProcessGroupNCCL.cpp:68] timeout", "ProcessGroupNCCL.cpp:68] timeout"),
        ("[E1121 22:15:55.123456 utils.cpp:68] bad", "utils.cpp:68] bad"),
        ("Fatal Python error: Segmentation fault", "Fatal Python error: Segmentation fault"),
        ("INFO 11-21 22:15:55 [core.py:12] ERROR is a word", ""),
        ("[W1121 22:15:55.123456 utils.cpp:68] Warning", ""),
        ("2026-11-21 22:15:55,123 WARNING asyncio: slow", ""),
        ("ERROR 11-21 22:15:55 [core.py:12]     return self.step()", ""),
        ("Traceback (most recent call last):", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_error_lines_are_recognised(line, text):
    assert error_text(line) == text


FAILING = """
report("loading")
for number in range(50):
    write("step %d" % number)
raise ValueError("no such model")
"""


def test_a_failed_start_shows_the_end_of_the_log_and_its_path(supervise):
    server = supervise(FAILING)
    assert server.process.wait(60) == 1
    conclusion = server.screen.rpartition("\ntitopool: ")[2].rstrip().splitlines()
    assert conclusion[0] == "worker 0 could not start (loading): ValueError: no such model"
    assert conclusion[1] == f"  the last lines of its log, {server.run_dir}/worker-0.log:"
    assert conclusion[2:] == [f"    step {number}" for number in range(30, 50)]
    assert "step 0\n" in server.log()


def test_the_log_of_a_failed_start_outlives_a_private_run_dir(supervise, tmp_path, monkeypatch):
    kept = tmp_path / "cache" / "titopool" / "failed-starts"
    kept.mkdir(parents=True)
    for number in range(worker_log.MAX_KEPT_LOGS):
        (kept / f"2020-01-{number + 1:02}-120000-7-worker-0.log").touch()
    server = supervise(FAILING, "--remove-run-dir")
    assert server.process.wait(60) == 1
    names = sorted(path.name for path in kept.iterdir())
    assert len(names) == worker_log.MAX_KEPT_LOGS
    assert names[0].startswith("2020-01-02")
    assert f"the last lines of its log, {kept}/{names[-1]}:" in server.screen
    assert "step 0\n" in (kept / names[-1]).read_text()


def test_a_log_that_cannot_be_saved_does_not_hide_the_cause(supervise, tmp_path):
    (tmp_path / "cache").touch()
    server = supervise(FAILING, "--remove-run-dir")
    assert server.process.wait(60) == 1
    conclusion = server.screen.rpartition("\ntitopool: ")[2]
    assert "ValueError: no such model" in conclusion
    assert "its log, which is lost (" in conclusion
    assert "    step 49\n" in conclusion


def test_a_worker_s_death_is_reported_with_its_log(supervise, tmp_path):
    flag = tmp_path / "has-died"
    server = supervise(f"""
report("ready")
if not os.path.exists({str(flag)!r}):
    open({str(flag)!r}, "w").close()
    write("last words")
    os._exit(3)
wait()
""")
    server.wait_for("it exited with code 3; restarting it in 0 s; its log is")
    # The new worker appends to the same file.
    wait_until(lambda: server.log().count("---- worker 0 starts, process ") == 2, 30)
    server.stop()
    assert "last words" in server.log()


def test_the_log_of_the_server_before_is_kept(supervise):
    for word in ("first", "second"):
        server = supervise(f"write('{word}')\nreport('ready')\nwait()")
        server.wait_for("worker 0: ready")
        server.stop()
    assert "second" in server.log()
    assert "first" not in server.log()
    assert "first" in server.log("worker-0.log.1")


def test_log_files_stay_small(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_log, "MAX_FILE_BYTES", 2_000)
    log = WorkerLog(str(tmp_path), 0, is_kept=True)
    for number in range(1_000):
        log.write(f"line {number}")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"worker-0.log", "worker-0.log.1"}
    assert max(sizes.values()) <= 2_000
    assert "line 999\n" in (tmp_path / "worker-0.log").read_text()


def test_a_full_disk_does_not_stop_the_workers(caplog):
    log = WorkerLog("/dev", 0, is_kept=True)
    log.path = log.path.with_name("full")
    log.baseFilename = "/dev/full"
    for _ in range(3):
        log.write("a line")
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full cannot be written; log lines are lost"
    ]


def test_a_worker_that_writes_much_at_its_end_does_not_hang(supervise):
    # More than the buffer of a pipe.
    server = supervise("report('ready')\nwait()\nwrite('x' * 200_000)\nwrite('the end')")
    server.wait_for("worker 0: ready")
    server.stop()
    assert "the end\n" in server.log()
