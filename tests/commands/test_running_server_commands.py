"""`titopool status` and `scale` against running servers."""

import io
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from harness.servers import (
    REPOSITORY,
    TITOPOOL,
    Server,
    environment,
    free_port,
    running_server,
    wait_until,
)
from tests.kit.terminal import Terminal, on_terminal
from titopool import cli
from titopool.answers.operators import Ready, ReadyWorker
from titopool.answers.weights import Weights, WorkerWeights
from titopool.client.results import WorkerStatus
from titopool.commands import scale, status, status_screen
from titopool.commands.help import console
from titopool.errors import TitopoolError
from titopool.release import RELEASE, VERSION_HEADER

KEY = "a-marked-key"


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TITOPOOL, *words],
        env=environment(**variables), cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


# ---- status --------------------------------------------------------------------------


def test_status_shows_all_workers_whichever_front_end_answers(start_stub, stub_server):
    start_stub(0)
    start_stub(1)
    server = stub_server(2, TITOPOOL_NUM_FRONT_ENDS="2")
    server.generate([[1, 2, 3]] * 5, max_tokens=3)

    def found() -> dict:
        ended = run("status", "--url", server.url, "--json")
        # 1 at a front end that has not heard of the workers yet.
        assert ended.returncode in (0, 1), ended.stderr
        return json.loads(ended.stdout)

    # Figures are those of the last heartbeats, and each front end has its own.
    answers = [found()]

    def has_all() -> bool:
        answers.append(found())
        return sum(one["completed_jobs"] for one in answers[-1]["workers"]) == 5

    wait_until(has_all, 20)
    facts = answers[-1]
    assert facts["ready"]
    assert facts["model"] == "stub"
    assert facts["waiting_prompts"] == 0
    assert {one["worker"] for one in facts["workers"]} == {"0", "1"}
    for one in facts["workers"]:
        assert one["phase"] == "ready"
        assert (one["sequences"], one["slots"], one["weight_version"]) == (0, 256, 0)
        assert one["last_update"] == "none"
    assert sum(one["completion_tokens"] for one in facts["workers"]) == 15
    shown = run("status", "--url", server.url, COLUMNS="120")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"ready  {server.url}\nmodel stub, 4,096 tokens at most, ")
    assert "0/256" in shown.stdout


def test_status_without_a_ready_worker_and_without_a_server(stub_server):
    server = stub_server(1, num_ready=0)
    ended = run("status", "--url", server.url)
    assert ended.returncode == 1
    assert ended.stdout.startswith("not ready")
    gone = run("status", "--url", "http://127.0.0.1:9")
    assert (gone.returncode, gone.stdout) == (3, "")
    assert gone.stderr.startswith("titopool: http://127.0.0.1:9: no server answers (")
    assert json.loads(run("status", "--url", "http://127.0.0.1:9", "--json").stdout)["error"]


def test_status_takes_the_keys_of_the_environment(start_stub, stub_server):
    start_stub(0)
    keys = {"TITOPOOL_API_KEY": KEY, "TITOPOOL_ADMIN_KEY": "an-admin-key"}
    server = stub_server(1, **keys)
    ended = run("status", "--url", server.url, "--json", **keys)
    (worker,) = json.loads(ended.stdout)["workers"]
    assert (worker["last_update"], worker["slots"]) == ("none", 256)
    # Without a key it shows what /ready shows everybody.
    without = run("status", "--url", server.url)
    assert without.returncode == 0
    assert "model needs the key" in without.stdout
    only_api = run("status", "--url", server.url, "--json", TITOPOOL_API_KEY=KEY)
    (worker,) = json.loads(only_api.stdout)["workers"]
    assert (worker["last_update"], worker["slots"]) == (None, 256)
    for one in (ended, without, only_api):
        assert KEY not in one.stdout + one.stderr


