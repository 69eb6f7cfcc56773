"""Rollouts with images, against a server of a vision-language model."""

import base64
import io
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import torch

from tests import reference
from tests.images import encoded, picture
from tests.rollout_client import RecordingClient
from tests.vision.conftest import TOLERANCE, Vision
from titopool import Rollout, TokenPipeline

SAMPLING = {"max_tokens": 8, "temperature": 1.0, "seed": 3}


def placeholder_id(model: Vision) -> int:
    processor, _ = reference.vision_model(model.folder)
    name = "<|image_pad|>" if model.placeholder != "<image>" else "<image>"
    return processor.tokenizer.convert_tokens_to_ids(name)


def sampling_for(model: Vision) -> dict:
    """The server refuses a placeholder that the model has sampled."""
    return {**SAMPLING, "logit_bias": {str(placeholder_id(model)): -100.0}}


def asking(text: str, image=None) -> dict:
    part = {"type": "image"} if image is None else {"type": "image", "image": image}
    return {"role": "user", "content": [part, {"type": "text", "text": text}]}


def play(model: Vision, is_local: bool) -> tuple[Rollout, RecordingClient]:
    """Three turns, each with an image of another size."""
    client = RecordingClient(model.server.url)
    tokenizer = reference.vision_model(model.folder)[0].tokenizer if is_local else None
    rollout = Rollout(
        client, messages=[asking("What is it?")], images=[picture(56, 84, 1)], tokenizer=tokenizer
    )
    rollout.generate(**sampling_for(model))
    rollout.add(asking("And this?", encoded(picture(112, 56, 2))))
    rollout.generate(**sampling_for(model))
    # Two images before one turn, added one by one.
    rollout.add(asking("These?"), images=[picture(56, 56, 3)])
    rollout.add({"role": "user", "content": "No more."})
    rollout.generate(**sampling_for(model))
    return rollout, client


@pytest.fixture(scope="module", params=[True, False], ids=["local", "server"])
def played(qwen: Vision, request: pytest.FixtureRequest) -> tuple[Rollout, RecordingClient]:
    return play(qwen, request.param)


def test_images_of_several_turns_are_placed_once(qwen: Vision, played):
    rollout, client = played
    arrays = rollout.arrays()
    images = [PIL.Image.open(io.BytesIO(base64.b64decode(one))) for one in arrays.images]
    assert [image.size for image in images] == [(56, 84), (112, 56), (56, 56)]
    # Qwen's image of 28 by 28 pixels is one token.
    assert arrays.image_ranges[:, 1].tolist() == [2 * 3, 4 * 2, 2 * 2]
    place = placeholder_id(qwen)
    expected = np.zeros(len(arrays.ids), bool)
    for offset, length in arrays.image_ranges:
        expected[offset : offset + length] = True
    assert ((arrays.ids == place) == expected).all()
    assert not (expected & (arrays.loss_mask == 1)).any()
    assert arrays.loss_mask.sum() == 24
    # What was sampled, and the images before it, come back in later prompts.
    end = int(np.flatnonzero(arrays.loss_mask)[7]) + 1
    for prompt in client.prompts[1:]:
        assert prompt[:end] == arrays.ids[:end].tolist()


def test_local_and_server_s_rendering_agree(qwen: Vision):
    local, remote = (play(qwen, is_local)[0] for is_local in (True, False))
    assert local.ids.tolist() == remote.ids.tolist()
    assert local.arrays().images == remote.arrays().images
    assert (local.arrays().image_ranges == remote.arrays().image_ranges).all()


