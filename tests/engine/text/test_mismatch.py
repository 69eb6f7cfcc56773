"""`POST /mismatch` and its statistics: the sampler's log-probabilities beside a trainer's."""

import itertools
import math
import os
import re
import resource
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import openai
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from app.call import kept_logprobs
from app.call.kept_logprobs import KeptLogprobs
from app.http.responses import LOGPROBS_MODE_HEADER
from app.pool.request import ChunkOfJob
from harness.fork_server import Forked, engine_fork_server
from harness.servers import REPOSITORY, Server, wait_until
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models import reference
from titopool import cli
from titopool.commands import own_server
from titopool.mismatch.statistics import compare
from titopool.settings.config import ServerConfig
from titopool.settings.gpus import visible_gpus
from titopool.wire.messages import Chunk, Completed, Completion, Logprobs

PROMPTS = [[5, 6, 7, 8, 9], [9, 8, 7]]
NUM_TOKENS = 12
OPTIONS = {"max_tokens": NUM_TOKENS, "generation_kwargs": {"ignore_eos": True}}
# More than the two front ends, so that both answer.
REPEATS = 8
_numbers = itertools.count()
Rows = list[list[float]]


@pytest.fixture
def request_id() -> str:
    return f"mismatch-{next(_numbers)}"


def ask(server: Server, request_id: str, logprobs: Any) -> requests.Response:
    return server.post("/mismatch", {"request_id": request_id, "logprobs": logprobs})


