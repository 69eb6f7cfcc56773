"""DeepSeek-V3 in float32 on a GPU: no kernel of vLLM's latent attention takes it."""

import os
import tempfile
from pathlib import Path

from tests.kit.models.model_families import make_family

if __name__ == "__main__":
    # An engine in a process of its own hung on a GPU: vLLM forks it after torch has made a model.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model = make_family("deepseek_v3", Path(folder, "model"), 0)
        llm = LLM(model, dtype="float32", enforce_eager=True, gpu_memory_utilization=0.3)
        print(llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4)))
