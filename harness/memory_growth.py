"""By how much a front end's memory grows."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from harness.servers import Server

MIB = 2**20


def front_end(server: Server) -> psutil.Process:
    (found,) = psutil.Process(server.process.pid).children()
    return found


class Growth:
    num_bytes = 0


@contextmanager
def growth_of(process: psutil.Process) -> Iterator[Growth]:
    """By how much the resident memory of a process grows at most."""
    growth, has_ended, before = Growth(), threading.Event(), process.memory_info().rss

    def watch() -> None:
        while not has_ended.wait(0.005):
            try:
                growth.num_bytes = max(growth.num_bytes, process.memory_info().rss - before)
            except psutil.NoSuchProcess:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield growth
    finally:
        has_ended.set()
        watcher.join()


def taken_by(server: Server) -> float:
    """What all front ends count against their budgets, in bytes."""
    (found,) = re.findall(r"^titopool_memory_taken_bytes (\S+)$", server.get("/metrics").text, re.M)
    return float(found)
