"""What front ends count: the shared file, histograms, streams, and the engine's text."""

import itertools
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.call.service import Service
from app.counts import shared_file
from app.counts.families import (
    FAMILIES,
    INTER_TOKEN_SECONDS,
    QUEUE_SECONDS,
    REQUESTS,
    TOKEN_BOUNDS,
    TOKENS,
)
from app.counts.front_end import FrontEndCounts, observe
from app.counts.http_requests import Pace
from app.counts.shared_file import FILE_BYTES, SharedFile, add_ended, forget_all, parse
from app.operators.metrics.exposition import families
from app.operators.metrics.front_ends import front_end_families
from app.operators.metrics.pool_totals import pool_families
from app.pool.link import WorkerView
from harness.servers import REPOSITORY
from titopool.settings.config import ServerConfig
from titopool.wire.messages import Heartbeat, UpdateTotals, WorkerCounters
from titopool.wire.pool_state import PoolWeights
from titopool.wire.run_dir import COUNTS
from workers.engine.metrics.exposition import MAX_BYTES, MAX_SAMPLES, bounded, families_of
from workers.engine.metrics.stat_logger import observe_all
from workers.environment import prepare_environment
from workers.process import reason_of


def values_of(counts: FrontEndCounts) -> dict[tuple[str, ...], list[float]]:
    return {(one.family.name, *one.labels): one.values for one in counts.series()}


def test_processes_see_each_others_counts_and_those_of_ended_ones(tmp_path: Path):
    mine, other = FrontEndCounts(str(tmp_path)), FrontEndCounts(str(tmp_path))
    for counts, number in ((mine, 2), (other, 40)):
        counts.values(TOKENS, "/generate/", "prompt")[0] += number
    expected = {("titopool_tokens", "/generate/", "prompt"): [42.0]}
    assert values_of(mine) == values_of(other) == expected
    # Both have this process's id, so the master adds up both files.
    add_ended(str(tmp_path), os.getpid())
    assert [one.name for one in (tmp_path / COUNTS).iterdir()] == ["ended"]
    later = FrontEndCounts(str(tmp_path))
    later.values(TOKENS, "/generate/", "prompt")[0] += 1
    assert values_of(later)["titopool_tokens", "/generate/", "prompt"] == [43.0]
    forget_all(str(tmp_path))
    assert values_of(FrontEndCounts(str(tmp_path))) == {}


def test_a_file_that_was_added_up_is_not_counted_again(tmp_path: Path):
    """Who lists the folder just before the master adds a file up still sees the file."""
    counts = FrontEndCounts(str(tmp_path))
    counts.values(TOKENS, "/chat/", "prompt")[0] = 5
    (file,) = (tmp_path / COUNTS).iterdir()
    content = file.read_bytes()
    add_ended(str(tmp_path), os.getpid())
    file.write_bytes(content)
    assert values_of(FrontEndCounts(str(tmp_path)))["titopool_tokens", "/chat/", "prompt"] == [5.0]


