"""What a trainer with TRL's client sees when a worker ends in the middle of a broadcast."""

import threading
import time

import psutil

from benchmarks.weights.table import Row
from benchmarks.weights.updaters import TrlTrainer
from tests.servers import wait_until

# How long the trainer is watched after the worker's end.
WATCH_S = 60.0
# Time in which the trainer's broadcast begins.
BEGIN_S = 3.0


def lose_worker(client: TrlTrainer) -> Row:
    """Stops the engine, begins an update, kills the engine, and watches the trainer and the server.

    The trainer's process is killed afterwards.
    """
    server = client.server
    engine = engine_of(server.process.pid)
    engine.suspend()
    client.begin(0)
    time.sleep(BEGIN_S)
    began = time.monotonic()
    engine.kill()
    seen: Row = {"trainer": f"in its broadcast after {WATCH_S:g} s", "answer_s": None}

    def read() -> None:
        try:
            seen["trainer"] = f"the update succeeded: {client.read()}"
        except AssertionError:
            seen["trainer"] = f"an exception after {time.monotonic() - began:.1f} s"

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    server.wait_until_ready()
    seen["ready_s"] = round(time.monotonic() - began, 1)
    reader.join(max(0.0, WATCH_S - (time.monotonic() - began)))
    client.kill()
    seen["weights"] = server.get("/weights").json()
    return seen


def engine_of(pid: int) -> psutil.Process:
    """vLLM's engine process below the process `pid`."""
    found: list[psutil.Process] = []

    def find() -> bool:
        children = psutil.Process(pid).children(recursive=True)
        found.extend(one for one in children if "EngineCore" in one.name())
        return bool(found)

    wait_until(find, 10)
    return found[0]
