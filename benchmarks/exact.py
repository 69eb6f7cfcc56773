"""`--exact` beside the default: tokens a second, and whether a prompt gives the same bits in any batch.

    python -m benchmarks.exact [--shape qwen3-0.6b] [--modes default exact] [--num-workers 1]
        [--batch 512] [--max-tokens 128] [--mismatch [--pictures FOLDER]] [--out FILE.jsonl]
        [--serve-options "…"]

Random weights. Prompts of 17 to 300 tokens, some with a prefix in common, greedy and seeded, are
sampled alone and within one batch, in a cold prefix cache and in a warm one. With several workers the
same request goes to each. Prints a line of JSON for each mode: tokens a second of the batch, and for
each comparison the share of prompts whose ids and log-probabilities are equal bit by bit. With
`--mismatch` it also compares the samples with transformers' forward pass in bfloat16, and its head in
bfloat16 or, for `exact`, in float32; `--pictures` draws both gaps as `mismatch-MODE.png`.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import PROMPT_IDS
from harness.servers import REPOSITORY, Server, environment, running_server
from titopool import AsyncClient
from titopool.client.results import Completion, PromptResult
from titopool.mismatch import trainer
from titopool.mismatch.report import draw
from titopool.mismatch.statistics import Mismatch, compare

# Prompts that are also sampled alone, and sessions that spread a request over the workers.
NUM_ALONE = 8
NUM_SESSIONS = 16
# Shared by every fourth prompt, so that the prefix cache has something to find.
PREFIX_LEN = 160
TEMPERATURES = {"greedy": 0.0, "seeded": 0.7}
GAPS = ("mean_difference", "max_difference", "kl", "token_ess", "completion_ess")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--modes", nargs="+", choices=("default", "exact"), default=["default"])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--mismatch", action="store_true")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve-options", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = f"{name}/model"
        # In a process of its own, so that its GPU memory is free afterwards.
        words = [sys.executable, "-m", "benchmarks.models", options.shape, model, "weights"]
        subprocess.run(words, check=True, env=environment(), cwd=REPOSITORY)
        for mode in options.modes:
            line = json.dumps(
                {"shape": options.shape, "mode": mode, **measure(mode, model, options)}
            )
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(line + "\n")


def measure(mode: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    words = [model, "--num-workers", str(options.num_workers), *options.serve_options.split()]
    if mode == "exact":
        words.append("--exact")
    log = Path(model).parent / f"{mode}.log"
    with running_server(*words, log=log, num_workers=options.num_workers) as server:
        found, prompts, samples = asyncio.run(_ask(server, options))
    if options.mismatch:
        gap = _mismatch(mode, model, prompts, samples)
        found["mismatch"] = {name: float(getattr(gap, name)) for name in GAPS}
        if options.pictures:
            draw(gap, str(options.pictures / f"mismatch-{mode}.png"))
    return found


async def _ask(server: Server, options: argparse.Namespace) -> Any:
    """Figures, prompts, and the completions of the first batch at a temperature of 1."""
    prompts = _prompts(options.batch)
    found: dict[str, Any] = {"num_workers": options.num_workers, "batch": options.batch}
    async with AsyncClient(server.url) as client:

        async def sample(
            which: Sequence[int], temperature: float, **fields: Any
        ) -> list[Completion]:
            answers: list[list[PromptResult]] = await asyncio.gather(*(
                client.generate(
                    [prompts[one]], max_tokens=options.max_tokens, temperature=temperature, seed=one,
                    ignore_eos=True, **fields,
                )
                for one in which
            ))  # fmt: skip
            return [answer[0].completions[0] for answer in answers]

        every = range(len(prompts))
        await sample(every, 1.0)
        for name, temperature in TEMPERATURES.items():
            _forget(server)
            began = time.monotonic()
            cold = await sample(every, temperature)
            seconds = time.monotonic() - began
            warm = await sample(every, temperature)
            some = range(0, len(prompts), max(1, len(prompts) // NUM_ALONE))
            alone_warm = [(await sample([one], temperature))[0] for one in some]
            _forget(server)
            alone_cold = [(await sample([one], temperature))[0] for one in some]
            elsewhere = [
                (await sample([0], temperature, session_id=f"session-{index}"))[0]
                for index in range(NUM_SESSIONS)
            ]
            in_batch = [cold[one] for one in some]
            found[name] = {
                "tokens_per_s": round(len(prompts) * options.max_tokens / seconds),
                "equal_in_batch_with_warm_cache": _equal(warm, cold),
                "equal_alone_with_warm_cache": _equal(alone_warm, in_batch),
                "equal_alone_with_cold_cache": _equal(alone_cold, in_batch),
                "equal_in_all_sessions": _equal(elsewhere, [cold[0]] * NUM_SESSIONS),
            }
        _forget(server)
        samples = await sample(every, 1.0)
    found["prompts_by_worker"] = sorted(server.metrics("completed_jobs_total").values())
    return found, prompts, samples


def _prompts(number: int) -> list[list[int]]:
    numbers = np.random.default_rng(0)
    prefix = numbers.choice(PROMPT_IDS, PREFIX_LEN).tolist()
    found = []
    for index in range(number):
        own = numbers.choice(PROMPT_IDS, numbers.integers(17, 141)).tolist()
        found.append(prefix + own if index % 4 == 0 else own)
    return found


def _forget(server: Server) -> None:
    answer = server.post("/reset_prefix_cache/", {})
    assert answer.status_code == 200, answer.text


def _equal(found: Sequence[Completion], expected: Sequence[Completion]) -> float:
    """The share of completions with equal ids and bits of log-probabilities."""
    pairs = zip(found, expected, strict=True)
    return float(np.mean([_bits(one) == _bits(other) for one, other in pairs]))


def _bits(one: Completion) -> tuple[bytes, bytes]:
    assert one.logprobs is not None
    return one.ids.tobytes(), one.logprobs.tobytes()


def _mismatch(
    mode: str, model: str, prompts: Sequence[Sequence[int]], samples: Sequence[Completion]
) -> Mismatch:
    """The gap to transformers of the first completions; a forward pass for each."""
    pairs = list(zip(prompts, samples, strict=True))[:64]
    computed = trainer.logprobs_of(
        model, [(np.array(prompt, np.int32), one.ids) for prompt, one in pairs],
        dtype="bfloat16", head_dtype="float32" if mode == "exact" else "model", device=None,
        attention=None, temperature=1.0,
    )  # fmt: skip
    return compare([one.logprobs for _, one in pairs], computed)


if __name__ == "__main__":
    main()