def trainer_logprobs(folder: str, prompts: list[list[int]], completions: list[list[int]]) -> Rows:
    """What a trainer's forward pass computes in float32."""
    n = len(completions) // len(prompts)
    rows = []
    for index, ids in enumerate(completions):
        found = reference.logprobs(folder, prompts[index // n], ids)
        rows.append([float(row[one]) for row, one in zip(found, ids, strict=True)])
    return rows


def sampled(server: Server, request_id: str, **fields: Any) -> dict[str, Any]:
    body = {"prompts": PROMPTS, **OPTIONS, **fields}
    answer = server.post("/generate/", body, headers={"X-Request-Id": request_id})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# ---- the statistics ------------------------------------------------------------------


def test_statistics_of_two_completions():
    sampler = [np.log([0.5, 0.25]), np.log([0.05])]
    trainer = [np.log([0.25, 0.25]), np.log([0.1])]
    found = compare(sampler, trainer)
    log2 = math.log(2)
    assert (found.num_completions, found.num_tokens) == (2, 3)
    assert found.mean_difference == pytest.approx(2 / 3 * log2)
    assert found.max_difference == pytest.approx(log2)
    # The ratios are 1/2, 1 and 2.
    assert found.kl_k1 == pytest.approx(0)
    assert found.kl == pytest.approx((0.5 - 1 + log2 + 2 - 1 - log2) / 3)
    assert found.token_ess == pytest.approx(3.5**2 / (3 * 5.25))
    assert found.completion_ess == pytest.approx(2.5**2 / (2 * 4.25))
    assert [(one.low, one.high, one.num_tokens) for one in found.by_position] == [
        (0, 1, 2),
        (1, 2, 1),
    ]
    assert found.by_position[1].max_difference == 0
    assert [(one.high, one.num_tokens) for one in found.by_probability] == [(0.1, 1), (0.5, 2)]


@given(st.lists(st.lists(st.floats(-80, 0), min_size=1), min_size=1, max_size=5), st.randoms())
def test_statistics_are_finite_and_within_their_bounds(rows: Rows, random: Any):
    sampler = [np.array(one, np.float32) for one in rows]
    trainer = [np.array([random.uniform(-80, 0) for _ in one]) for one in rows]
    found = compare(sampler, trainer)
    num_tokens = sum(map(len, rows))
    assert 1 / num_tokens - 1e-9 <= found.token_ess <= 1 + 1e-9
    assert 1 / len(rows) - 1e-9 <= found.completion_ess <= 1 + 1e-9
    assert 0 <= found.mean_difference <= found.max_difference * (1 + 1e-9)
    assert found.kl >= 0
    for groups in (found.by_position, found.by_probability):
        assert sum(one.num_tokens for one in groups) == num_tokens
        assert max(one.max_difference for one in groups) == found.max_difference
    same = compare(sampler, sampler)
    assert (same.max_difference, same.kl, same.token_ess) == (0, 0, pytest.approx(1))


def test_sums_of_many_extreme_values_are_finite():
    low, high = [np.full(1000, -10_000.0)], [np.zeros(1000)]
    for found in (compare(low, high), compare(high, low)):
        for name in ("mean_difference", "kl", "mean_weight", "mean_squared_weight"):
            assert math.isfinite(getattr(found, name) * 1e12), name


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_values_that_are_not_finite_are_not_kept(value: float):
    packed = Logprobs(np.array([-1.0, value], np.float32).tobytes())
    ids = np.array([5, 6], np.int32).tobytes()
    completion = Completion(ids, "length", packed, [])
    assert kept_logprobs.arrays_of([Completed(1, 1, [completion], 0)]) == []
    streamed = kept_logprobs.StreamedLogprobs()
    streamed.add([(0, Chunk(1, 1, [(0, completion)]))])
    assert streamed.arrays() == []


def test_of_a_stream_s_chunks_only_the_kept_values_stay():
    """Streams kept all chunks until their end: gigabytes that no budget counted."""
    ids, values = np.array([5, 6], np.int32).tobytes(), np.array([-1.0, -2.0], np.float32)
    best = Logprobs(values.repeat(2).tobytes(), np.array([5, 1, 6, 1], np.int32).tobytes())
    best = msgspec.structs.replace(best, counts=np.array([2, 2], np.int32).tobytes())
    streamed = kept_logprobs.StreamedLogprobs()

    def add(index: int, ids: bytes, logprobs: Logprobs | None) -> None:
        streamed.add([ChunkOfJob(0, Chunk(1, 1, [(index, Completion(ids, "", logprobs, []))]))])

    tracemalloc.start()
    for _ in range(1000):
        add(1, ids, best)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 16_000
    # The last chunk of a completion has no tokens, and of one that was aborted it is the only one.
    add(1, b"", None)
    add(0, b"", None)
    first, second = streamed.arrays()
    assert not len(first)
    assert np.array_equal(second, np.tile(values, 1000))
    add(0, ids, None)
    add(1, ids, best)
    assert streamed.arrays() == []


# ---- the route -----------------------------------------------------------------------


def test_a_trainer_in_float32_agrees_at_each_front_end(server, tiny_model, request_id):
    answer = sampled(server, request_id, n=2, logprobs=3)
    rows = trainer_logprobs(tiny_model, PROMPTS, answer["completion_ids"])
    before = totals(server)
    for _ in range(REPEATS):
        found = ask(server, request_id, rows)
        assert found.status_code == 200, found.text
        body = found.json()
        assert (body["num_completions"], body["num_tokens"]) == (4, 4 * NUM_TOKENS)
        assert body["logprobs_mode"] == "processed_logprobs"
        assert body["max_difference"] < 1e-3
        assert body["completion_ess"] > 0.99
    wait_until(lambda: totals(server)["tokens"] - before["tokens"] == REPEATS * 48, 10)
    now = totals(server)
    assert 0 <= now["difference"] - before["difference"] < 1e-3 * REPEATS * 48
    assert now["weights"] - before["weights"] == pytest.approx(REPEATS * 48, rel=1e-3)


def totals(server: Server) -> dict[str, float]:
    """The sums of all workers."""
    text = server.get("/metrics").text
    found = re.findall(r"^titopool_worker_mismatch_(\w+)_total\{\S+ (\S+)$", text, re.M)
    sums: dict[str, float] = {}
    for name, value in found:
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def test_a_difference_is_measured_where_it_is(server, request_id):
    answer = sampled(server, request_id)
    rows = [[entry[0] for entry in one] for one in answer["logprobs"]]
    rows[1][5] -= 0.25
    body = ask(server, request_id, rows).json()
    assert body["max_difference"] == pytest.approx(0.25, abs=1e-4)
    assert body["mean_difference"] == pytest.approx(0.25 / (2 * NUM_TOKENS), abs=1e-5)
    (group,) = [one for one in body["by_position"] if one["max_difference"] > 0.1]
    assert (group["low"], group["high"]) == (4, 8)


def test_streams_and_openai_s_routes_are_kept(server, tiny_model, request_id):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    fields: dict[str, Any] = {
        "model": tiny_model, "prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "n": 2, "logprobs": 2,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }  # fmt: skip
    for is_stream in (False, True):
        name = f"{request_id}-{is_stream}"
        answer = client.completions.create(
            **fields, stream=is_stream, extra_headers={"X-Request-Id": name}
        )
        rows: dict[int, list[float]] = {0: [], 1: []}
        for chunk in answer if is_stream else [answer]:
            for choice in chunk.choices:
                rows[choice.index] += choice.logprobs.token_logprobs
        body = ask(server, name, [rows[0], rows[1]]).json()
        assert body["num_tokens"] == 2 * NUM_TOKENS
        assert body["max_difference"] < 1e-5


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda rows: rows[:1], "logprobs: expected 2 completions, got 1"),
        (lambda rows: [rows[0], rows[1][:-1]], "completion 1: expected 12 log-probabilities, got 11"),
        (lambda rows: [rows[0], [*rows[1][:-1], 0.5]], "completion 1, token 11: expected a finite"),
        (lambda rows: [rows[0], [-3.4e38, *rows[1][1:]]], "from -10000 to 0, got -3.4e+38"),
        (lambda rows: [[-1.7e308] * 12, rows[1]], "completion 0, token 0: expected a finite"),
    ],
    ids=["completions", "tokens", "above 0", "mask in float32", "mask in float64"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(server, request_id, change, expected):
    answer = sampled(server, request_id)
    rows = [[entry[0] for entry in one] for one in answer["logprobs"]]
    refused = ask(server, request_id, change(rows))
    assert refused.status_code == 400
    assert expected in refused.json()["error"]["message"]
    assert ask(server, request_id, rows).status_code == 200
    assert all(map(math.isfinite, totals(server).values()))


def test_an_unknown_request_is_a_404(server, request_id):
    # Of OpenAI's route, which has no log-probabilities by default.
    body = {"model": "", "prompt": PROMPTS[0], "max_tokens": 1}
    del body["model"]
    headers = {"X-Request-Id": request_id}
    assert server.post("/v1/completions", body, headers=headers).status_code == 200
    for name in (request_id, "never-sent"):
        refused = ask(server, name, [[-1.0]])
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "request_not_found"


def test_each_answer_names_the_mode(server, tiny_model):
    plain = {"prompts": PROMPTS[:1], "max_tokens": 2}
    openai_s = {"model": tiny_model, "prompt": PROMPTS[0], "max_tokens": 2}
    inference = {"token_ids": PROMPTS[0], "sampling_params": {"max_tokens": 2}}
    for path, body, status in [
        ("/generate/", plain, 200),
        ("/generate/", {**plain, "n": 0}, 400),
        ("/v1/completions", {**openai_s, "stream": True}, 200),
        ("/inference/v1/generate", inference, 200),
    ]:
        answer = server.post(path, body)
        assert answer.status_code == status, answer.text
        assert answer.headers[LOGPROBS_MODE_HEADER] == "processed_logprobs"
    assert LOGPROBS_MODE_HEADER not in server.get("/live").headers


# ---- the store -----------------------------------------------------------------------


def store_in(folder: Path, limit: int) -> KeptLogprobs:
    return KeptLogprobs(ServerConfig(run_dir=str(folder), kept_logprobs_bytes=limit))


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.data"))


def test_the_store_is_bounded_and_the_newest_stay(tmp_path: Path):
    writer, reader = store_in(tmp_path, 16_384), store_in(tmp_path, 16_384)
    for index in range(400):
        writer.keep(str(index), [np.full(50, -index, np.float32)])
        assert size_of(tmp_path) <= 16_384
    (found,) = reader.find("399") or []
    assert found.tolist() == [-399.0] * 50
    assert reader.find("0") is None
    assert sum(reader.find(str(index)) is not None for index in range(400)) > 16_384 / 2 / 250
    # Too large for a segment.
    writer.keep("large", [np.zeros(2000, np.float32)])
    assert reader.find("large") is None


def test_a_repeated_name_means_the_last_request(tmp_path: Path):
    first, second = store_in(tmp_path, 2**20), store_in(tmp_path, 2**20)
    for store, value in ((first, -1.0), (second, -2.0), (first, -3.0)):
        store.keep("same", [np.array([value], np.float32)])
        (found,) = second.find("same") or []
        assert found.tolist() == [value]


def test_old_entries_are_forgotten_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = store_in(tmp_path, 2**20)
    store.keep("old", [np.zeros(3, np.float32)])
    monkeypatch.setattr(kept_logprobs, "KEEP_S", 0.0)
    assert store.find("old") is None
    # As if of a front end that has ended.
    store_in(tmp_path, 2**20).keep("new", [np.zeros(1, np.float32)])
    assert size_of(tmp_path) < 10


def test_a_full_disk_spoils_no_later_record(tmp_path: Path):
    store = store_in(tmp_path, 2**20)
    arrays = [np.full(50, -1.5, np.float32)]
    store.keep("before", arrays)
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Of each file: a write ends after 100 of its bytes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_of(tmp_path) + 100, hard))
    try:
        store.keep("torn", arrays)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.keep("after", arrays)
    assert store.find("torn") is None
    (found,) = store.find("after") or []
    assert found.tolist() == [-1.5] * 50


