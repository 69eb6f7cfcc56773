"""Tiny random vision-language models of two families, created locally.

Qwen2.5-VL repeats `<|image_pad|>` as an image's size needs; SmolVLM (Idefics3) cuts an image into
tiles and puts rows of markers and `<image>` around them.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    SiglipVisionConfig,
)
from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor

from titopool.demo_model import VOCAB_SIZE, make_tokenizer

QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_qwen_vl(folder: Path, *, shape: dict[str, Any] | None = None, seed: int = 0) -> None:
    """Writes a Qwen2.5-VL with its processor to `folder`.

    Args:
        shape: replaces `text_config` and `vision_config` of the tiny model; then no weights are
            written, for vLLM's `load_format="dummy"`.
    """
    tokenizer = _tokenizer(folder, QWEN_TOKENS)
    tokenizer.chat_template = QWEN_TEMPLATE
    images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=512 * 28 * 28)
    Qwen2_5_VLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=Qwen2VLVideoProcessor(),
        chat_template=QWEN_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in QWEN_TOKENS}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "initializer_range": 0.1, "eos_token_id": 0, "bos_token_id": None,
        "rope_parameters": _rope([4, 6, 6]),
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 128, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "window_size": 56, "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text | (shape["text_config"] if shape else {}),
        vision_config=vision | (shape["vision_config"] if shape else {}),
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=True,
    )  # fmt: skip
    if shape is None:
        _save(Qwen2_5_VLForConditionalGeneration, config, folder, seed)
        return
    config.architectures, config.dtype = ["Qwen2_5_VLForConditionalGeneration"], "bfloat16"
    config.save_pretrained(folder)


def _rope(sections: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}


# The shape of Qwen2.5-VL-3B-Instruct.
QWEN_3B: dict[str, Any] = {
    "text_config": {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 11_008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
        "rope_parameters": _rope([16, 24, 24]), "initializer_range": 0.02,
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "out_hidden_size": 2048, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "initializer_range": 0.02,
    },
}  # fmt: skip


SMOL_TOKENS = [
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip


def make_smol_vlm(folder: Path) -> None:
    """Writes an Idefics3 with its processor to `folder`: tiles of 32 pixels, 4 ids each."""
    tokenizer = _tokenizer(folder, SMOL_TOKENS)
    images = Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=4).save_pretrained(
        folder
    )
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 128,
            "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 4096,
            "initializer_range": 0.1, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0,
        },
        vision_config=SiglipVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            image_size=32, patch_size=8,
        ).to_dict(),
        tie_word_embeddings=False,
    )  # fmt: skip
    _save(Idefics3ForConditionalGeneration, config, folder)


def _tokenizer(folder: Path, special_tokens: list[str]):
    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) <= VOCAB_SIZE
    tokenizer.add_special_tokens({"additional_special_tokens": special_tokens})
    return tokenizer


def _save(model_class, config, folder: Path, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model_class(config).to(torch.float32).save_pretrained(folder)
