"""A front end that stands still for longer than the workers wait for it."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.servers import wait_until


def test_its_requests_still_end_well(start_stub, stub_server):
    patience = {"TITOPOOL_HEARTBEAT_INTERVAL_S": "0.2", "TITOPOOL_HEARTBEAT_TIMEOUT_S": "1"}
    start_stub(0, "--delay-s", "4", **patience)
    server = stub_server(1, "--num-front-ends", "1", **patience)
    (front_end,) = psutil.Process(server.process.pid).children()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.generate, [[1, 2, 3]], max_tokens=3)
        wait_until(lambda: server.metrics("sequences") == {"0": 1}, 20)
        os.kill(front_end.pid, signal.SIGSTOP)
        # Longer than the worker's patience: it forgets the front end and its job.
        time.sleep(2.5)
        os.kill(front_end.pid, signal.SIGCONT)
        assert answer.result(timeout=20)["completion_ids"] == [[3, 2, 1]]
    assert "silent for" not in server.log
