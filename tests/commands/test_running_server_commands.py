"""`titopool status`, `scale` and `bench` against running servers."""

import json
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import msgspec
import pytest

from harness.servers import REPOSITORY, TITOPOOL, environment, wait_until
from tests.kit.terminal import on_terminal
from titopool import cli
from titopool.answers.operators import Ready, ReadyWorker
from titopool.answers.weights import Weights, WorkerWeights
from titopool.client.results import WorkerStatus
from titopool.commands import bench, load, scale, status
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
        "adapters": {}, "waiting_prompts": 0, "needs_key": False,
        "workers": [worker | {"last_update": sentence, "reason": sentence}],
    }  # fmt: skip
    status.show(found)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert sum(sentence.strip() in line for line in lines) == 2


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


# ---- bench ---------------------------------------------------------------------------


SMALL = ("--num-prompts", "24", "--concurrency", "4", "--input-len", "6", "--output-len", "6")


def test_bench_counts_what_the_server_generates(start_stub, stub_server):
    start_stub(0, "--delay-s", "0.05")
    server = stub_server(1, TITOPOOL_NUM_FRONT_ENDS="2")
    whole = run("bench", "--url", server.url, *SMALL, "--json")
    assert whole.returncode == 0, whole.stderr
    figures = json.loads(whole.stdout)
    assert (figures["completed"], figures["completion_tokens"]) == (24, 24 * 6)
    assert figures["errors"] == {}
    # 24 requests of at least 0.05 s, four at once.
    assert figures["wall_s"] >= 6 * 0.05
    assert figures["latency_s"]["p50"] >= 0.05
    assert figures["tokens_per_s"] == pytest.approx(24 * 6 / figures["wall_s"])
    assert figures["first_token_s"] is None
    streamed = run("bench", "--url", server.url, *SMALL, "--stream", "--no-logprobs", "--json")
    figures = json.loads(streamed.stdout)
    assert figures["completion_tokens"] == 24 * 6
    # Five more tokens follow the first one, 0.05 s apart.
    assert 0 < figures["first_token_s"]["p50"] < figures["latency_s"]["p50"] - 4 * 0.05
    # One request more each, which is not measured.
    wait_until(lambda: server.metrics("completed_jobs_total") == {"0": 2 * 25.0}, 20)
    shown = run("bench", "--url", server.url, *SMALL)
    assert "24 of 24 requests completed" in shown.stdout
    assert "first token: not measured" in shown.stdout


def test_bench_refuses_what_does_not_fit(start_stub, stub_server):
    start_stub(0)
    server = stub_server(1, TITOPOOL_API_KEY=KEY)
    without = run("bench", "--url", server.url)
    assert (without.returncode, without.stderr.count("\n")) == (1, 1)
    assert "set TITOPOOL_API_KEY" in without.stderr
    long = run("bench", "--url", server.url, "--input-len", "4090", TITOPOOL_API_KEY=KEY)
    assert long.returncode == 1
    assert "expected at most 4096 tokens in all" in long.stderr
    gone = run("bench", "--url", "http://127.0.0.1:9")
    assert gone.returncode == 1
    assert "no server answers" in gone.stderr


@pytest.mark.parametrize("stream", [(), ("--stream", "--no-logprobs")], ids=["whole", "stream"])
def test_bench_counts_errors_by_code(start_stub, stub_server, stream):
    start_stub(0, "--delay-s", "0.1")
    server = stub_server(
        1, TITOPOOL_MAX_QUEUED_PROMPTS="1", TITOPOOL_NUM_FRONT_ENDS="1", TITOPOOL_LOG_LEVEL="error"
    )
    ended = run("bench", "--url", server.url, *SMALL, *stream, "--json")
    figures = json.loads(ended.stdout)
    assert ended.returncode == 1
    # Of four requests at once, one has a place.
    assert set(figures["errors"]) == {"queue_full"}
    assert figures["completed"] >= 1
    assert figures["completed"] + figures["errors"]["queue_full"] == 24
    assert figures["first_error"]


def test_bench_shows_a_bar_on_a_terminal(start_stub, stub_server):
    start_stub(0, "--delay-s", "0.1")
    server = stub_server(1)
    with on_terminal(
        [TITOPOOL, "bench", "--url", server.url, *SMALL], env=environment(TERM="xterm"),
        cwd=REPOSITORY,
    ) as terminal:  # fmt: skip
        terminal.wait_for("/24 [", 30)
        assert terminal.wait(60) == 0
    assert "request/s" not in terminal.text
    assert "24 of 24 requests completed" in terminal.text


def test_figures_of_given_outcomes():
    shape = load.Shape(num_prompts=4, concurrency=2, input_len=1, output_len=11, streamed=True)
    outcomes = [
        load.Outcome(11, 1.0, 0.5), load.Outcome(11, 2.0, 1.0), load.Outcome(11, 3.0, 1.0),
        load.Outcome(3, 9.0, 8.0, "queue_full", "full"),
    ]  # fmt: skip
    found = bench.report(load.Run(outcomes, wall_s=4.0, cpu_s=1.0), shape)
    assert found["tokens_per_s"] == 33 / 4
    assert found["requests_per_s"] == 3 / 4
    assert found["latency_s"] == pytest.approx({"p50": 2.0, "p90": 2.8, "p99": 2.98})
    assert found["per_token_s"]["p50"] == pytest.approx(0.1)
    assert found["errors"] == {"queue_full": 1}
    assert found["first_error"] == "full"
