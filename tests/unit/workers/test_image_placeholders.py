"""vLLM's image processor with one method replaced, and the processes around it, without an engine."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from harness.images import file_of, picture
from harness.vision_models import make_qwen_vl
from titopool.wire.messages import Image, Job
from workers.images.placeholders import PlacingProcessor
from workers.images.preparation import _decode as decode
from workers.images.preparer import ImagePreparer, Prepared


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


def test_no_colour_of_a_decoded_image_is_transparent():
    # vLLM 0.33 would put the image on white, which transformers does not.
    palette = picture(8, 8, 5).quantize(4)
    decoded = decode(file_of(palette, transparency=3), 0)
    assert decoded.mode == "RGB"
    assert "transparency" not in decoded.info
    assert decoded.tobytes() == palette.convert("RGB").tobytes()


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


def test_a_render_waits_for_no_room_of_tensors(model_config):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_config.model)
    ids = tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>")
    prompt_ids = np.array(ids, np.int32).tobytes()

    def job_of(num_sequences: int, name: bytes = b"digest") -> Job:
        image = Image(file_of(picture(168, 56, 1)), name)
        return Job(1, 1, prompt_ids, num_sequences, len(ids), b"", images=[image])

    async def run(job: Job) -> int:
        async with preparer.prepared(job) as prompt:
            return prompt.num_images

    async def renders_beside_generations() -> None:
        # As a pause does, which holds generations with their tensors.
        async with preparer.prepared(job_of(1)):
            held = preparer._num_bytes
            assert held > 1
            # More than there are processes.
            waiting = [asyncio.create_task(run(job_of(1, bytes([index])))) for index in range(3)]
            async with asyncio.timeout(60):
                while not preparer._turns.locked():
                    await asyncio.sleep(0)
                async with preparer.prepared(job_of(0)) as prompt:
                    assert prompt.image_ranges == [(1, 12)]
                    assert preparer._num_bytes == held
            assert not any(one.done() for one in waiting)
        async with asyncio.timeout(60):
            assert await asyncio.gather(*waiting) == [1, 1, 1]
        assert preparer._num_bytes == 0

    preparer = ImagePreparer(model_config, tokenizer, num_processes=2, max_bytes=1, timeout_s=60)
    try:
        asyncio.run(renders_beside_generations())
    finally:
        preparer.close()


def test_equal_prompts_are_prepared_once(model_config):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_config.model)
    ids = tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>")
    prompt_ids = np.array(ids, np.int32).tobytes()

    def job_of(name: str, salt: str | None = None) -> Job:
        image = Image(file_of(picture(56, 56, len(name))), name.encode())
        return Job(1, 1, prompt_ids, 1, len(ids), b"", salt, images=[image])

    async def prepared(job: Job) -> Prepared:
        async with preparer.prepared(job) as prompt:
            return prompt

    async def prepare_all() -> list[Prepared]:
        jobs = [job_of("one"), job_of("one"), job_of("one", "salt"), job_of("other")]
        async with asyncio.timeout(60):
            return [*await asyncio.gather(*map(prepared, jobs)), await prepared(job_of("one"))]

    preparer = ImagePreparer(
        model_config, tokenizer, num_processes=2, max_bytes=2**30, timeout_s=60
    )
    try:
        *equal, other, later = asyncio.run(prepare_all())
    finally:
        preparer.close()
    assert not preparer._held
    assert not preparer._num_users
    inputs = [one.engine_input for one in (*equal, later)]
    assert all(one["mm_kwargs"] is inputs[0]["mm_kwargs"] for one in inputs)
    assert other.engine_input["mm_hashes"] != inputs[0]["mm_hashes"]
    # Each counts; the time of the processes counts once.
    assert [one.num_images for one in (*equal, other, later)] == [1] * 5
    assert sum(one.elapsed_s > 0 for one in (*equal, later)) == 1


def test_groups_of_equal_prompts_are_prepared_at_once(model_config):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_config.model)
    running, most = 0, 0

    async def slow(job: object) -> Prepared:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.2)
        running -= 1
        return Prepared({}, bytes(4), [], 1, 0.2, 0.0, 1)

    most_held = 0

    async def prepared(name: bytes) -> None:
        nonlocal most_held
        job = Job(1, 1, bytes(4), 1, 1, b"", images=[Image(b"", name)])
        async with preparer.prepared(job):
            await asyncio.sleep(0.1)
            most_held = max(most_held, preparer._num_bytes)

    async def groups() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(prepared(name) for name in [b"a"] * 8 + [b"b"] * 8))

    preparer = ImagePreparer(model_config, tokenizer, num_processes=2, max_bytes=2**30)
    preparer._in_process = slow
    try:
        asyncio.run(groups())
    finally:
        preparer.close()
    assert most == 2
    # Of each group once.
    assert most_held == 2
