"""The token pipeline: batches as GRPO takes them, with the ids that went in."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from harness.servers import Server
from tests.kit.models.chat_templates import tokenizer_of
from tests.kit.peers.rollout_client import Answer, RecordingClient, WritingClient, Written
from titopool import TokenPipeline, pad_rollouts
from titopool.conversations.interface import PromptChanged
from titopool.rollouts.sequence import arrays_of, sampled, written

PAD = 0
IDS = st.lists(st.integers(0, 9), min_size=1, max_size=6)
# Who wrote a segment, and its ids.
SEQUENCES = st.lists(
    st.lists(st.tuples(st.booleans(), IDS), min_size=1, max_size=4), min_size=1, max_size=5
)


def sequence(segments, **options):
    return arrays_of(
        tuple(
            sampled(Written(np.array(ids), weight_versions=[(7, 0)]))
            if is_sampled
            else written(ids)
            for is_sampled, ids in segments
        ),
        **options,
    )


@given(SEQUENCES)
def test_a_padded_batch_has_the_ids_and_masks_that_went_in(sequences):
    rows = [sequence(segments) for segments in sequences]
    batch = pad_rollouts(rows, PAD)
    assert not batch.is_cut.any()
    for index, row in enumerate(rows):
        assert batch.ids_of(index).tolist() == row.ids.tolist()
        length, rest = row.prompt_length, len(row.ids) - row.prompt_length
        # Padding stands on the left of prompts and on the right of completions.
        assert batch.prompt_mask[index].tolist() == sorted(batch.prompt_mask[index])
        assert batch.prompt_mask[index].sum() == length
        assert batch.completion_mask[index].tolist() == sorted(batch.completion_mask[index])[::-1]
        assert batch.completion_mask[index].sum() == rest
        for name in ("loss_mask", "logprobs", "weight_versions"):
            found, fill = getattr(batch, name)[index], -1 if name == "weight_versions" else 0
            assert found[:rest].tolist() == getattr(row, name)[length:].tolist()
            assert (found[rest:] == fill).all()
    assert batch.input_ids.shape == batch.attention_mask.shape
    for name, kind in {
        "prompt_ids": np.int32, "loss_mask": np.int8, "logprobs": np.float32, "weight_versions": np.int64
    }.items():  # fmt: skip
        assert getattr(batch, name).dtype == kind


def test_a_long_completion_is_cut_at_its_end_and_marked():
    long = [(False, [1, 2]), (True, [3, 4]), (False, [5]), (True, [6, 7])]
    batch = pad_rollouts([sequence(long), sequence(long[:2])], PAD, max_completion_tokens=4)
    assert batch.is_cut.tolist() == [True, False]
    assert batch.completion_ids.tolist() == [[3, 4, 5, 6], [3, 4, PAD, PAD]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1], [1, 1, 0, 0]]
    with_image = sequence(long, images=("aa",), ranges=((4, 1),))
    assert pad_rollouts([with_image], PAD, max_completion_tokens=3).is_cut.all()
    with pytest.raises(ValueError, match="expected no image in what is cut, got one in row 0"):
        pad_rollouts([with_image], PAD, max_completion_tokens=2)


def test_places_of_images_move_with_the_padding():
    rows = [
        sequence([(False, [1, 5, 5, 2]), (True, [3])], images=("aa",), ranges=((1, 2),)),
        sequence([(False, [1] * 6), (True, [3])]),
    ]
    batch = pad_rollouts(rows, PAD)
    ((offset, length),) = batch.image_ranges[0]
    assert batch.input_ids[0, offset : offset + length].tolist() == [5, 5]
    assert batch.image_ranges[0].dtype == np.int32
    assert batch.images == (("aa",), ())


def test_an_empty_batch_has_no_rows():
    assert pad_rollouts([], PAD).input_ids.shape == (0, 0)


def pipeline_of(client, **options) -> TokenPipeline:
    return TokenPipeline(client, pad_id=PAD, tokenizer=tokenizer_of("llama3"), **options)


def test_long_prompts_are_refused_or_lose_their_beginning():
    with pytest.raises(ValueError, match=r"prompts\[1\]: expected at most 3 tokens .* got 4"):
        pipeline_of(None, max_prompt_tokens=3).tokenize([[1, 2, 3], [1, 2, 3, 4]])
    cutting = pipeline_of(None, max_prompt_tokens=3, truncation="left")
    assert [one.ids.tolist() for one in cutting.tokenize([[1, 2], [1, 2, 3, 4]])] == [
        [1, 2],
        [2, 3, 4],
    ]
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected at most 3"):
        cutting.tokenize([[1, 2, 3, 4]], images=[["aa"]])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="truncation: expected refuse or left"):
        pipeline_of(None, truncation="right")
    with pytest.raises(ValueError, match="images: expected an entry for each of 1 prompts, got 2"):
        pipeline_of(None).tokenize([[1]], images=[None, None])


def test_other_ids_than_were_sent_are_an_error():
    class Cutting(WritingClient):
        def generate(self, prompts, **options):
            return [Answer(np.array(prompts[0][1:]), (Written(np.array([1])),))]

    with pytest.raises(PromptChanged, match=r"prompts\[0\]: expected the engine to get the 2 ids"):
        pipeline_of(Cutting([])).generate([[4, 5]])


@pytest.fixture
def client(single_server: Server) -> Iterator[RecordingClient]:
    with RecordingClient(single_server.url) as client:
        yield client


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "server"])
def test_text_chats_and_ids_of_one_batch(client, tiny_model: str, is_local: bool):
    """They are tokenized once, and the server's answer has the same ids."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    pipeline = TokenPipeline(client, pad_id=PAD, tokenizer=tokenizer if is_local else None)
    chat = [{"role": "user", "content": "Hello"}]
    prompts = ["def f(x):", chat, [9, 9, 9]]
    batch = pipeline.generate(prompts, n=2, max_tokens=6, temperature=1.0, seed=2, session_id="a")
    expected = [
        tokenizer("def f(x):")["input_ids"],
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False),
        [9, 9, 9],
    ]
    assert client.prompts == expected
    for row in range(6):
        sent = expected[row // 2]
        assert batch.prompt_ids[row][batch.prompt_mask[row] == 1].tolist() == sent
        assert batch.ids_of(row)[: len(sent)].tolist() == sent
    assert (batch.loss_mask == batch.completion_mask).all()
    assert (batch.logprobs[batch.loss_mask == 1] < 0).all()
    assert (batch.weight_versions[batch.loss_mask == 1] >= 0).all()
    again = client.generate(expected, n=2, max_tokens=6, temperature=1.0, seed=2, session_id="a")
    sampled_ids = [one.ids.tolist() for answer in again for one in answer.completions]
    rows = zip(batch.completion_ids, batch.completion_mask, strict=True)
    assert [ids[mask == 1].tolist() for ids, mask in rows] == sampled_ids


def test_a_client_is_asked_once_for_a_batch():
    calls = []

    def generate(prompts, **options):
        calls.append(options)
        return [Answer(one, (Written(np.array([1])),)) for one in prompts]

    client = SimpleNamespace(generate=generate)
    pipeline_of(client).generate([[1], [2]], images=[None, None], top_p=0.5)
    assert calls == [{"images": None, "n": 1, "top_p": 0.5}]
