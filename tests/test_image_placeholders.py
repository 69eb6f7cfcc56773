"""vLLM's image processor with one method replaced, without an engine."""

from pathlib import Path

import pytest

from tests.images import picture
from tests.vision_models import make_qwen_vl
from workers.images.placeholders import PlacingProcessor


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory):
    from vllm.config import ModelConfig

    folder: Path = tmp_path_factory.mktemp("qwen")
    make_qwen_vl(folder)
    return ModelConfig(model=str(folder), dtype="float32", max_model_len=512)


@pytest.fixture
def processor(model_config) -> PlacingProcessor:
    from transformers import AutoTokenizer

    return PlacingProcessor(model_config, AutoTokenizer.from_pretrained(model_config.model))


def test_the_placeholder_ids_of_a_model_are_learned(processor: PlacingProcessor):
    facts = processor.learn()
    assert facts is not None
    assert facts.placeholder_ids == processor._encoding.encode("<|image_pad|>")
    assert facts.has_placeholders
    assert facts.max_images > 1


def test_a_processor_that_bypasses_the_replaced_method_disables_images(processor: PlacingProcessor):
    # As Mistral's processors do.
    vllm_processor = processor._processor
    vllm_processor._maybe_apply_prompt_updates = lambda **options: ([0], {})
    assert processor.learn() is None


def test_a_processor_that_changes_ids_disables_images(processor: PlacingProcessor):
    # As PaliGemma's does.
    vllm_processor = processor._processor
    original = vllm_processor.apply

    def apply(*arguments):
        made = original(*arguments)
        made["prompt_token_ids"] = [*made["prompt_token_ids"], 1]
        return made

    vllm_processor.apply = apply
    assert processor.learn() is None


def test_an_image_with_another_token_count_has_another_hash(processor: PlacingProcessor):
    processor.learn()
    ids = processor._encoding.encode("<|vision_start|><|image_pad|><|vision_end|>")
    image = picture(168, 56, 1)
    names = [
        processor.apply(ids, [image], ["name"], kwargs)["mm_hashes"]["image"]
        for kwargs in ({}, {"max_pixels": 28 * 28 * 4})
    ]
    assert names[0] == ["name-12"]
    assert names[1] != names[0]
