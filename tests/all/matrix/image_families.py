"""Tiny random models that see images, one for each way in which a processor makes placeholders.

Each function writes a model with its processor to a folder, and returns what stands for an image in a
prompt's text. torch's seed decides the weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from harness.vision_models import (
    QWEN_TEMPLATE,
    QWEN_TOKENS,
    SMOL_TOKENS,
    _rope,
    _tokenizer,
    make_qwen_vl,
)
from tests.kit.models.model_families import vary

TEXT: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.1,
    "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "initializer_range": 0.1,
}  # fmt: skip
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TILES = [[56, 56], [56, 112], [112, 56], [112, 112]]
SQUARE = {"height": 56, "width": 56}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
GLM_TOKENS = [
    "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|video|>",
]  # fmt: skip


def qwen2_vl(folder: Path) -> str:
    """Repeats one placeholder as the image's size needs."""
    tokenizer, ids = _qwen_tokenizer(folder)
    images = transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=64 * 28 * 28)
    transformers.Qwen2VLProcessor(
        image_processor=images, tokenizer=tokenizer, chat_template=QWEN_TEMPLATE,
        video_processor=transformers.Qwen2VLVideoProcessor(),
    ).save_pretrained(folder)  # fmt: skip
    vision = {**QWEN_VISION, "embed_dim": 32, "hidden_size": 128, "mlp_ratio": 2, "patch_size": 14}
    del vision["intermediate_size"]
    config = transformers.Qwen2VLConfig(
        text_config={
            **TEXT, "vocab_size": len(tokenizer), "tie_word_embeddings": True,
            "rope_parameters": _rope([4, 6, 6]),
        },
        vision_config=vision, tie_word_embeddings=True, **ids,
    )  # fmt: skip
    return _save("Qwen2VLForConditionalGeneration", config, folder, QWEN_IMAGE)


def qwen2_5_vl(folder: Path) -> str:
    """As Qwen2-VL, with windows in the vision model's attention."""
    make_qwen_vl(folder, seed=torch.initial_seed())
    return QWEN_IMAGE


def qwen3_vl(folder: Path) -> str:
    """As Qwen2-VL, with features that enter further layers."""
    return _qwen3_vl(folder, "Qwen3VL", {})


def qwen3_vl_moe(folder: Path) -> str:
    """A mixture of experts of it."""
    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "decoder_sparse_step": 1, "norm_topk_prob": True,
    }  # fmt: skip
    return _qwen3_vl(folder, "Qwen3VLMoe", experts)


def _qwen3_vl(folder: Path, name: str, experts: dict[str, Any]) -> str:
    tokenizer, ids = _qwen_tokenizer(folder)
    images = transformers.Qwen2VLImageProcessor(
        patch_size=16, min_pixels=32 * 32, max_pixels=64 * 32 * 32
    )
    transformers.Qwen3VLProcessor(
        image_processor=images, tokenizer=tokenizer, chat_template=QWEN_TEMPLATE,
        video_processor=transformers.Qwen3VLVideoProcessor(),
    ).save_pretrained(folder)  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        text_config={
            **TEXT, **experts, "vocab_size": len(tokenizer), "head_dim": 32,
            "rope_parameters": {**_rope([6, 5, 5]), "mrope_interleaved": True},
        },
        vision_config={
            **QWEN_VISION, "out_hidden_size": 128, "patch_size": 16, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=False, **ids,
    )  # fmt: skip
    _save(f"{name}ForConditionalGeneration", config, folder, QWEN_IMAGE)
    if experts:
        # As the hub's checkpoints have them, and vLLM expects them.
        _rewrite(folder, lambda name, one: (name, one.mT if "mlp.experts." in name else one))
    return QWEN_IMAGE


def gemma3_images(folder: Path) -> str:
    """One marker becomes line breaks, markers and a fixed number of placeholders."""
    names = {
        "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }  # fmt: skip
    tokenizer = _named(folder, names)
    # vLLM joins those of the text and those around an image.
    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
    images = transformers.Gemma3ImageProcessor(size=SQUARE)
    transformers.Gemma3Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_length=4
    ).save_pretrained(folder)
    config = transformers.Gemma3Config(
        text_config={
            **TEXT, "vocab_size": len(tokenizer), "head_dim": 32, "query_pre_attn_scalar": 32,
            "sliding_window": 16, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        vision_config={**VISION, "image_size": 56, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id, eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id, initializer_range=0.1,
    )  # fmt: skip
    _save("Gemma3ForConditionalGeneration", config, folder, "<start_of_image>")
    return _with_level(folder, "<start_of_image>")


def internvl(folder: Path) -> str:
    """Tiles, and the whole image after them."""
    names = {
        "start_image_token": "<img>", "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
    }  # fmt: skip
    tokenizer = _named(folder, names)
    images = transformers.GotOcr2ImageProcessor(
        size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4
    )
    transformers.InternVLProcessor(
        image_processor=images, tokenizer=tokenizer, image_seq_length=4,
        video_processor=transformers.InternVLVideoProcessor(size=SQUARE),
    ).save_pretrained(folder)  # fmt: skip
    config = transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config={
            **VISION, "image_size": [56, 56], "patch_size": [14, 14], "use_qk_norm": False
        },
        image_token_id=tokenizer.context_image_token_id, image_seq_length=4, downsample_ratio=0.5,
    )  # fmt: skip
    return _save("InternVLForConditionalGeneration", config, folder, "<IMG_CONTEXT>")


def llava_onevision(folder: Path) -> str:
    """Tiles of which the padding is cut off, with a token at the end of each row."""
    tokenizer = _tokenizer(folder, ["<image>", "<video>"])
    images = transformers.LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=TILES)
    transformers.LlavaOnevisionProcessor(
        image_processor=images, tokenizer=tokenizer, num_image_tokens=16,
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=SQUARE),
        vision_feature_select_strategy="full",
    ).save_pretrained(folder)  # fmt: skip
    config = transformers.LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config={
            **VISION, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14,
            "vision_use_head": False,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"), image_grid_pinpoints=TILES,
        vision_feature_select_strategy="full", vision_feature_layer=-1,
    )  # fmt: skip
    _save("LlavaOnevisionForConditionalGeneration", config, folder, "<image>")
    return _with_level(folder, "<image>")


