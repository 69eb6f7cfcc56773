"""Images a second of vLLM's engine alone, whose prompts have their images prepared before.

    python -m benchmarks.bare_images MODEL [vLLM's options …] < BODY.json

`BODY.json` is a body of `POST /generate/` as `benchmarks.images` sends it: ids, images, `max_tokens`.
Prints a line of JSON: the seconds of two rounds, the first with its images new to the engine, the
second with all of them in its prefix cache.
"""

import asyncio
import base64
import hashlib
import json
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from titopool.settings.gpus import visible_gpus
from titopool.settings.sampling import SamplingOptions
from titopool.settings.sources import from_command_line
from titopool.wire.messages import Image, Job
from workers.engine.sampling import to_vllm_params
from workers.engine.vllm import VllmEngine


async def main() -> None:
    body = json.load(sys.stdin)
    # All prompts are held at once.
    argv = ["--model", *sys.argv[1:], "--image-memory-bytes", str(2**40)]
    config = from_command_line(argv)
    engine = VllmEngine(config, on_cpu=not visible_gpus())
    engine.load(lambda *phase: None)
    await engine.warm_up()
    sampling = SamplingOptions(
        max_tokens=body["max_tokens"], ignore_eos=True, logprobs=0, temperature=1.0
    )
    params = to_vllm_params(sampling)
    async with AsyncExitStack() as stack:
        prompts = [
            await stack.enter_async_context(engine._images.prepared(job)) for job in jobs(body)
        ]
        rounds = []
        for number in range(2):
            began = time.monotonic()
            await asyncio.gather(
                *(
                    drained(engine._llm.generate(one.engine_input, params, f"{number}-{index}"))
                    for index, one in enumerate(prompts)
                )
            )
            rounds.append(time.monotonic() - began)
    print(json.dumps({"bare_s": rounds[0], "bare_again_s": rounds[1]}), flush=True)
    engine.close()


def jobs(body: dict[str, Any]) -> list[Job]:
    made = []
    for ids, image in zip(body["prompts"], body["images"], strict=True):
        data = base64.b64decode(image)
        made.append(
            Job(
                1,
                1,
                np.array(ids, np.int32).tobytes(),
                1,
                len(ids) + body["max_tokens"],
                b"",
                images=[Image(data, hashlib.sha256(data).digest())],
            )
        )
    return made


async def drained(outputs: Any) -> None:
    async for _ in outputs:
        pass


if __name__ == "__main__":
    asyncio.run(main())
