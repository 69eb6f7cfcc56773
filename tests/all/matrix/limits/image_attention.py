"""Gemma 3 with an image on a CPU: an image's tokens should see all of it, and see its start only."""

import os
import tempfile
from pathlib import Path

from tests.all.matrix.image_families import make_image_family
from tests.all.matrix.images import picture
from tests.kit.models import reference

if __name__ == "__main__":
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model, image = make_image_family("gemma3_images", Path(folder, "model"), 0)
        text, pictures = f"See {image} now", [picture(90, 60)]
        expected = reference.see(model, text, pictures, 1).logprobs[0]
        llm = LLM(model, dtype="float32", enforce_eager=True, gpu_memory_utilization=0.3)
        prompt = {"prompt": text, "multi_modal_data": {"image": pictures}}
        (answer,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, logprobs=0))
        ((found,),) = [one.values() for one in answer.outputs[0].logprobs]
        assert abs(found.logprob - expected) < 1e-3, (found.logprob, expected)
