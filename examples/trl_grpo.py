"""TRL's GRPOTrainer, unchanged, learns through a titopool server: two GPUs, TRL 1.9.2 or 1.16.0.

    python examples/trl_grpo.py --make-model tiny
    CUDA_VISIBLE_DEVICES=0 titopool serve tiny --max-model-len 64 &
    CUDA_VISIBLE_DEVICES=1 python examples/trl_grpo.py tiny http://127.0.0.1:8000

TRL samples from the server and sends it the new weights over NCCL after each step. The task and the
random model are those of grpo.py: the right completion is the capital of the prompt's country.

Needs trl with its dependencies, and vllm in the trainer's environment for its NCCL communicator.
"""

import argparse
import random
from typing import Any

import torch

try:
    from examples import grpo
except ImportError:  # Python has this folder on its path when it runs this file.
    import grpo  # type: ignore[no-redef]


def prompts() -> list[dict[str, str]]:
    """TRL sends the ids of these texts; the model's tokenizer has one token a word."""
    trained, _ = grpo.make_prompts(seed=0)
    return [{"prompt": " ".join(grpo.WORDS[one] for one in prompt)} for prompt in trained]


def reward_of(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for the capital and the end of text, 1/2 for the capital and more words, else 0."""
    return [
        grpo.reward_of([grpo.WORDS.index(word) for word in prompt.split()], completion)
        for prompt, completion in zip(prompts, completion_ids, strict=True)
    ]


def make_trainer(model: str, url: str, num_steps: int) -> Any:
    """A GRPOTrainer that has joined the server's group."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir="trl_grpo",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        num_generations=grpo.GROUP_SIZE,
        per_device_train_batch_size=grpo.PROMPTS_PER_STEP * grpo.GROUP_SIZE,
        max_completion_length=grpo.MAX_TOKENS,
        learning_rate=grpo.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        max_steps=num_steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        seed=0,
    )
    chooser = random.Random(0)
    rows = prompts()
    chooser.shuffle(rows)
    dataset = Dataset.from_list(rows)
    return GRPOTrainer(model=model, reward_funcs=reward_of, args=config, train_dataset=dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="folder of the model that the server serves")
    parser.add_argument("url", nargs="?", help="of the server")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--make-model", metavar="FOLDER", help="writes a tiny random model, ends")
    options = parser.parse_args()
    if options.make_model:
        grpo.save_model(grpo.make_model(seed=0), options.make_model)
        return
    if not options.url:
        parser.error("expected MODEL and URL, or --make-model FOLDER")
    make_trainer(options.model, options.url, options.steps).train()


if __name__ == "__main__":
    main()
