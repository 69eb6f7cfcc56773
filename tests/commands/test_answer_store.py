"""The store of answers by keys: its bounds, its faults, and two processes that share it.

The requests go through the real handling of the header Idempotency-Key; only the route behind it is
the test's own.
"""

import random
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import gevent
import pytest
from flask import Flask, Response, request

from app.http import answer_store, idempotency
from app.http.answer_store import FILE, AnswerStore
from app.http.idempotency import HEADER, SUPPORTED
from harness.servers import REPOSITORY, environment
from titopool.errors import Conflict
from titopool.settings.config import ServerConfig
from titopool.wire.run_dir import ANSWERS

NAME, DIGEST = b"n" * 32, b"d" * 32
KIB, MIB = 2**10, 2**20
# What SQLite's log and the empty file take.
FIXED_BYTES = MIB
# The loop's longest stop, of CPU time: 2 ms at most on a quiet machine. A sweep in one go takes more.
MAX_STOP_S = 0.01


class FrontEnd:
    """A front end without workers: `answer` makes the answer of a key."""

    def __init__(self, folder: Path, answer: Callable[[str], bytes] = str.encode, **settings: int):
        self.ran: list[str] = []
        self._answer, self._app = answer, Flask("front end")
        for place, name in enumerate(SUPPORTED):
            self._app.add_url_rule(f"/{place}", name, self._run, methods=["POST"])
        config = ServerConfig(run_dir=str(folder), num_front_ends=1, **settings)
        idempotency.init_app(self._app, config)
        # Errors are raised.
        self._app.testing = True

    def _run(self) -> Response:
        key = request.headers[HEADER]
        self.ran.append(key)
        return Response(self._answer(key), mimetype="application/json")

    def post(self, key: str, place: int = 0) -> bytes:
        return self._app.test_client().post(f"/{place}", headers={HEADER: key}).data


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


def num_names(folder: Path) -> int:
    with closing(sqlite3.connect(folder / ANSWERS / FILE, timeout=30)) as file:
        (number,) = file.execute("SELECT count(*) FROM names").fetchone()
    return int(number)


def test_many_tiny_keys_take_what_is_set(tmp_path: Path):
    front_end = FrontEnd(tmp_path, idempotency_bytes=128 * KIB)
    keys = [f"key-{number}" for number in range(2000)]
    for key in keys:
        front_end.post(key)
    assert bytes_in(tmp_path) < 128 * KIB + FIXED_BYTES
    # The newest ones stay.
    for key in keys[-200:]:
        assert front_end.post(key) == key.encode()
    assert front_end.ran == keys


@pytest.mark.parametrize("num_bytes", [30_000, 300_000], ids=["a piece", "pieces"])
def test_an_answer_is_kept_whole_or_not_at_all(tmp_path: Path, num_bytes: int):
    answers = {"kept": random.randbytes(num_bytes + 1), "refused": random.randbytes(num_bytes)}
    bound = num_bytes * 7 // 4
    front_end = FrontEnd(tmp_path, answers.__getitem__, idempotency_bytes=bound)
    for key, answer in answers.items():
        assert front_end.post(key) == answer
    assert front_end.post("kept") == answers["kept"]
    with pytest.raises(Conflict, match="idempotency_bytes"):
        front_end.post("refused")
    assert front_end.ran == list(answers)
    assert bytes_in(tmp_path) < bound + FIXED_BYTES


def test_a_sweep_of_many_keys_does_not_stop_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = FrontEnd(tmp_path)
    before.post("first")
    # Its sweep has been.
    gevent.sleep(0.01)
    for number in range(2000):
        before.post(str(number))
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + answer_store.KEEP_S + 1)
    front_end, stops = FrontEnd(tmp_path), []

    def watch() -> None:
        last = time.thread_time()
        while True:
            gevent.sleep(1e-6)
            last, before = time.thread_time(), last
            stops.append(last - before)

    with gevent.Timeout(60):
        watching = gevent.spawn(watch)
        while not stops:
            gevent.sleep(0.01)
        # A front end's first request begins a sweep.
        front_end.post("new")
        while num_names(tmp_path) > 1:
            gevent.sleep(0.1)
        num_stops = len(stops)
        while len(stops) == num_stops:
            gevent.sleep(0.01)
        watching.kill()
    assert max(stops) < MAX_STOP_S
    assert front_end.post("new") == b"new"
    assert front_end.ran == ["new"]


def test_a_sweep_takes_no_name_that_has_begun_again(tmp_path: Path):
    """Between a sweep's look at a name and its lock, another front end sweeps and begins."""
    slow, quick = AnswerStore(tmp_path, MIB), AnswerStore(tmp_path, MIB)

    def keep(store: AnswerStore) -> None:
        assert store.locks.take(NAME)
        assert store.begin(NAME, DIGEST) is None
        store.keep(NAME, DIGEST, b"", b"answer")
        store.locks.free(NAME)

    keep(slow)
    old_s = time.time()
    take = slow.locks.take

    def take_late(name: bytes) -> bool:
        slow.locks.take = take  # type: ignore[method-assign]
        quick.remove_before(old_s)
        assert quick.find(NAME) is None
        keep(quick)
        return take(name)

    slow.locks.take = take_late  # type: ignore[method-assign]
    try:
        slow.remove_before(old_s)
    finally:
        slow.locks.take = take  # type: ignore[method-assign]
    known = quick.find(NAME)
    assert known is not None
    assert quick.read(NAME, known) == [b"answer"]