def test_a_record_that_cannot_be_read_is_unknown(tmp_path: Path):
    store = store_in(tmp_path, 2**20)
    store.keep("one", [np.zeros(50, np.float32)])
    (data,) = tmp_path.rglob("*.data")
    os.truncate(data, 20)
    assert store.find("one") is None


def test_a_store_without_room_keeps_nothing(tmp_path: Path):
    store = store_in(tmp_path, 0)
    assert not store.is_on
    store.keep("one", [np.zeros(1, np.float32)])
    assert store.find("one") is None


# ---- the command ---------------------------------------------------------------------


Command = Callable[..., "Ended"]


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def run_command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process, which has imported transformers already."""

    def run(*words: str) -> Ended:
        code = cli.main(["mismatch", *words])
        return Ended(code, *capfd.readouterr())

    return run


def values_of(printed: str) -> dict[str, float]:
    found = re.findall(r"^(.+?)  +([\d.e+-]+)$", printed, re.M)
    return {name: float(value) for name, value in found}


SMALL = ("--num-prompts", "4", "--prompt-tokens", "8", "--max-tokens", "20")


def test_the_command_measures_a_running_server(
    server, tiny_model, other_model, tmp_path, run_command: Command
):
    picture = tmp_path / "gap.png"
    url = ("--url", server.url, "--temperature", "0.7", *SMALL)
    exact = run_command(tiny_model, *url, "--trainer-dtype", "float32", "--picture", str(picture))
    assert exact.code == 0, exact.stderr
    assert values_of(exact.stdout)["difference, greatest"] < 1e-3
    assert values_of(exact.stdout)["tokens"] == 80
    assert "16 to 31 " in exact.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    rough = run_command(tiny_model, *url, "--trainer-dtype", "bfloat16")
    assert 1e-3 < values_of(rough.stdout)["difference, greatest"] < 1
    finer = run_command(tiny_model, *url, "--trainer-head-dtype", "float32")
    assert 1e-3 < values_of(finer.stdout)["difference, greatest"] < 1
    assert finer.stdout != rough.stdout
    wrong = run_command(other_model, *url, "--trainer-dtype", "float32")
    assert values_of(wrong.stdout)["KL (k3)"] > 100 * values_of(rough.stdout)["KL (k3)"]


def test_the_command_starts_a_server_and_stops_it(
    tiny_model, tmp_path, run_command: Command, monkeypatch: pytest.MonkeyPatch
):
    started: list[Forked] = []

    def fork(command: list[str], *, env: dict[str, str], stdout: Any, **_: Any) -> Forked:
        assert command[1:4] == ["-m", "titopool.cli", "serve"]
        started.append(
            engine_fork_server.start(
                "titopool serve", command[4:], environ=env, folder=REPOSITORY,
                output=stdout.fileno(),
            )
        )  # fmt: skip
        return started[0]

    if not visible_gpus():
        # A process of its own would import vLLM for 15 s.
        monkeypatch.setattr(
            own_server, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": fork})
        )
    prompts = tmp_path / "prompts"
    prompts.write_text("Hello, world\n\nAnother one\n")
    found = run_command(
        tiny_model, "--prompts", str(prompts), "--n", "2", *SMALL, "--trainer-dtype", "float32",
        *ENGINE_OPTIONS,
    )  # fmt: skip
    assert found.code == 0, found.stderr
    assert all(one.returncode == 0 for one in started)
    assert values_of(found.stdout)["completions"] == 4
    assert values_of(found.stdout)["difference, greatest"] < 1e-3


@pytest.mark.parametrize(
    "words, code, expected",
    [
        (
            ["--url", "http://127.0.0.1:9", "--max-num-seqs", "8"],
            2,
            "no options of a server beside",
        ),
        (["--url", "http://127.0.0.1:9", *SMALL], 1, "127.0.0.1:9"),
        (["--prompts", "/nonexistent"], 1, "/nonexistent"),
        (["--temperature", "0"], 1, "expected a number above 0, got 0"),
        (["--max-seq-length", "8"], 1, "the server ended with 2"),
    ],
)
def test_the_command_says_what_is_wrong(tiny_model, words, code, expected, run_command: Command):
    found = run_command(tiny_model, *words)
    assert found.code == code
    assert expected in found.stderr
