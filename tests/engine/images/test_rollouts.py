"""Rollouts with images, against a server of a vision-language model."""

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.images import encoded, picture
from tests.engine.images.conftest import TOLERANCE, Vision
from tests.kit.models import reference
from tests.kit.peers.rollout_client import RecordingClient
from titopool import Client, Rollout, TokenPipeline

SAMPLING = {"max_tokens": 8, "temperature": 1.0, "seed": 3}


@pytest.fixture
def opened() -> Iterator[Callable[[Client], Client]]:
    """`opened(client)` is closed at the test's end."""
    with ExitStack() as stack:
        yield stack.enter_context


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
    client.close()
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


# Qwen's tokens of an image: one of 28 by 28 pixels each.
SIDES = st.integers(1, 3)
IMAGES = st.lists(st.tuples(SIDES, SIDES), max_size=2)
MAX_IMAGES = 6


class Play:
    """A rollout, and what is known of it: the tokens of its images, its ids, who wrote them."""

    def __init__(self, rollout: Rollout, sizes: list, known: list, num_sampled: int):
        self.rollout, self.sizes, self.known = rollout, sizes, known
        self.num_sampled = num_sampled

    def branch(self) -> "Play":
        return Play(self.rollout.branch(), [*self.sizes], [*self.known], self.num_sampled)

    def ask(self, sizes: list) -> None:
        is_answered = self.rollout.messages[-1]["role"] == "assistant"
        if is_answered and len(self.sizes) + len(sizes) <= MAX_IMAGES:
            self.rollout.add(seeing(sizes))
            self.sizes += sizes

    def generate(self, model: Vision, max_tokens: int) -> None:
        """A turn, which may be cut: its prompt begins with all that was there before."""
        turn = self.rollout.generate(**{**sampling_for(model), "max_tokens": max_tokens})
        assert turn.prompt_ids[: len(self.known)].tolist() == self.known
        self.known = [*turn.prompt_ids.tolist(), *turn.ids.tolist()]
        self.num_sampled += len(turn.ids)

    def check(self, model: Vision) -> None:
        arrays = self.rollout.arrays()
        assert arrays.ids.tolist() == self.known
        assert arrays.loss_mask.sum() == self.num_sampled
        assert arrays.image_ranges[:, 1].tolist() == [
            rows * columns for rows, columns in self.sizes
        ]
        inside = np.zeros(len(arrays.ids), bool)
        for offset, length in arrays.image_ranges:
            inside[offset : offset + length] = True
        assert ((arrays.ids == placeholder_id(model)) == inside).all()
        assert not (inside & (arrays.loss_mask == 1)).any()


def seeing(sizes: list) -> dict:
    images = [picture(28 * columns, 28 * rows, rows) for rows, columns in sizes]
    parts = [{"type": "image", "image": encoded(image)} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}


@settings(
    max_examples=15, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    first=IMAGES,
    steps=st.lists(st.one_of(IMAGES, st.integers(1, 6), st.just("branch")), max_size=7),
    is_local=st.booleans(),
)
def test_any_conversation_with_images_only_grows(qwen: Vision, opened, first, steps, is_local):
    client = opened(RecordingClient(qwen.server.url))
    tokenizer = reference.vision_model(qwen.folder)[0].tokenizer if is_local else None
    rollout = Rollout(client, messages=[seeing(first)], tokenizer=tokenizer)
    plays = [Play(rollout, list(first), [], 0)]
    for step in steps:
        if step == "branch":
            plays.append(plays[-1].branch())
        elif isinstance(step, int):
            plays[-1].generate(qwen, step)
        else:
            plays[-1].ask(step)
    for play in plays:
        play.generate(qwen, 3)
        play.check(qwen)


def test_ids_with_placeholders_start_a_conversation(smol: Vision, opened):
    """Of a model that has no chat template."""
    client = opened(RecordingClient(smol.server.url))
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


def test_an_abort_before_the_images_are_placed_loses_nothing(qwen: Vision, opened):
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
        opened(Aborting(qwen.server.url)), messages=[asking("What?", picture(56, 56))],
        tokenizer=reference.vision_model(qwen.folder)[0].tokenizer,
    )  # fmt: skip
    short = len(rollout.ids)
    turn = rollout.generate(**sampling_for(qwen), num_resumes=1)
    assert len(turn.ids) == 8
    assert len(rollout.ids) == short + 3 + 8
    assert rollout.arrays().image_ranges.tolist() == [[rollout.arrays().image_ranges[0][0], 4]]


def test_text_and_images_of_one_batch(qwen: Vision, opened):
    """Prompts with and without images: conversations, text and ids."""
    processor, _ = reference.vision_model(qwen.folder)
    client = opened(RecordingClient(qwen.server.url))
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
            assert set(batch.input_ids[row, offset : offset + length].tolist()) == {place}
        assert (batch.input_ids[row] == place).sum() == sum(sizes)