@torch.inference_mode()
def test_the_trainer_s_forward_pass_has_the_rollout_s_logprobs(qwen: Vision, played):
    arrays = played[0].arrays()
    processor, model = reference.vision_model(qwen.folder)
    images = [PIL.Image.open(io.BytesIO(base64.b64decode(one))) for one in arrays.images]
    pixels = processor.image_processor(images, return_tensors="pt")
    ids = torch.from_numpy(arrays.ids.astype(np.int64))[None]
    kinds = (ids == placeholder_id(qwen)).long()
    logits = model(
        input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **pixels
    ).logits[0, :-1]
    # As the sampler was told.
    logits[:, placeholder_id(qwen)] -= 100
    logprobs = torch.log_softmax(logits.double(), dim=-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    mask = arrays.loss_mask[1:] == 1
    assert np.abs(logprobs - arrays.logprobs[1:])[mask].max() < TOLERANCE


def test_ids_with_placeholders_start_a_conversation(smol: Vision):
    """Of a model that has no chat template."""
    client = RecordingClient(smol.server.url)
    rollout = Rollout(client, ids=smol.ids("Look: @ Now?"), images=[picture(30, 40)])
    turn = rollout.generate(**sampling_for(smol))
    before = rollout.ids.tolist()
    assert len(turn.prompt_ids) > len(smol.ids("Look: @ Now?"))
    rollout.add(ids=smol.ids(" And @?"), images=[picture(64, 20, 1)])
    rollout.generate(**sampling_for(smol))
    arrays = rollout.arrays()
    assert arrays.ids[: len(before)].tolist() == before
    place = placeholder_id(smol)
    inside = np.concatenate([np.arange(start, start + size) for start, size in arrays.image_ranges])
    assert set(np.flatnonzero(arrays.ids == place)) <= set(inside.tolist())
    assert arrays.loss_mask.sum() == 16


def test_an_abort_before_the_images_are_placed_loses_nothing(qwen: Vision):
    """The prompt comes back as it was sent, and its placeholder is expanded by the next request."""

    class Aborting(RecordingClient):
        def generate(self, prompts, **options):
            found = super().generate(prompts, **options)
            if len(self.prompts) == 1:
                (one,) = found
                empty = replace(
                    one.completions[0], ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32),
                    weight_versions=(), finish_reason="abort",
                )  # fmt: skip
                return [replace(one, prompt_ids=prompts[0], completions=(empty,), image_ranges=())]
            return found

    rollout = Rollout(
        Aborting(qwen.server.url), messages=[asking("What?", picture(56, 56))],
        tokenizer=reference.vision_model(qwen.folder)[0].tokenizer,
    )  # fmt: skip
    short = len(rollout.ids)
    turn = rollout.generate(**sampling_for(qwen), num_resumes=1)
    assert len(turn.ids) == 8
    assert len(rollout.ids) == short + 3 + 8
    assert rollout.arrays().image_ranges.tolist() == [[rollout.arrays().image_ranges[0][0], 4]]


def test_text_and_images_of_one_batch(qwen: Vision):
    """Prompts with and without images: conversations, text and ids."""
    processor, _ = reference.vision_model(qwen.folder)
    client = RecordingClient(qwen.server.url)
    pipeline = TokenPipeline(client, pad_id=0, tokenizer=processor.tokenizer)
    image = picture(112, 56, 5)
    prompts = [
        [asking("What?", image)], "No image.", qwen.text("@ and @"),
        processor(text=[qwen.text("Expanded: @")], images=[image])["input_ids"][0],
    ]  # fmt: skip
    images = [None, None, [image, picture(56, 56, 6)], [image]]
    batch = pipeline.generate(prompts, images=images, n=2, session_id="a", **sampling_for(qwen))
    assert [len(one) for one in batch.images[::2]] == [1, 0, 2, 1]
    # Ids that a processor has expanded come back as they went in.
    assert batch.prompt_ids[6][batch.prompt_mask[6] == 1].tolist() == list(prompts[3])
    place = placeholder_id(qwen)
    for row, ranges in enumerate(batch.image_ranges):
        sizes = [[8], [], [8, 4], [8]][row // 2]
        assert ranges[:, 1].tolist() == sizes
        for offset, length in ranges:
            found = batch.input_ids[row, offset : offset + length].tolist()
            assert set(found) == {place}, (
                row,
                ranges,
                batch.prompt_mask.sum(axis=1),
                batch.input_ids[row],
            )
        assert (batch.input_ids[row] == place).sum() == sum(sizes)
