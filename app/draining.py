"""A server that ends: front ends finish what is open, and say at /ready that they do.

gunicorn's own end closes the port first, so load balancers would see refused connections in place of
a 503, and requests that are on their way would be lost.

Runs in: gunicorn's master (`wait_until_idle`) and each front end (`Draining`).
"""

import mmap
import queue
import signal
import time
from typing import Any

import gevent

# To a front end: drain. gunicorn's workers do not use it.
SIGNAL = signal.SIGUSR2
# After the drain: for clients that keep idle connections open, and for the answers of failed requests.
END_TIMEOUT_S = 3
# One byte for each front end, by its age; 1: it drains and has no open request. Ages repeat only after
# so many restarts.
NUM_SLOTS = 4096
_POLL_S = 0.05

_idle = mmap.mmap(-1, NUM_SLOTS)


def wait_until_idle(server: Any, timeout_s: float) -> None:
    """In the master, which still listens: lets all front ends drain.

    Args:
        server: gunicorn's Arbiter.
        timeout_s: for open requests. A second SIGTERM, SIGINT or SIGQUIT ends the wait.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not _are_idle(server):
        # In each round: a front end that begins has no handler of this signal yet.
        for pid in list(server.WORKERS):
            server.kill_worker(pid, SIGNAL)
        try:
            number = server.SIG_QUEUE.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        if number == signal.SIGCHLD:
            server.reap_workers()
        elif number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            break
    server.cfg.set("graceful_timeout", END_TIMEOUT_S)


def _are_idle(server: Any) -> bool:
    return all(_idle[worker.age % NUM_SLOTS] for worker in server.WORKERS.values())


class Draining:
    """Whether this front end drains."""

    def __init__(self, worker: Any):
        """`worker`: gunicorn's, `app.gunicorn_worker.FrontEnd`."""
        self._worker = worker
        self._slot = worker.age % NUM_SLOTS
        self.has_begun = False
        _idle[self._slot] = 0
        signal.signal(SIGNAL, lambda *_: gevent.spawn(self._run))

    def _run(self) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        # Each answer closes its connection.
        self._worker.cfg.set("keepalive", 0)
        self._worker.cfg.set("graceful_timeout", END_TIMEOUT_S)
        while True:
            _idle[self._slot] = not self._worker.num_open
            gevent.sleep(_POLL_S)