def mistral3(folder: Path) -> str:
    """A break after each row of placeholders, and an end instead of the last one."""
    tokenizer = _tokenizer(folder, ["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    images = transformers.PixtralImageProcessor(
        size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}
    )
    transformers.PixtralProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=14, spatial_merge_size=2
    ).save_pretrained(folder)
    config = transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "vocab_size": len(tokenizer), "head_dim": 32},
        vision_config={
            **VISION, "model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 16
        },
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"), spatial_merge_size=2,
        vision_feature_layer=-1,
    )  # fmt: skip
    return _save("Mistral3ForConditionalGeneration", config, folder, "[IMG]")


def smolvlm(folder: Path) -> str:
    """Tiles with markers of row and column around each."""
    tokenizer = _tokenizer(folder, SMOL_TOKENS)
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    videos = transformers.SmolVLMVideoProcessor(
        **sizes, num_frames=4, fps=1,
        video_sampling={"video_size": {"longest_edge": 64}, "max_frames": 4, "fps": 1},
    )  # fmt: skip
    transformers.SmolVLMProcessor(
        image_processor=transformers.SmolVLMImageProcessor(**sizes), tokenizer=tokenizer,
        video_processor=videos, image_seq_len=4,
    ).save_pretrained(folder)  # fmt: skip
    config = transformers.SmolVLMConfig(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2,
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config={**VISION, "image_size": 32, "patch_size": 8}, tie_word_embeddings=False,
    )  # fmt: skip
    return _save("SmolVLMForConditionalGeneration", config, folder, "<image>")


def glm4v(folder: Path) -> str:
    """As Qwen2-VL, with other markers."""
    tokenizer = _tokenizer(folder, GLM_TOKENS)
    tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        folder, extra_special_tokens={"image_token": "<|image|>", "video_token": "<|video|>"}
    )
    size = {"shortest_edge": 2 * 28 * 28, "longest_edge": 128 * 28 * 28}
    transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(size=size), tokenizer=tokenizer,
        video_processor=transformers.Glm4vVideoProcessor(size=size),
    ).save_pretrained(folder)  # fmt: skip
    begin, end, image, begin_video, end_video, video = tokenizer.convert_tokens_to_ids(GLM_TOKENS)
    config = transformers.Glm4vConfig(
        text_config={
            **TEXT, "vocab_size": len(tokenizer), "attention_bias": True,
            "rope_parameters": {**_rope([4, 2, 2]), "partial_rotary_factor": 0.5},
        },
        vision_config={
            **QWEN_VISION, "intermediate_size": 128, "out_hidden_size": 128, "patch_size": 14,
            "image_size": 112,
        },
        image_token_id=image, video_token_id=video, image_start_token_id=begin,
        image_end_token_id=end, video_start_token_id=begin_video, video_end_token_id=end_video,
    )  # fmt: skip
    text = "<|begin_of_image|><|image|><|end_of_image|>"
    return _save("Glm4vForConditionalGeneration", config, folder, text)


IMAGE_FAMILIES: dict[str, Callable[[Path], str]] = {
    one.__name__: one
    for one in (
        qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, gemma3_images, internvl, llava_onevision, mistral3, smolvlm, glm4v
    )
}  # fmt: skip


def _with_level(folder: Path, image: str) -> str:
    """Names SigLIP's tensors as the hub's checkpoints do, which vLLM expects; returns `image`."""
    tower, level = "vision_tower.", "vision_tower.vision_model."
    _rewrite(folder, lambda name, one: (name.replace(tower, level), one))
    return image


def _rewrite(folder: Path, change: Callable[[str, Any], tuple[str, Any]]) -> None:
    """Changes names and tensors of a saved model."""
    (file,) = folder.glob("*.safetensors")
    changed = dict(change(name, one) for name, one in load_file(file).items())
    contiguous = {name: one.contiguous() for name, one in changed.items()}
    save_file(contiguous, file, {"format": "pt"})


def make_image_family(family: str, folder: Path, seed: int) -> tuple[str, str]:
    """Writes a random model to a new `folder`; returns its path and the text of an image."""
    folder.mkdir()
    torch.manual_seed(seed)
    image = IMAGE_FAMILIES[family](folder)
    # Parts one after another, so that a chat renders to the same text as a prompt.
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", image))
    return str(folder), image


def _qwen_tokenizer(folder: Path) -> tuple[Any, dict[str, int]]:
    """The tokenizer, and the ids that configs name."""
    tokenizer = _tokenizer(folder, QWEN_TOKENS)
    tokenizer.chat_template = QWEN_TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(QWEN_TOKENS)
    return tokenizer, {
        "image_token_id": image, "video_token_id": video, "vision_start_token_id": start,
        "vision_end_token_id": end,
    }  # fmt: skip


def _named(folder: Path, names: dict[str, str]) -> Any:
    """A tokenizer with special tokens that its processor knows by name."""
    _tokenizer(folder, list(names.values())).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, extra_special_tokens=names)


def _save(name: str, config: Any, folder: Path, image: str) -> str:
    model = getattr(transformers, name)(config).to(torch.float32)
    vary(model)
    model.save_pretrained(folder)
    return image
