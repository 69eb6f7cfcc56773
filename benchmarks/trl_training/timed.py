"""Runs one example with TRL's GRPOTrainer and prints a line of JSON for each of its steps.

    python -m benchmarks.trl_training.timed TASK MODEL URL STEPS

Seconds: `step_s` of the whole step by TRL, of which `generate_s` in the server's answers and
`update_s` in sending the weights; the rest is the trainer's.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    task, model, url, num_steps = sys.argv[1:]
    began = time.monotonic()
    trainer = importlib.import_module(f"examples.{task}").make_trainer(model, url, int(num_steps))
    times = {"generate_s": list[float](), "update_s": list[float]()}
    calls = trainer.vllm_generation
    calls.generate = timed(calls.generate, times["generate_s"])
    calls.sync_weights = timed(calls.sync_weights, times["update_s"])
    start_s = time.monotonic() - began
    trainer.train()
    steps = [one for one in trainer.state.log_history if "reward" in one]
    for number, step in enumerate(steps):
        row = {"reward": step["reward"], "step_s": step["step_time"], "start_s": start_s}
        ratio = step.get("sampling/importance_sampling_ratio/mean")
        difference = step.get("sampling/sampling_logp_difference/mean")
        row |= {"ratio": ratio, "logprob_difference": difference}
        print(json.dumps(row | {name: found[number] for name, found in times.items()}), flush=True)


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        began = time.monotonic()
        try:
            return call(*args, **options)
        finally:
            seconds.append(time.monotonic() - began)

    return run


if __name__ == "__main__":
    main()
