"""TRL's GRPOTrainer, unchanged, learns to name colours of images through a titopool server.

    python examples/trl_grpo_images.py --make-model tiny-vl
    CUDA_VISIBLE_DEVICES=0 titopool serve tiny-vl --max-model-len 256 &
    CUDA_VISIBLE_DEVICES=1 python examples/trl_grpo_images.py tiny-vl http://127.0.0.1:8000

A prompt has an image of one of eight colours. The right completion is the colour's name and the end
of text; the best constant answer scores 1/8. The model is a random Qwen2.5-VL, trained in whole.

Needs two GPUs, trl 1.9.2 or 1.16.0 with its dependencies, and vllm in the trainer's environment.
"""

import argparse
import random
from typing import Any

import torch

COLOURS = {
    "red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0),
    "purple": (255, 0, 255), "cyan": (0, 255, 255), "white": (255, 255, 255), "black": (0, 0, 0),
}  # fmt: skip
END = "<end>"
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORDS = [END, *COLOURS, "user", "assistant", "colour", *SPECIAL]
# Each image part becomes one `<|image_pad|>`; the processor repeats it.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] + ' ' }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)
# Pixels of a side; 28 are one token.
SIDE = 56
NUM_EXAMPLES, GROUP_SIZE, MAX_TOKENS = 256, 16, 2


def make_model(folder: str) -> None:
    """Writes a random Qwen2.5-VL of two layers, with its processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    ids = {word: index for index, word in enumerate(WORDS)}
    text = Tokenizer(models.WordLevel(ids, unk_token=END))
    text.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=text, eos_token=END, pad_token=END, additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = TEMPLATE
    images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=SIDE * SIDE)
    Qwen2_5_VLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(WORDS), "hidden_size": 128, "intermediate_size": 256,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "max_position_embeddings": 512, "initializer_range": 0.1, "eos_token_id": 0,
            "pad_token_id": 0, "bos_token_id": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12],
            },
        },
        vision_config={
            "depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2,
            "out_hidden_size": 128, "window_size": SIDE, "fullatt_block_indexes": [1],
            "initializer_range": 0.1,
        },
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)


def examples() -> list[dict[str, Any]]:
    from PIL import Image

    chooser = random.Random(0)
    names = [chooser.choice(list(COLOURS)) for _ in range(NUM_EXAMPLES)]
    return [
        {
            "prompt": [{"role": "user", "content": "colour"}],
            "image": Image.new("RGB", (SIDE, SIDE), COLOURS[name]),
            "colour": name,
        }
        for name in names
    ]


def reward_of(completion_ids: list[list[int]], colour: list[str], **_: Any) -> list[float]:
    """1 for the colour and the end of text, 1/2 for the colour and another word, else 0."""
    rewards = []
    for ids, name in zip(completion_ids, colour, strict=True):
        is_named = ids[:1] == [WORDS.index(name)]
        rewards.append((0.5 + 0.5 * (ids[1:] == [WORDS.index(END)])) * is_named)
    return rewards


def make_trainer(model: str, url: str, num_steps: int) -> Any:
    """A GRPOTrainer that has joined the server's group."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir="trl_grpo_images",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=16 * GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        # A placeholder among the completion's ids would be an image that the trainer does not have.
        generation_kwargs={"allowed_token_ids": list(range(len(WORDS) - len(SPECIAL)))},
        learning_rate=1e-3,
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
    return GRPOTrainer(
        model=model, reward_funcs=reward_of, args=config,
        train_dataset=Dataset.from_list(examples()),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="folder of the model that the server serves")
    parser.add_argument("url", nargs="?", help="of the server")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--make-model", metavar="FOLDER", help="writes a tiny random model, ends")
    options = parser.parse_args()
    if options.make_model:
        make_model(options.make_model)
        return
    if not options.url:
        parser.error("expected MODEL and URL, or --make-model FOLDER")
    make_trainer(options.model, options.url, options.steps).train()


if __name__ == "__main__":
    main()
