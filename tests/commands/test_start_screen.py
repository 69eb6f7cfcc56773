"""Progress at the start: loading by worker, downloads from a stand-in of the hub, and its errors."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from harness.servers import REPOSITORY, environment, free_port, wait_until
from tests.kit.peers.hub_server import Hub, running_hub
from tests.kit.terminal import on_terminal
from workers.supervisor.hub import needed_files
from workers.supervisor.screen import progress_of
from workers.supervisor.supervisor import is_healthy

MODEL = "org/tiny"
WEIGHTS_BYTES = 24 * 2**20
# A worker that loads as vLLM does: its bar is a line for each shard, with the process in front.
LOADS = """
report("importing")
time.sleep(0.4)
report("loading")
for done in range(5):
    name = "(EngineCore pid=7) Loading safetensors checkpoint shards"
    write(f"{name}: {25 * done:3d}% Completed | {done}/4 [00:00<00:01,  3.1it/s]\\n")
    time.sleep(0.4)
report("warming")
sys.stderr.write("Capturing CUDA graphs (decode, FULL):  40%|####      | 12/30 [00:01<00:02]")
sys.stderr.flush()
time.sleep(0.6)
report("ready")
wait()
"""
READY = 'report("ready"); wait()'


def supervised(code: str, *, num_workers: int = 1, shell: str = "", **variables: str) -> dict:
    """Arguments of a supervisor whose workers run `code`; `shell` runs beside it."""
    command = f'{shell}\nexec {sys.executable} -m tests.kit.workers.supervised "$CODE"'
    settings = {"TITOPOOL_NUM_WORKERS": str(num_workers), "CODE": code, "TERM": "xterm"}
    return {
        "args": ["bash", "-c", command],
        "env": environment(**settings, **variables), "cwd": REPOSITORY,
    }  # fmt: skip


def on_screen(tmp_path: Path, code: str, **options):
    arguments = supervised(code, TITOPOOL_RUN_DIR=str(tmp_path), **options)
    return on_terminal(arguments.pop("args"), **arguments)


# ---- loading -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.2s/it]",
         ("Loading safetensors checkpoint shards", 1, 2)),
        ("Capturing CUDA graphs (decode, FULL):  34%|###4      | 12/35 [00:01<00:02, 9.2it/s]",
         ("Capturing CUDA graphs (decode, FULL)", 12, 35)),
        ("INFO 11-24 05:00:00 [core.py:1] KV cache usage: 50%, 3 | 4", None),
        ("", None),
    ],
)  # fmt: skip
def test_progress_is_read_from_bars(text, expected):
    assert progress_of(text) == expected


def test_a_terminal_shows_bars_and_keeps_the_lines_of_others(tmp_path):
    # Another process of the server writes to the same terminal.
    line = "2026-11-24 05:00:00,000 INFO app.pool.state: worker 0 at ipc:///tmp/worker-0: phase"
    other = f"(for i in $(seq 20); do sleep 0.15; echo '{line}' $i >&2; done) &"
    with on_screen(tmp_path, LOADS, num_workers=2, shell=other) as terminal:
        for part in ("worker 1: loading:  50%|", "2/4", "worker 0: warming:  40%|", "12/30"):
            terminal.wait_for(part, 20)
        terminal.wait_for("titopool serves", 20)
        terminal.wait_for(f"{line} 20", 20)
        shown = terminal.text
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait(20) == 0
    # The bars have gone, and nothing else has.
    assert "%|" not in shown
    assert [int(one) for one in re.findall(rf"^{line} (\d+)$", shown, re.M)] == list(range(1, 21))
    for phase in ("importing", "loading", "warming", "ready"):
        assert len(re.findall(rf"^worker [01]: {phase}\b", shown, re.M)) == 2


def test_without_a_terminal_progress_is_lines(tmp_path, monkeypatch):
    code = f"""
import workers.supervisor.screen as screen, workers.supervisor.supervisor as supervisor, sys
screen.LINE_PERIOD_S = 0.5
sys.exit(supervisor.main(["--parent-pid", "{os.getpid()}"],
    (sys.executable, "-m", "tests.kit.workers.supervised", "--worker", {LOADS!r})))
