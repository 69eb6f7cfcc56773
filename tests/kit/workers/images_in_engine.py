"""Runs jobs with images in an engine of this process: `python -m tests.kit.workers.images_in_engine MODEL`.

Prints a line of JSON: whether each request to vLLM's engine process came without its image's tensors,
and the completions of each job.
"""

import asyncio
import json
import sys

import msgspec
import numpy as np
from transformers import AutoTokenizer

from harness.images import PLACEHOLDERS, file_of, picture
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.settings.sources import from_command_line
from titopool.wire.messages import Image, Job
from workers.engine.base import FreeSlots
from workers.engine.vllm import VllmEngine

# Seeds of the picture, and completions, of each job.
JOBS = ((1, 1), (2, 3), (1, 4), (2, 1))


async def main(model: str) -> None:
    from vllm.v1.engine.core_client import AsyncMPClient

    send, were_slim = AsyncMPClient.add_request_async, []

    async def recorded(self, request) -> None:
        were_slim.extend(one.data is None for one in request.mm_features or ())
        await send(self, request)

    AsyncMPClient.add_request_async = recorded
    argv = ["--dtype", "float32", "--max-model-len", "512", "--no-enable-prefix-caching"]
    engine = VllmEngine(from_command_line(["--model", model, *argv]), on_cpu=True)
    engine.load(lambda *phase: None)
    await engine.warm_up()
    ids = [5, *AutoTokenizer.from_pretrained(model)(PLACEHOLDERS["qwen"])["input_ids"], 6]
    sampling = SamplingOptions(max_tokens=12, top_k=1, ignore_eos=True)
    completions = []
    for number, (seed, n) in enumerate(JOBS):
        job = Job(
            number, 1, np.array(ids, np.int32).tobytes(), n, 100,
            msgspec.Raw(encode_options(msgspec.structs.replace(sampling, n=n))),
            images=[Image(file_of(picture(56, 56, seed)), bytes([seed]))],
        )  # fmt: skip
        generated = await engine.run(job, lambda chunk: None, FreeSlots())
        completions.append(
            [np.frombuffer(one.token_ids, np.int32).tolist() for one in generated.completions]
        )
    print(json.dumps({"were_slim": were_slim, "completions": completions}), flush=True)
    engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
