"""vLLM's engine alone, which works when it is asked (`benchmarks.side_by_side`).

    python -m benchmarks.bare_turns short MODEL OPTIONS.json
    python -m benchmarks.bare_turns images MODEL [vLLM's options …]

Prints `ready`, then a line of JSON for each line of its input. `short`: a line has `prompts` of ids and
`max_tokens`; the answer has the begin and end of each prompt's `LLM.generate`, in monotonic seconds.
`images`: a line is the name of a file with a body of `POST /generate/`; the answer is the seconds
that the engine took, whose images were prepared before.
"""

import asyncio
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from typing import TextIO


def main() -> None:
    # vLLM prints, too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, model, *rest = sys.argv[1:]
    if kind == "short":
        answer_short(model, rest[0], answers)
    else:
        asyncio.run(answer_images(model, rest, answers))


def say(answers: TextIO, text: str) -> None:
    print(text, file=answers, flush=True)


def answer_short(model: str, options: str, answers: TextIO) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, **json.loads(options))
    say(answers, "ready")
    for line in sys.stdin:
        job = json.loads(line)
        params = SamplingParams(
            max_tokens=job["max_tokens"], ignore_eos=True, logprobs=0, detokenize=False
        )
        times = []
        for ids in job["prompts"]:
            begin = time.monotonic()
            llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            times.append((begin, time.monotonic()))
        say(answers, json.dumps(times))


async def answer_images(model: str, options: list[str], answers: TextIO) -> None:
    from benchmarks.bare_images import drained, jobs
    from titopool.settings.gpus import visible_gpus
    from titopool.settings.sampling import SamplingOptions
    from titopool.settings.sources import from_command_line
    from workers.engine.sampling import to_vllm_params
    from workers.engine.vllm import VllmEngine

    # All prompts are held at once.
    config = from_command_line(["--model", model, *options, "--image-memory-bytes", str(2**40)])
    engine = VllmEngine(config, on_cpu=not visible_gpus())
    engine.load(lambda *phase: None)
    await engine.warm_up()
    say(answers, "ready")
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        with open(line.strip()) as file:
            body = json.load(file)
        number += 1
        sampling = SamplingOptions(
            max_tokens=body["max_tokens"], ignore_eos=True, logprobs=0, temperature=1.0
        )
        params = to_vllm_params(sampling)
        async with AsyncExitStack() as stack:
            prompts = [
                await stack.enter_async_context(engine._images.prepared(job)) for job in jobs(body)
            ]
            began = time.monotonic()
            await asyncio.gather(
                *(
                    drained(engine._llm.generate(one.engine_input, params, f"{number}-{index}"))
                    for index, one in enumerate(prompts)
                )
            )
            elapsed_s = time.monotonic() - began
        say(answers, json.dumps(elapsed_s))
    engine.close()


if __name__ == "__main__":
    main()