def test_counts_of_a_killed_process_are_there(tmp_path: Path):
    script = (
        "import os, sys; from app.counts.front_end import FrontEndCounts;"
        "from app.counts.families import TOKENS;"
        "FrontEndCounts(sys.argv[1]).values(TOKENS, 'r', 'prompt')[0] += 7; os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(command, cwd=REPOSITORY).returncode == -9
    assert values_of(FrontEndCounts(str(tmp_path)))["titopool_tokens", "r", "prompt"] == [7.0]


def count_all(counts: FrontEndCounts) -> None:
    """Twice in each family."""
    for family in FAMILIES:
        for label in ("a", "b"):
            values = counts.values(family, *[label] * len(family.labels))
            if family.bounds:
                observe(values, family.bounds, 0.25)
            else:
                values[0] += 1


def restart(run_dir: str) -> None:
    """A front end counts and is killed; the master keeps its counts."""
    pid = os.fork()
    if pid == 0:
        count_all(FrontEndCounts(run_dir))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    add_ended(run_dir, pid)


# Reads until a line comes, and prints how often, and how often a value fell.
WATCH = """
import select, sys
from app.counts.front_end import FrontEndCounts

counts, last, num_reads, num_falls = FrontEndCounts(sys.argv[1]), {}, 0, 0
print("reads", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    found = {(one.family.name, *one.labels): one.values for one in counts.series()}
    num_falls += any(now < old for key in last for now, old in zip(found.get(key, [0]), last[key]))
    last, num_reads = found, num_reads + 1
print(num_reads, num_falls)
"""


def test_after_200_restarts_metrics_are_as_long_and_as_fast_and_no_counter_falls(tmp_path: Path):
    run_dir = str(tmp_path)
    counts = FrontEndCounts(run_dir)
    collector = SimpleNamespace(collect=lambda: front_end_families(counts.series()))

    def read() -> tuple[str, float]:
        """The text, and CPU seconds: the least of some."""
        times = []
        for _ in range(10):
            begin_s = time.process_time()
            text = generate_latest(collector)  # type: ignore[arg-type]
            times.append(time.process_time() - begin_s)
        return text.decode(), min(times)

    def files() -> list[str]:
        return sorted(path.name for path in (tmp_path / COUNTS).iterdir())

    restart(run_dir)
    (before, before_s), files_before = read(), files()
    command = [sys.executable, "-c", WATCH, run_dir]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline() == "reads\n"
        for _ in range(200):
            restart(run_dir)
        told, _ = watch.communicate("\n", timeout=60)
    num_reads, num_falls = map(int, told.split())
    assert num_reads > 20
    assert num_falls == 0
    add_ended(run_dir, watch.pid)
    after, after_s = read()
    assert files() == files_before
    assert len(after.splitlines()) == len(before.splitlines())
    assert after_s < 2 * before_s + 0.001
    for (name, *_), values in values_of(counts).items():
        number = 402 if name == QUEUE_SECONDS.name else 201
        assert sum(values[:-1] or values) == number


def test_a_full_file_drops_new_series_and_keeps_the_old_ones():
    file = SharedFile("")
    first = file.reserve(b"first", 1)
    for index in range(FILE_BYTES // 1024):
        file.reserve(b"%d" % index, 128)
    last = file.reserve(b"last", 128)
    first[0], last[0] = 1, 1
    assert file.read()[b"first"] == [1.0]
    assert b"last" not in file.read()


@pytest.mark.parametrize("size", [0, 3, 8, 15, 20, 31])
def test_a_file_that_is_cut_off_has_fewer_entries(size: int):
    file = SharedFile("")
    file.reserve(b"key", 1)
    assert parse(bytes(file._map[:size])) == {}
    assert parse(bytes(file._map[:32])) == {b"key": [0.0]}


def test_without_space_on_the_disk_a_process_counts_alone(tmp_path: Path, monkeypatch, caplog):
    def fail(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_file.os, "posix_fallocate", fail)
    counts = FrontEndCounts(str(tmp_path))
    counts.values(TOKENS, "r", "prompt")[0] += 1
    assert values_of(counts)["titopool_tokens", "r", "prompt"] == [1.0]
    assert list((tmp_path / COUNTS).iterdir()) == []
    assert "lacks this front end's counts" in caplog.text


def test_a_stream_s_gaps_are_counted_as_one_by_one(monkeypatch):
    draw, now, times = random.Random(0), 100.0, []
    for _ in range(500):
        times.append(now)
        now += draw.choice([0.0004, 0.0101, 0.0102, 0.0149, 0.0151, 7.0])
    ticks = iter(times)
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    counts = FrontEndCounts()
    pace = Pace(counts.values(INTER_TOKEN_SECONDS, "r"))
    for _ in times:
        pace.note()
    pace.end()
    expected = memoryview(bytearray(8 * INTER_TOKEN_SECONDS.num_values)).cast("d")
    for before, after in itertools.pairwise(times):
        observe(expected, TOKEN_BOUNDS, after - before)
    found = counts.values(INTER_TOKEN_SECONDS, "r")
    assert list(found[:-1]) == list(expected[:-1])
    assert math.isclose(found[-1], expected[-1])


def test_a_step_s_gaps_are_counted_as_one_by_one():
    registry = prometheus_client.CollectorRegistry()
    bounds = (0.01, 0.1, 1)
    one, all_ = (
        prometheus_client.Histogram(name, "h", ["l"], buckets=bounds, registry=registry).labels("x")
        for name in ("one", "all")
    )
    values = [*np.random.default_rng(0).exponential(0.2, 300).tolist(), 0.01, 0.1, 1.0, 5.0]
    for value in values:
        one.observe(value)
    observe_all(all_, values)
    for suffix in ("_count", "_sum"):
        assert math.isclose(
            registry.get_sample_value("one" + suffix, {"l": "x"}) or 0,
            registry.get_sample_value("all" + suffix, {"l": "x"}) or 1,
        )
    for le in ("0.01", "0.1", "1.0", "+Inf"):
        assert registry.get_sample_value("one_bucket", {"l": "x", "le": le}) == (
            registry.get_sample_value("all_bucket", {"l": "x", "le": le})
        )


def test_an_engine_s_metrics_get_the_worker_s_label_and_are_bounded():
    registry = prometheus_client.CollectorRegistry()
    made = {"registry": registry, "documentation": "text"}
    prometheus_client.Counter("vllm:generation_tokens", labelnames=["model_name"], **made).labels(
        'a "model"\n'
    ).inc(5)
    prometheus_client.Gauge("python_info", **made).set(1)
    many = prometheus_client.Gauge("vllm:lora_requests_info", labelnames=["names"], **made)
    for index in range(MAX_SAMPLES + 1):
        many.labels(str(index)).set(1)
    message = bounded(families_of("worker-3", registry))
    assert message.num_left_out == 1
    (family,) = message.families
    (parsed,) = text_string_to_metric_families((family.head + family.samples).decode())
    assert parsed.name == "vllm:generation_tokens"
    (sample,) = parsed.samples
    assert (sample.name, sample.value) == ("vllm:generation_tokens_total", 5.0)
    assert sample.labels == {"model_name": 'a "model"\n', "worker": "worker-3"}
    large = family.__class__("vllm:x", b"", b"x" * (MAX_BYTES - 10))
    assert bounded([large, family]).families == [large]


def test_a_worker_ignores_the_folder_of_prometheus_multiprocess_mode():
    """It must be gone before prometheus_client is imported, which chooses its values then."""
    environ = {"PROMETHEUS_MULTIPROC_DIR": "/tmp/x"}
    prepare_environment(environ, on_cpu=True)
    assert "PROMETHEUS_MULTIPROC_DIR" not in environ
    script = "import sys, workers.__main__; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY).returncode == 0


def test_without_the_setting_nothing_is_counted():
    service = Service(ServerConfig(metrics=False))
    assert service.counts is None
    names = {family.name for family in families(service)}
    assert "titopool_workers" in names
    assert REQUESTS.name not in names


@pytest.mark.parametrize(
    ("code", "has_loaded", "reason"),
    [
        (1, False, "not_started"), (0, True, "asked"), (75, True, "weights_unknown"),
        (70, True, "hung"), (1, True, "failed"), (-9, True, "killed"), (-11, True, "signal"),
    ],
)  # fmt: skip
def test_restarts_have_a_class(code: int, has_loaded: bool, reason: str):
    assert reason_of(code, has_loaded=has_loaded) == reason


def test_updates_by_outcome_their_time_without_its_pause_and_the_longest_stand_are_shown():
    beat = Heartbeat(
        "w", "i", "ready", 1.0, PoolWeights(), None, 0.0, 1, 0, 0, 0, WorkerCounters(),
        updates={"beside": UpdateTotals(2, 1, 1.5, 0.25)}, longest_stand_s=3.0,
    )  # fmt: skip
    views = [WorkerView("e", beat, "ready", "", 0.0)]
    samples = [one for family in pool_families(views) for one in family.samples]
    shown = {one.name.removeprefix("titopool_worker_"): one.value for one in samples}
    assert shown["weight_update_seconds"] == 1.5
    assert shown["weight_paused_seconds"] == 0.25
    assert shown["loop_longest_stand_seconds"] == 3.0
    ended = {one.labels["outcome"]: one.value for one in samples if "outcome" in one.labels}
    assert ended == {"applied": 2.0, "failed": 1.0}
