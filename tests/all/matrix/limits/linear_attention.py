"""Qwen3-Next in float32 on a CPU: vLLM asserts bfloat16 when it starts."""

import os
import tempfile
from pathlib import Path

from tests.kit.models.model_families import make_family

if __name__ == "__main__":
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model = make_family("qwen3_next", Path(folder, "model"), 0)
        llm = LLM(model, dtype="float32", enforce_eager=True, gpu_memory_utilization=0.3)
        print(llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4)))
