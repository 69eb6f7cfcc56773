"""The upper limit: `LLM.generate` in a process of its own, with the servers' prompts.

    python -m benchmarks.bare_engine JOB.json ANSWER.json

`JOB.json` holds the engine's options, sizes, patterns, repeats and kinds. A kind is the container of
log-probabilities: vLLM's default, or the flat one that this server uses.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.workload import Pattern, Sizes, make_pattern

FLAT = " (flat logprobs)"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    begin = time.monotonic()
    llm = LLM(model=job["model"], **job["options"])
    start_s = time.monotonic() - begin
    sizes = Sizes(**job["sizes"])
    runs: list[dict[str, Any]] = []
    _run(llm, make_pattern("batch", sizes, repeat=-1), is_flat=False)
    for repeat in range(job["repeats"]):
        for name in job["patterns"]:
            for index, kind in enumerate(job["kinds"]):
                # New prompts for each kind, so that the second kind finds none in the prefix cache.
                number = repeat * len(job["kinds"]) + index
                run = _run(llm, make_pattern(name, sizes, repeat=number), is_flat=kind == FLAT)
                runs.append({"kind": kind, "pattern": name, **run})
    Path(sys.argv[2]).write_text(json.dumps({"start_s": start_s, "runs": runs}))


def _run(llm: Any, pattern: Pattern, *, is_flat: bool) -> dict[str, Any]:
    if pattern.concurrency == 1:
        calls = [_generate(llm, pattern, [call], is_flat) for call in pattern.calls]
    else:
        calls = [_generate(llm, pattern, pattern.calls, is_flat)]
    return {
        "elapsed_s": sum(elapsed_s for elapsed_s, _ in calls),
        "latencies_s": [elapsed_s for elapsed_s, _ in calls],
        "cpu_s": sum(cpu_s for _, cpu_s in calls),
        "num_tokens": pattern.num_tokens,
    }


def _generate(llm: Any, pattern: Pattern, calls: list[Any], is_flat: bool) -> tuple[float, float]:
    from vllm import SamplingParams

    params = SamplingParams(
        n=calls[0].n, max_tokens=pattern.output_len, ignore_eos=True, logprobs=calls[0].logprobs,
        prompt_logprobs=calls[0].prompt_logprobs, detokenize=False, flat_logprobs=is_flat,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for call in calls for ids in call.prompts]
    cpu_s, begin = _cpu_s(), time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.monotonic() - begin
    lengths = {len(one.token_ids) for output in outputs for one in output.outputs}
    if lengths != {pattern.output_len}:
        sys.exit(f"bare engine: expected {pattern.output_len} tokens each, got {lengths}")
    return elapsed_s, _cpu_s() - cpu_s


def _cpu_s() -> float:
    me = psutil.Process()
    times = [one.cpu_times() for one in [me, *me.children(recursive=True)]]
    return sum(one.user + one.system for one in times)


if __name__ == "__main__":
    main()
