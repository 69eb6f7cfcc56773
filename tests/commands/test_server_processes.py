"""The server's own processes from start to end, without an engine: no test here waits for vLLM."""

import concurrent.futures
import signal
import subprocess
import sys

import pytest
import requests

from harness.servers import REPOSITORY, START_TIMEOUT_S, environment, wait_until
from harness.stub_worker import Fault


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_front_ends_stop_without_a_traceback(start_server, tmp_path, number):
    server = start_server(
        "--num-front-ends", "2", "--endpoints", f"ipc://{tmp_path}/worker-0"
    )  # fmt: skip
    wait_until(
        lambda: server.log.count("Booting worker") == 2 and server.is_listening(), START_TIMEOUT_S
    )
    server.process.send_signal(number)
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.log
    assert "Exception" not in server.log


def test_logging_has_native_locks_in_a_front_end():
    code = """
from gevent import monkey
monkey.patch_all()
import _thread, logging
from app.gunicorn_hooks import give_logging_native_locks

logging.basicConfig()
give_logging_native_locks()
later = logging.StreamHandler()
locks = [logging._lock, logging.lastResort.lock, later.lock, logging.getLogger().handlers[0].lock]
print({type(lock) is _thread.RLock for lock in locks})
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("{True}\n", "")


def test_a_supervisor_that_dies_at_its_start_ends_the_server(start_server, tmp_path):
    # As if the supervisor crashed at import or for want of memory.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'workers.supervisor' in sys.orig_argv: os._exit(3)\n"
    )
    server = start_server(PYTHONPATH=str(tmp_path))
    assert server.process.wait(30) == 1
    assert "the supervisor has ended by itself" in server.log
    assert "Traceback" not in server.log


def test_variables_of_a_kubernetes_service_titopool_do_not_stop_the_start(start_server, tmp_path):
    server = start_server(
        "--num-front-ends", "1", "--endpoints", f"ipc://{tmp_path}/worker-0",
        TITOPOOL_WORKER_PORT="tcp://10.96.0.12:5555", TITOPOOL_SERVICE_HOST="10.96.0.12",
    )  # fmt: skip
    wait_until(server.is_listening, START_TIMEOUT_S, lambda: server.log)
    assert "TITOPOOL_SERVICE_HOST, TITOPOOL_WORKER_PORT" in server.log


def test_requests_beyond_the_descriptor_limit_get_429(start_server, start_stub, tmp_path):
    start_stub(0)
    server = start_server(
        "--num-front-ends", "1", "--endpoints", f"ipc://{tmp_path}/worker-0", num_descriptors=256
    )  # fmt: skip
    server.wait_until_ready()
    assert "max_open_requests is 168 here, not 16384" in server.log

    def ask(_: int) -> int:
        try:
            return server.post("/generate/", {"prompts": [[Fault.HANG]]}).status_code
        except requests.RequestException:
            return 0

    with concurrent.futures.ThreadPoolExecutor(185) as threads:
        answers = [threads.submit(ask, index) for index in range(185)]
        wait_until(lambda: sum(one.done() for one in answers) == 185 - 168, 60)
        assert {one.result() for one in answers if one.done()} == {429}
        # The server still accepts connections.
        assert server.is_listening()
        server.process.terminate()
