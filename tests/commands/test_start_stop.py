"""Starting and stopping with real vLLM: the screen's messages, and no process survives."""

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from harness.servers import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Server,
    alive,
    environment,
    serve_process,
    wait_until,
    wait_until_ended,
)
from tests.conftest import ENGINE_OPTIONS


def descendants(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def exit_code_of(server: Server, within_s: float) -> int:
    """The exit code of a server that ends by itself; all its processes must be gone."""
    children: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + within_s
    while server.process.poll() is None:
        assert time.monotonic() < deadline, server.log[-3000:]
        # It may end meanwhile.
        with suppress(psutil.NoSuchProcess):
            children |= {child.pid: child for child in descendants(server)}
        time.sleep(0.05)
    assert alive(list(children.values())) == []
    return server.process.returncode


def fail_and_generate(server: Server, prompt: str, key: str) -> list[str]:
    """Sends a prompt in requests that succeed and fail; returns texts of the completions."""
    headers = {"Authorization": f"Bearer {key}"}
    model = server.get("/v1/models", headers=headers).json()["data"][0]["id"]
    messages = [{"role": "user", "content": prompt}]
    # An end of text may be the first token that is sampled; every log has the empty text.
    chat = {"model": model, "messages": messages, "max_tokens": 16, "min_tokens": 16}
    texts = []
    for path, body, status in [
        ("/v1/chat/completions", chat, 200),
        ("/v1/chat/completions", chat | {"stream": True}, 200),
        ("/v1/chat/completions", chat | {"max_tokens": -1}, 400),
        ("/generate/", {"prompts": [prompt], "max_tokens": 16}, 200),
        ("/generate/", {"prompts": [prompt * 1000]}, 400),
        ("/generate/", {"prompts": [prompt], prompt: 1}, 400),
        ("/generate/", {"prompts": [prompt], "structured_outputs_regex": f"({prompt}"}, 400),
    ]:
        answer = server.post(path, body, headers=headers)
        assert answer.status_code == status, answer.text
        if status == 200 and path.startswith("/v1") and "stream" not in body:
            texts.append(answer.json()["choices"][0]["message"]["content"])
    assert server.get("/live", headers={"Authorization": f"{key}"}).status_code == 200
    assert (
        server.post("/generate/", {}, headers={"Authorization": f"Basic {key}"}).status_code == 401
    )
    return texts


@pytest.mark.parametrize(
    "arguments, variables, parts",
    [
        pytest.param(
            ["--max-model-len", "x"], {}, ["vLLM's options", "--max-model-len"], id="vllm-option"
        ),
        pytest.param(
            ["--chat-template", "no.jinja"], {}, ["chat_template: expected a file", "no.jinja"],
            id="chat-template",
        ),
        pytest.param([], {"VLLM_CPU_KVCACHE_SPACE": "9000"}, ["Available memory"], id="out-of-memory"),
    ],
)  # fmt: skip
def test_a_failed_start_prints_the_cause(start_forked, tiny_model, arguments, variables, parts):
    server = start_forked(tiny_model, *arguments, **variables)
    assert exit_code_of(server, START_TIMEOUT_S) == 1
    conclusion = server.log.rpartition("\ntitopool: ")[2]
    for part in parts:
        assert part in conclusion


def test_a_start_that_times_out_prints_the_phase(start_server):
    server = start_server(TITOPOOL_WORKER_START_TIMEOUT_S="1")
    assert exit_code_of(server, 60) == 1
    assert "not ready after 1 s" in server.log
    assert "raise worker_start_timeout_s" in server.log


def test_a_port_in_use_ends_the_start(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process, url = serve_process(log=tmp_path / "log", port=port)
        server = Server(process, url, tmp_path / "log")
        assert exit_code_of(server, 30) == 1
    lines = [line for line in server.log.splitlines() if "Starting gunicorn" not in line]
    assert len(lines) == 1, server.log
    assert f"titopool: expected a free port, got {port}, which process {os.getpid()}" in lines[0]
    assert "--port" in lines[0]


def test_an_unusable_run_dir_ends_the_start(start_server):
    server = start_server(TITOPOOL_RUN_DIR="/proc/no-such-folder")
    assert exit_code_of(server, 30) != 0
    assert "/proc/no-such-folder" in server.log


@pytest.mark.parametrize("later_s", [0.0, 0.1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_signal_ends_a_front_end_that_has_just_begun(number, later_s: float, tmp_path: Path):
    """It inherits the handlers of gunicorn's master, which would lose a signal there."""
    # Workers elsewhere, so only the front end has to end.
    process, url = serve_process(
        "--endpoints",
        f"ipc://{tmp_path}/none",
        log=tmp_path / "log",
        TITOPOOL_DRAIN_TIMEOUT_S="120",
    )
    server = Server(process, url, tmp_path / "log")
    while "Booting worker" not in server.log:
        assert process.poll() is None, server.log
        time.sleep(0.01)
    time.sleep(later_s)
    process.send_signal(number)
    # A second or two. Unheard, the signal ends it after the drain.
    assert exit_code_of(server, 60) == 0


def test_the_server_ends_with_its_supervisor(start_forked, tiny_model):
    server = start_forked(tiny_model, "--host", "::1")
    wait_until(lambda: "worker 0: importing" in server.log, START_TIMEOUT_S, lambda: server.log)
    children = descendants(server)
    (supervisor,) = [one for one in children if "workers.supervisor" in one.cmdline()]
    supervisor.kill()
    assert server.process.wait(STOP_TIMEOUT_S) == 1
    wait_until_ended(children)


def test_the_screen_shows_phases_and_greeting_until_ctrl_c(start_forked, tiny_model, tmp_path):
    key = {"TITOPOOL_API_KEY": "a-marked-key"}
    server = start_forked(tiny_model, *ENGINE_OPTIONS, "--run-dir", str(tmp_path / "run"), **key)
    wait_until(lambda: "Try it" in server.log, START_TIMEOUT_S, lambda: server.log[-3000:])
    log = server.log
    for text in ("importing", "loading (importing took", "warming (loading took", "ready (warming"):
        assert f"worker 0: {text}" in log
    # The command on the screen works when pasted into a shell.
    command = log.partition("Try it:")[2].strip()
    pasted = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, env=environment(**key)
    )
    assert '"completion_ids":[[' in pasted.stdout
    completions = fail_and_generate(server, "a-marked-prompt", "a-marked-key")
    children = descendants(server)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(STOP_TIMEOUT_S) == 0
    assert alive(children) == []
    # vLLM's own output goes to a file, not to the screen. On a busy machine the engine is late.
    shown = [line for line in server.log.splitlines() if "worker 0 | " in line]
    assert [line for line in shown if "the engine did not stop by itself" not in line] == []
    assert "Traceback" not in server.log
    logs = "".join(path.read_text() for path in (tmp_path / "run").glob("worker-0.log*"))
    assert "INFO" in logs
    # No log has a prompt, a completion or a key.
    for text in ("a-marked-prompt", "a-marked-key", *completions):
        assert text not in server.log + logs


def test_gunicorn_leaves_no_process_when_killed(start_forked, tiny_model):
    server = start_forked(tiny_model, *ENGINE_OPTIONS)
    server.wait_until_ready()
    children = descendants(server)
    assert any("EngineCore" in " ".join(one.cmdline()) for one in children)
    server.process.kill()
    wait_until_ended(children)