"""
    log = tmp_path / "log"
    run_dir = {"TITOPOOL_RUN_DIR": str(tmp_path), "TITOPOOL_NUM_WORKERS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment(**run_dir), cwd=REPOSITORY,
            stdout=output, stderr=output,
        )  # fmt: skip
    try:
        wait_until(lambda: "titopool serves" in log.read_text(), 20, log.read_text)
    finally:
        process.terminate()
        process.wait(20)
    text = log.read_text()
    assert "\x1b" not in text
    assert "\r" not in text
    shown = re.findall(r"^worker 0: loading, (\d+) %, (\d) of 4$", text, re.M)
    assert 1 <= len(shown) <= 5
    assert all(int(percent) == 25 * int(done) for percent, done in shown)


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_own_server_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert is_healthy(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


# ---- downloads -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub-model")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"version": 1}')
    (folder / "README.md").write_text("what it is")
    (folder / "pytorch_model.bin").write_bytes(b"other")
    (folder / "model.safetensors").write_bytes(os.urandom(WEIGHTS_BYTES))
    return folder


@pytest.fixture
def hub(model_folder: Path) -> Iterator[Hub]:
    with running_hub(MODEL, model_folder) as one:
        yield one


def test_a_model_is_downloaded_once_before_the_workers_start(hub: Hub, tmp_path):
    hub.bytes_per_s = 16e6
    variables = hub.environment(tmp_path / "cache") | {"TITOPOOL_MODEL": MODEL}
    with on_screen(tmp_path, READY, num_workers=2, **variables) as terminal:
        terminal.wait_for("download: model:", 20)
        terminal.wait_for("/25.2M [", 20)
        assert "worker 0: ready" not in terminal.text
        terminal.wait_for(f"titopool serves {MODEL}", 40)
        assert "download: model" not in terminal.text
        assert f"titopool: has downloaded {MODEL}" in terminal.text
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait(20) == 0
    assert hub.downloads == {"config.json": 1, "tokenizer.json": 1, "model.safetensors": 1}
    assert any(re.search(r"download: model:  [1-9]\d%\|", line) for line in terminal.seen)


def test_sigterm_ends_a_download(hub: Hub, tmp_path):
    hub.bytes_per_s = 1e5
    variables = hub.environment(tmp_path / "cache") | {"TITOPOOL_MODEL": MODEL}
    with on_screen(tmp_path, READY, **variables) as terminal:
        terminal.wait_for("download: model:", 20)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait(10) == 0
        assert "could not start" not in terminal.text


def download(
    hub: Hub, cache: Path, model: str = MODEL, **variables: str
) -> subprocess.CompletedProcess[str]:
    settings = hub.environment(cache) | {"TITOPOOL_MODEL": model} | variables
    return subprocess.run(
        [sys.executable, "-m", "workers.supervisor.downloads"],
        env=environment(**settings), cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_broken_connection_is_resumed(hub: Hub, tmp_path, model_folder):
    hub.num_breaks = 1
    ended = download(hub, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "")
    # The hub's client writes, and asks for the rest, in pieces of 10 MB.
    assert hub.resumed_at
    assert hub.resumed_at[0] >= 10 * 2**20
    (found,) = tmp_path.glob("hub/models--org--tiny/snapshots/*/model.safetensors")
    assert found.read_bytes() == (model_folder / "model.safetensors").read_bytes()
    assert not (found.parent / "pytorch_model.bin").exists()
    # What is cached is not downloaded again, and serves without the hub.
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        again = download(hub, tmp_path, **variables)
        assert again.returncode == 0
    assert "the cached copy is used" in again.stderr
    assert hub.downloads["config.json"] == 1


@pytest.mark.parametrize(
    "change, expected",
    [
        pytest.param({"model": "org/tinny"}, ["org/tinny", "did you mean org/tiny?"], id="unknown"),
        pytest.param({"refusal": (403, "GatedRepo")}, ["on request", "HF_TOKEN"], id="gated"),
        pytest.param({"refusal": (401, "")}, ["refuses the token (401)"], id="token"),
        pytest.param(
            {"HF_HUB_OFFLINE": "1"}, ["not in the cache", "HF_HUB_OFFLINE forbids"], id="offline"
        ),
        pytest.param(
            {"HF_ENDPOINT": "http://127.0.0.1:9"}, ["cannot be reached", "HF_ENDPOINT"], id="network"
        ),
        pytest.param({"announced": 10**15}, ["GB free on the disk of", "HF_HOME"], id="disk-full"),
    ],
)  # fmt: skip
def test_an_error_of_the_hub_is_one_sentence(hub: Hub, tmp_path, change, expected):
    hub.refusal = change.pop("refusal", None)
    if "announced" in change:
        hub.announced["model.safetensors"] = change.pop("announced")
    ended = download(hub, tmp_path, **change)
    assert ended.returncode == 1
    assert len(ended.stdout.splitlines()) == 1
    for part in expected:
        assert part in ended.stdout


def test_a_start_without_the_model_names_the_cause(hub: Hub, tmp_path):
    variables = hub.environment(tmp_path / "cache") | {"TITOPOOL_MODEL": "org/tinny"}
    arguments = supervised(READY, TITOPOOL_RUN_DIR=str(tmp_path), **variables)
    # The supervisor ends its parent, which stands for gunicorn's master.
    parent = f"trap '' TERM; {sys.executable} -m tests.kit.workers.supervised \"$CODE\"; exit $?"
    arguments["args"] = ["bash", "-c", parent]
    ended = subprocess.run(**arguments, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "\ntitopool: org/tinny: " in ended.stderr
    assert "worker 0" not in ended.stderr


def test_the_files_are_those_that_vllm_reads():
    sizes = dict.fromkeys(
        ("config.json", "model-1.safetensors", "model-2.safetensors", "extra.safetensors",
         "model.safetensors.index.json", "pytorch_model.bin", "onnx/model.onnx", "chat.jinja",
         "README.md"), 1,
    )  # fmt: skip
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    found = needed_files(sizes, "auto", lambda: json.dumps(index))
    assert set(found) == {
        "config.json", "chat.jinja", "model-1.safetensors", "model-2.safetensors",
        "model.safetensors.index.json",
    }  # fmt: skip
    assert not [one for one in needed_files(sizes, "dummy", str) if one.endswith(".safetensors")]
    sizes |= {"consolidated.safetensors": 1}
    mistral = needed_files(sizes, "auto", lambda: json.dumps(index))
    assert "consolidated.safetensors" in mistral
    assert "model-1.safetensors" not in mistral
    binary = needed_files({"config.json": 1, "a.bin": 2}, "auto", str)
    assert binary == {"config.json": 1, "a.bin": 2}
