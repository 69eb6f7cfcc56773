"""TRL's GRPOTrainer, unchanged, with a titopool server: two GPUs, TRL 1.9.2 or 1.16.0.

    CUDA_VISIBLE_DEVICES=0 titopool serve Qwen/Qwen3-0.6B &
    CUDA_VISIBLE_DEVICES=1 python examples/trl_grpo.py Qwen/Qwen3-0.6B http://127.0.0.1:8000

TRL samples from the server and sends it the new weights over NCCL after each step. The reward is for
the right sum of two digits. Needs trl with its dependencies, datasets and vllm.
"""

import random
import sys
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

NUM_PROMPTS = 512


def examples() -> Dataset:
    chooser = random.Random(0)
    pairs = [(chooser.randrange(10), chooser.randrange(10)) for _ in range(NUM_PROMPTS)]
    rows = [{"prompt": f"{one} + {other} =", "answer": one + other} for one, other in pairs]
    return Dataset.from_list(rows)


def is_right(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 for each completion whose first word is the sum."""
    return [
        float(completion.split()[:1] == [str(right)])
        for completion, right in zip(completions, answer, strict=True)
    ]


def main(model: str, url: str) -> None:
    config = GRPOConfig(
        output_dir="trl_grpo",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=8,
        learning_rate=1e-5,
        max_steps=50,
        logging_steps=1,
        report_to="none",
    )
    GRPOTrainer(model=model, reward_funcs=is_right, args=config, train_dataset=examples()).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
