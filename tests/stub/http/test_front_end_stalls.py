"""A front end that is stopped for longer than the heartbeat timeout."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from harness.servers import wait_until


def test_requests_of_a_stopped_front_end_succeed_once_it_continues(start_stub, stub_server):
    timeouts = {"TITOPOOL_HEARTBEAT_INTERVAL_S": "0.2", "TITOPOOL_HEARTBEAT_TIMEOUT_S": "1"}
    start_stub(0, "--delay-s", "4", **timeouts)
    server = stub_server(1, "--num-front-ends", "1", **timeouts)
    (front_end,) = psutil.Process(server.process.pid).children()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.generate, [[1, 2, 3]], max_tokens=3)
        wait_until(lambda: server.metrics("sequences") == {"0": 1}, 20)
        os.kill(front_end.pid, signal.SIGSTOP)
        # Longer than the heartbeat timeout: the worker drops the front end and its job.
        time.sleep(2.5)
        os.kill(front_end.pid, signal.SIGCONT)
        assert answer.result(timeout=20)["completion_ids"] == [[3, 2, 1]]
    assert "silent for" not in server.log