def test_status_wraps_no_sentence_through_a_pipe(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    names = ("phase_s", "weight_version", *status.GAUGES, *status.COUNTERS)
    worker = {"worker": "0", "phase": "stale", "is_paused": False, **dict.fromkeys(names, 0)}
    sentence = "they were sent through a group; " * 8
    found = {
        "url": "u", "ready": False, "draining": False, "model": "m" * 90, "max_model_len": 9,
        "adapters": {}, "waiting_prompts": 0, "needs_key": False, "requests": None,
        "workers": [worker | {"last_update": sentence, "reason": sentence}],
    }  # fmt: skip
    screen = console()
    screen.print(status_screen.of(found, width=screen.width))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert sum(sentence.strip() in line for line in lines) == 2


def post_in_thread(server: Server, name: str, num_ids: int) -> Thread:
    headers = {"X-Request-Id": name, "Authorization": f"Bearer {KEY}"}
    sent = Thread(
        target=server.post, args=("/generate/", {"prompts": [[7] * num_ids]}),
        kwargs={"headers": headers}, daemon=True,
    )  # fmt: skip
    sent.start()
    return sent


def test_requests_in_flight_stand_below_the_workers_the_oldest_first(start_stub, stub_server):
    start_stub(0, "--delay-s", "100", "--max-num-seqs", "4")
    server = stub_server(1, "--num-front-ends", "2", TITOPOOL_API_KEY=KEY)
    sent = []
    for index, name in enumerate(("first", "second", "third")):
        sent.append(post_in_thread(server, name, 10 * (index + 1)))
        wait_until(lambda n=index + 1: num_in_flight(server) == n, 20)
    shown = run("status", "--url", server.url, TITOPOOL_API_KEY=KEY, COLUMNS="140").stdout
    assert "3 requests in flight\n" in shown
    row = r"first +running +[\d.]+ s +10 +\d+ +1 +/generate +127\.0\.0\.1:\d+ +api_key +0 +stub"
    assert re.search(row, shown), shown
    assert shown.index("first") < shown.index("second") < shown.index("third")
    narrow = run("status", "--url", server.url, TITOPOOL_API_KEY=KEY, COLUMNS="70").stdout
    assert re.search(r"first +running +[\d.]+ s +10 +\d+ +1 +/generate +0", narrow), narrow
    facts = json.loads(run("status", "--url", server.url, "--json", TITOPOOL_API_KEY=KEY).stdout)
    assert facts["requests"]["num_requests"] == 3
    # They are not for everybody.
    assert "first" not in run("status", "--url", server.url).stdout
    with watched(server.url, TITOPOOL_API_KEY=KEY) as terminal:
        terminal.wait_for("3 requests in flight", 20)
        server.post("/abort_requests", {}, headers={"Authorization": f"Bearer {KEY}"})
        # Their table goes with the last one.
        wait_until(lambda: "in flight" not in terminal.text, 20, lambda: terminal.text)
        for one in sent:
            one.join(20)
        # Three jobs of which no token is known, or some.
        wait_until(lambda: re.search(r"tokens/s +jobs", terminal.text), 20, lambda: terminal.text)
        terminal.type(b"\x03")
        assert terminal.wait(20) == 0


def num_in_flight(server: Server) -> int:
    headers = {"Authorization": f"Bearer {KEY}"}
    return int(server.get("/requests", headers=headers).json()["num_requests"])


def watched(url: str, **variables: str) -> AbstractContextManager[Terminal]:
    # pytest-xdist's processes have COLUMNS, which wins over the terminal's size.
    env = environment(TERM="xterm-256color", COLUMNS="100", **variables)
    words = ["status", "--watch", "--interval-s", "0.2", "--url", url]
    return on_terminal([TITOPOOL, *words], env=env, cwd=REPOSITORY)


def test_a_watch_waits_for_a_server_that_is_away(start_stub, stub_server, tmp_path):
    port = free_port()
    with watched(f"http://127.0.0.1:{port}") as terminal:
        terminal.wait_for("Connection refused", 20)
        start_stub(0)
        endpoint = f"ipc://{tmp_path}/worker-0"
        with running_server("--endpoints", endpoint, log=tmp_path / "log", port=port):
            wait_until(lambda: terminal.text.startswith("ready "), 20, lambda: terminal.text)
            assert "trying again" not in terminal.text
        # What was seen last stays.
        wait_until(lambda: "trying again" in terminal.text, 20, lambda: terminal.text)
        assert "0/256" in terminal.text
        terminal.type(b"\x03")
        assert terminal.wait(20) == 3


def test_front_ends_that_do_not_answer_are_told_without_requests_too():
    found = {
        "url": "u", "ready": True, "draining": False, "model": "m", "max_model_len": 9,
        "adapters": {}, "waiting_prompts": 0, "needs_key": False, "workers": [],
        "requests": {"requests": [], "num_requests": 0, "num_front_ends": 1, "num_missing": 1},
    }  # fmt: skip
    screen = Console(width=100, file=io.StringIO())
    screen.print(status_screen.of(found, width=100))
    assert "1 front ends do not answer" in screen.file.getvalue()


def test_rates_are_those_of_two_looks():
    def look(**tokens: int | None) -> dict:
        return {"workers": [{"worker": n, "completion_tokens": one} for n, one in tokens.items()]}

    before = look(a=100, b=500, c=None)
    # `b` was restarted, `d` is new.
    assert status.rates_of(before, look(a=150, b=30, c=9, d=7), 2.0) == {"a": 25.0, "b": 15.0}
    assert status.rates_of({}, look(a=1), 2.0) == {}


@pytest.mark.parametrize(
    "seconds, text", [(1.26, "1.3 s"), (99.96, "100.0 s"), (125, "2:05"), (3725, "1:02:05")]
)
def test_ages(seconds, text):
    assert status_screen.age(seconds) == text


# ---- scale ---------------------------------------------------------------------------


class Pool:
    """A server that answers `/ready` with `phases`, by name, and `/weights` with a reason."""

    def __init__(self) -> None:
        self.phases: list[tuple[str | None, str]] = [("0", "ready")]
        self.asked: list[str] = []
        pool = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send(200, pool.answer(self.path))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send(202, pool.answer(self.path))

            def send(self, status: int, body: msgspec.Struct) -> None:
                content = msgspec.json.encode(body)
                self.send_response(status)
                self.send_header(VERSION_HEADER, RELEASE)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str) -> msgspec.Struct:
        self.asked.append(path)
        if path == "/weights":
            behind = [weights_of(name, "packed on a CPU") for name, _ in self.phases[1:]]
            return Weights(workers=[weights_of("0", None), weights_of(None), *behind])
        workers = [
            ReadyWorker(worker=name, phase=phase, phase_s=1.0, silent_s=0.1, weight_version=1)
            for name, phase in self.phases
        ]
        return Ready(ready=True, draining=False, num_ready=1, workers=workers)