@contextmanager
def other_process(code: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.commands.test_answer_store import *\n{code}", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), cwd=REPOSITORY, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


# Answers a key of each line with how often it ran here. The key `hold` runs on.
SERVE = """
def answer(key):
    if key == "hold":
        print("runs", flush=True)
        time.sleep(120)
    return key.encode()

front_end = FrontEnd(Path(sys.argv[1]), answer)
for line in sys.stdin:
    assert front_end.post(line.strip()) == line.strip().encode()
    print(front_end.ran.count(line.strip()), flush=True)
"""


def ask(process: "subprocess.Popen[str]", key: str) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{key}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_the_key_of_a_killed_process_is_free_at_once(tmp_path: Path):
    with other_process(SERVE, str(tmp_path)) as process:
        with pytest.raises(ValueError, match="runs"):
            ask(process, "hold")
        # A sweep leaves a key that runs, however old.
        store = AnswerStore(tmp_path / ANSWERS, MIB)
        store.remove_before(time.time() + 1)
        assert num_names(tmp_path) == 1
        process.kill()
        process.wait(60)
    front_end = FrontEnd(tmp_path)
    begin_s = time.monotonic()
    # Nothing was answered: it may be another request.
    assert front_end.post("hold", place=1) == b"hold"
    assert time.monotonic() - begin_s < idempotency.REPEAT_WITHIN_S / 2
    store.remove_before(time.time() + 1)
    assert num_names(tmp_path) == 0


# Two processes run each key again and again, since each sweep takes all answers.
RUN_AND_SWEEP = """
import os

other = os.fork()
folder, ends_s = Path(sys.argv[1]), time.monotonic() + float(sys.argv[2])
answer_store.KEEP_S = idempotency.SWEEP_EVERY_S = 0.0
idempotency.POLL_S = 0.001
num_runs = 0

def alone(key):
    global num_runs
    num_runs += 1
    path = folder / f"running-{key}"
    path.touch(exist_ok=False)
    gevent.sleep(random.random() / 100)
    path.unlink()
    return key.encode()

def post():
    while time.monotonic() < ends_s:
        key = str(random.randrange(10))
        assert front_end.post(key) == key.encode()

front_end = FrontEnd(folder, alone)
posting = [gevent.spawn(post) for _ in range(8)]
assert len(gevent.joinall(posting, raise_error=True, timeout=60)) == 8
assert num_runs > 20
assert other == 0 or os.waitpid(other, 0)[1] == 0
"""


def test_no_key_runs_twice_at_once_while_two_processes_sweep(tmp_path: Path):
    with other_process(RUN_AND_SWEEP, str(tmp_path), "1.5") as process:
        process.communicate(timeout=120)
        assert process.returncode == 0


def other_layout(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("CREATE TABLE names (old TEXT)")


def earlier_start(path: Path) -> None:
    FrontEnd(path.parent.parent).post("key")
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("PRAGMA user_version = 1")


@pytest.mark.parametrize(
    "make",
    [lambda path: path.write_bytes(random.randbytes(50_000)), other_layout, earlier_start],
    ids=["broken", "other layout", "earlier start of the host"],
)
def test_a_file_that_cannot_be_read_is_replaced(
    tmp_path: Path, make: Callable[[Path], object], caplog: pytest.LogCaptureFixture
):
    (tmp_path / ANSWERS).mkdir(mode=0o700)
    make(tmp_path / ANSWERS / FILE)
    for front_end, ran in ((FrontEnd(tmp_path), ["key"]), (FrontEnd(tmp_path), [])):
        assert front_end.post("key") == b"key"
        assert front_end.ran == ran
    assert caplog.text.count("is replaced by an empty file") == 1


def test_a_file_that_breaks_is_replaced_for_all(tmp_path: Path):
    front_end = FrontEnd(tmp_path)
    with other_process(SERVE, str(tmp_path)) as other:
        assert front_end.post("before") == b"before"
        assert ask(other, "before") == 0
        for path in (tmp_path / ANSWERS).glob(f"{FILE}*"):
            assert path.stat().st_mode & 0o777 == 0o600
            if not path.name.endswith("-shm"):
                # In place, and both have it open. This process would free its own locks of it.
                command = [
                    "dd",
                    "if=/dev/urandom",
                    f"of={path}",
                    "bs=64K",
                    "count=1",
                    "conv=notrunc",
                ]
                subprocess.run(command, check=True, capture_output=True, timeout=60)
        for key, num_runs in (("broken", None), ("after", 1), ("again", 1)):
            assert front_end.post(key) == key.encode()
            num_others = ask(other, key)
            assert num_runs in (None, num_others + front_end.ran.count(key))
        assert ask(other, "other") == 1
        assert front_end.post("other") == b"other"
    assert "other" not in front_end.ran


def test_an_answer_with_other_bytes_is_not_given(tmp_path: Path):
    front_end = FrontEnd(tmp_path, lambda key: key.encode() * 50_000)
    answer = front_end.post("key")
    with closing(sqlite3.connect(tmp_path / ANSWERS / FILE)) as file, file:
        file.execute("UPDATE pieces SET piece = zeroblob(length(piece)) WHERE id % 2")
    assert front_end.post("key") == front_end.post("key") == answer
    assert front_end.ran == ["key", "key"]


def test_requests_run_while_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    front_end = FrontEnd(tmp_path)
    front_end.post("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (KIB, limits[1]))
    try:
        assert front_end.post("full") == front_end.post("full") == b"full"
        # A folder that nobody could make files in.
        late = FrontEnd(Path("/proc/none"))
        assert late.post("late") == late.post("late") == b"late"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert front_end.post("after") == front_end.post("after") == b"after"
    assert front_end.ran == ["before", "full", "full", "after"]
    assert "answers are not kept" in caplog.text
