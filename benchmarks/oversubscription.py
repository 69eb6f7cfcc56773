"""More rollouts than a batch needs, and the rest aborted: what `num_needed` gains and what it drops.

    python -m benchmarks.oversubscription                                  # tiny Qwen3, any machine
    python -m benchmarks.oversubscription --shape qwen3-0.6b --num-workers 4

`benchmarks/oversubscription.json` fixes the groups that a batch needs, their rollouts, lengths and seed
for each shape. Lengths are lognormal: each prompt has a median of its own, around which its rollouts
lie. Lengths are forced (`ignore_eos`), so that all factors play the same ones. A factor of 1.25 starts
1.25 times the groups that are needed, all at once. Prints and keeps, for each factor: seconds until the
batch is complete, its tokens a second, the tokens of aborted rollouts, and the mean length of the
batch's completions beside the mean of all that began.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench import make_engine
from benchmarks.machine import describe_machine
from benchmarks.models import PROMPT_IDS
from benchmarks.processes import engine_environment, running
from benchmarks.targets import Titopool
from titopool import Client, PromptResult, run_rollouts
from titopool.settings.gpus import visible_gpus

PLANS = Path(__file__).with_suffix(".json")
TIMEOUT_S = 1800.0


class Group(NamedTuple):
    """A prompt's ids, and the tokens of each of its rollouts."""

    ids: list[int]
    lengths: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    plans = json.loads(PLANS.read_text())
    parser.add_argument("--shape", choices=plans, default="tiny")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--factors", nargs="+", type=float, default=[1.0, 1.25, 1.5])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--serve-options", default="", help="of this server")
    parser.add_argument(
        "--out", default="bench-oversubscription", help="path of the result file, without extension"
    )
    options = parser.parse_args()
    plan = plans[options.shape]
    # What `make_engine` reads.
    options.dummy_weights, options.num_prompts = options.shape != "tiny", plan["groups"]
    options.max_num_seqs = plan["max_num_seqs"]
    on_cpu = not visible_gpus()
    result: dict[str, Any] = {
        "machine": describe_machine(), "load_average": os.getloadavg(), **vars(options),
        "plan": plan, "runs": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = make_engine(options, folder, on_cpu=on_cpu, max_model_len=plan["max_model_len"])
        server = Titopool(options.num_workers, options=options.serve_options.split())
        environ = engine_environment(on_cpu=on_cpu, num_workers=options.num_workers)
        with running(server, engine, environ, folder / "log") as one:
            # The first repeat warms up.
            for repeat in range(options.repeats + 1):
                for factor in options.factors:
                    run = measure(one.url, plan, factor, repeat)
                    if repeat:
                        result["runs"].append(run)
                        print(json.dumps(run), flush=True)
                        Path(options.out + ".json").write_text(json.dumps(result, indent=1) + "\n")


def make_groups(plan: dict[str, Any], number: int, repeat: int) -> list[Group]:
    """The lengths of a larger number begin with those of a smaller one; no two calls share ids."""
    chance = random.Random(plan["seed"] + repeat)
    of = plan["answer_len"]

    def lengths() -> list[int]:
        median = of["median"] * chance.lognormvariate(0, of["group_sigma"])
        drawn = [median * chance.lognormvariate(0, of["sigma"]) for _ in range(plan["n"])]
        return [max(1, min(of["most"], int(one))) for one in drawn]

    return [
        Group(random.choices(PROMPT_IDS, k=plan["prompt_len"]), lengths()) for _ in range(number)
    ]


class LengthsClient(Client):
    """Samples as many tokens as the plan says, and counts what the server sampled."""

    def __init__(self, url: str, groups: Sequence[Group]):
        super().__init__(url, timeout_s=TIMEOUT_S)
        self._lengths = {tuple(one.ids): one.lengths for one in groups}
        # Of each request; threads append.
        self.num_sampled: list[int] = []

    def generate(self, prompts: Any, *, seed: int = 0, **options: Any) -> list[PromptResult]:
        """As `Client.generate`; the seed is the rollout's place in its group."""
        options["max_tokens"] = self._lengths[tuple(prompts[0].tolist())][seed]
        results = super().generate(prompts, ignore_eos=True, **options)
        self.num_sampled.append(len(results[0].completions[0].ids))
        return results


def measure(url: str, plan: dict[str, Any], factor: float, repeat: int) -> dict[str, float]:
    groups = make_groups(plan, round(factor * plan["groups"]), repeat)
    lengths = [length for group in groups for length in group.lengths]
    with LengthsClient(url, groups) as client:
        began = time.monotonic()
        rollouts = run_rollouts(
            client, [one.ids for one in groups], n=plan["n"], num_needed=plan["groups"],
            concurrency=len(lengths), seed=0,
        )  # fmt: skip
        elapsed_s = time.monotonic() - began
    kept = [int(one.arrays().loss_mask.sum()) for one in rollouts]
    expected = [groups[one.prompt_index or 0].lengths for one in rollouts[:: plan["n"]]]
    if kept != [length for one in expected for length in one]:
        raise SystemExit(f"expected completions of {expected} tokens, got {kept}")
    return {
        "factor": factor,
        "num_groups": len(groups),
        "elapsed_s": elapsed_s,
        "kept_tokens": sum(kept),
        "kept_tokens_per_s": sum(kept) / elapsed_s,
        "wasted_tokens": sum(client.num_sampled) - sum(kept),
        "kept_mean_len": sum(kept) / len(kept),
        "all_mean_len": sum(lengths) / len(lengths),
    }


if __name__ == "__main__":
    main()