def weights_of(name: str | None, why_behind: str | msgspec.UnsetType | None = msgspec.UNSET):
    return WorkerWeights(endpoint="e", worker=name, state="closed", why_behind=why_behind)


@pytest.fixture
def pool() -> Iterator[Pool]:
    one = Pool()
    yield one
    one.server.shutdown()
    one.server.server_close()


def test_scale_says_why_a_worker_lacks_weights_and_ends(pool, monkeypatch, capsys):
    monkeypatch.setattr(scale, "STUCK_S", 0.5)
    pool.phases.append(("1", "waiting_for_weights"))
    assert cli.main(["scale", "2", "--url", pool.url]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("worker 1: waiting_for_weights: packed on a CPU\n") == 1
    assert "worker 1 cannot get the pool's weights: packed on a CPU. The next complete" in shown.err
    assert "`titopool scale 1` takes it back" in shown.err


def test_scale_waits_as_long_for_a_worker_that_lacks_weights_again(monkeypatch):
    now = 0.0
    monkeypatch.setattr(scale, "time", SimpleNamespace(monotonic=lambda: now))
    waiting = scale.Waiting(None, "", None, 1)

    def check(at_s: float, phase: str) -> None:
        nonlocal now
        now = at_s
        waiting._check_stuck([WorkerStatus("1", phase, 1.0, 1, "packed on a CPU")])

    check(0.0, "waiting_for_weights")
    check(5.0, "fetching_weights")
    check(100.0, "waiting_for_weights")
    check(100.0 + scale.STUCK_S, "waiting_for_weights")
    with pytest.raises(TitopoolError, match="packed on a CPU"):
        check(101.0 + scale.STUCK_S, "waiting_for_weights")


def test_scale_ends_when_the_server_is_gone(pool, monkeypatch, capsys):
    monkeypatch.setattr(scale, "GONE_S", 0.5)

    def stop() -> None:
        wait_until(lambda: pool.asked.count("/ready") > 2, 10)
        pool.server.shutdown()
        pool.server.server_close()

    stopping = Thread(target=stop)
    stopping.start()
    # Connections that are open outlive the listening socket.
    monkeypatch.setattr("titopool.client.sessions.KEEPALIVE_S", 0.01)
    assert cli.main(["scale", "2", "--url", pool.url]) == 1
    stopping.join(10)
    assert (
        f"titopool: {pool.url}: no server answers (Connection refused)" in capsys.readouterr().err
    )


def test_scale_shows_phases_of_workers_that_have_a_name(pool, capsys):
    steps = [
        [("0", "ready"), ("1", "ready"), (None, "unreachable")],
        [("0", "ready"), ("1", "draining"), ("2", "loading")],
        [("0", "ready"), ("1", "unreachable"), ("2", "ready")],
        [("0", "ready"), ("2", "ready")],
    ]

    pool.phases = steps[0]

    def step() -> None:
        for phases in steps[1:]:
            num_before = pool.asked.count("/ready")
            wait_until(lambda n=num_before: pool.asked.count("/ready") > n + 2, 10)
            pool.phases = phases

    stepping = Thread(target=step)
    stepping.start()
    assert cli.main(["scale", "2", "--url", pool.url]) == 0
    stepping.join(20)
    shown = [line.split(" s  worker ")[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "0: ready", "1: ready", "1: draining", "2: loading", "2: ready", "1: left",
    ]  # fmt: skip
