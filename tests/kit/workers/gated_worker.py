"""`python -m tests.kit.workers.gated_worker GATE …`: a real worker that, unless it is worker 0, loads once GATE exists."""

import sys
import time
from pathlib import Path

from titopool.wire.messages import WorkerFacts
from workers.__main__ import run
from workers.engine.base import ReportPhase
from workers.engine.vllm import VllmEngine


def close_gate(gate: Path) -> None:
    load = VllmEngine.load

    def load_later(engine: VllmEngine, report: ReportPhase) -> WorkerFacts:
        report("loading")
        while not gate.exists():
            time.sleep(0.05)
        return load(engine, report)

    VllmEngine.load = load_later  # type: ignore[method-assign]


# vLLM may spawn its engine process, which imports this module a second time.
if __name__ == "__main__":
    gate = Path(sys.argv.pop(1))
    if sys.argv[sys.argv.index("--worker-id") + 1] != "0":
        close_gate(gate)
    run()
