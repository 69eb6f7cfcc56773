"""What a trainer takes of a session's tree."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import safetensors.numpy

from app.conversations.session_samples import SessionSample, ends_of, sample_of
from app.conversations.store import ExpertRows, Reason, Turn, TurnHead
from app.sessions.bodies import SamplesBody
from app.sessions.miles_samples import safetensors_of


def turn(
    number: int,
    parent: int | None,
    prompt: Sequence[int],
    ids: Sequence[int],
    *,
    reason: Reason = "",
    asked: str = "",
    request_id: str = "",
    versions: Sequence[tuple[int, int]] = ((0, 0),),
    engine_prompt: Sequence[int] = (),
    image_ranges: Sequence[tuple[int, int]] = (),
    experts: tuple[int, Sequence[int]] | None = None,
    end: str = "",
    mismatch: str | None = None,
) -> Turn:
    """`prompt`: after the parent's ids; `asked`: what the request asked, by default something of its own.
    The log-probability of an id is its negative tenth. `experts`: the first row, and the one expert of each."""
    head = TurnHead(
        reason=reason, path="/v1/chat/completions", request_id=request_id or f"r{number}", model="tiny", lora_version=None,
        began_s=0.0, ended_s=1.0, finish_reason=end or f"end {number}", weight_versions=list(versions),
        image_ranges=list(image_ranges), images=[b"image"] * len(image_ranges), mismatch=mismatch, message={},
        num_prompt=0, num_cached=0, num_sampled=len(ids),
        experts=None if experts is None else ExpertRows(experts[0], (len(experts[1]), 1, 1), "uint8"),
    )  # fmt: skip
    return Turn(
        number=number, parent=parent, head=head, short=b"[]", added=b"[]",
        asked=(asked or f"asked {number}").encode(), prompt=np.array(prompt, np.int32).tobytes(),
        ids=np.array(ids, np.int32).tobytes(), logprobs=(np.array(ids, np.float32) / -10).tobytes(),
        engine_prompt=np.array(engine_prompt, np.int32).tobytes(),
        experts=bytes(experts[1]) if experts else b"",
    )  # fmt: skip


def counted(sample: SessionSample) -> list[int]:
    """The ids that count for the loss."""
    return sample.ids[sample.loss_mask == 1].tolist()


def samples_of(turns: Sequence[Turn]) -> list[SessionSample]:
    """As a store with these turns has them."""

    def path_to(_: Any, number: int | None, columns: Any = ()) -> list[Turn]:
        if number is None:
            return []
        return [*path_to(_, turns[number].parent), turns[number]]

    for one in turns:
        sent = sum(len(known.prompt + known.ids) for known in path_to(None, one.number)) // 4
        whole = len(one.engine_prompt) // 4
        one.head.num_prompt = whole or sent - one.head.num_sampled
    store: Any = SimpleNamespace(
        path_to=path_to, images=lambda _, digests: [b"file " + one for one in digests]
    )
    session: Any = None
    return [sample_of(store, session, end) for end in ends_of(turns)]


def by_end(samples: Iterable[SessionSample]) -> dict[int, SessionSample]:
    return {one.turns[-1].number: one for one in samples}


def test_a_linear_conversation_is_one_sample():
    (sample,) = samples_of(
        [
            turn(0, None, [1, 2], [10, 11], reason="first", versions=[(3, 0)]),
            turn(1, 0, [4], [12, 13, 14], versions=[(3, 0), (4, 2)]),
            turn(2, 1, [5, 6], [15]),
        ]
    )
    fields: dict[str, Any] = sample.fields()
    assert fields.pop("ids").tolist() == [1, 2, 10, 11, 4, 12, 13, 14, 5, 6, 15]
    assert fields.pop("loss_mask").tolist() == [0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1]
    values = fields.pop("logprobs")
    assert values.dtype == np.float32
    assert np.allclose(values, [0, 0, -1, -1.1, 0, -1.2, -1.3, -1.4, 0, 0, -1.5])
    assert fields == {
        "turns": [0, 1, 2],
        "reasons": ["first", "", ""],
        "was_retried": False,
        "prompt_length": 2,
        # The index in `ids` of the first token of each.
        "weight_versions": [[3, 2], [3, 5], [4, 7], [0, 10]],
        "finish_reasons": ["end 0", "end 1", "end 2"],
        "models": ["tiny"] * 3,
        "lora_versions": [None] * 3,
        "image_ranges": [],
        "images": [],
        "routed_experts": None,
    }


def test_a_turn_of_several_samples_counts_in_the_last_one():
    samples = samples_of(
        [
            turn(0, None, [1], [10], reason="first"),
            turn(1, 0, [2], [11]),
            turn(2, 0, [3], [12], reason="fork"),
            turn(3, 2, [4], [13]),
            turn(4, None, [9], [19], reason="system"),
        ]
    )
    assert [one.turns[-1].number for one in samples] == [1, 3, 4]
    assert [counted(one) for one in samples] == [[11], [10, 12, 13], [19]]
    assert [one.ids.tolist() for one in samples] == [[1, 10, 2, 11], [1, 10, 3, 12, 4, 13], [9, 19]]
    # Those that count elsewhere have their log-probabilities here too.
    assert np.allclose(samples[0].logprobs, [0, -1, 0, -1.1])
    assert not any(one.was_retried for one in samples)


def test_an_answer_that_was_asked_for_again_was_retried():
    samples = by_end(
        samples_of(
            [
                turn(0, None, [1], [10], reason="first"),
                turn(1, 0, [2], [11], asked="more"),
                turn(2, 0, [2], [12], reason="retry", asked="more"),
                turn(3, 2, [3], [13], asked="most"),
                turn(4, 2, [3], [14], reason="retry", asked="most"),
            ]
        )
    )
    assert {end: one.was_retried for end, one in samples.items()} == {1: True, 3: True, 4: False}
    # What is not trained on takes no turn away from what is.
    assert {end: counted(one) for end, one in samples.items()} == {
        1: [11], 3: [13], 4: [10, 12, 14],
    }  # fmt: skip


def test_of_equal_requests_the_answer_that_was_gone_on_from_is_the_one_to_train_on():
    samples = by_end(
        samples_of(
            [
                turn(0, None, [1], [10], reason="first", asked="hello"),
                turn(1, None, [1], [11], reason="retry", asked="hello"),
                # The client went back to the first answer.
                turn(2, 0, [2], [12]),
            ]
        )
    )
    assert {end: one.was_retried for end, one in samples.items()} == {1: True, 2: False}
    assert {end: counted(one) for end, one in samples.items()} == {1: [11], 2: [10, 12]}


def test_choices_are_samples_of_their_own():
    samples = samples_of(
        [
            turn(0, None, [1], [10], reason="first", asked="hello", request_id="a"),
            turn(1, None, [1], [11], reason="choice", asked="hello", request_id="a"),
        ]
    )
    assert [counted(one) for one in samples] == [[10], [11]]
    assert not any(one.was_retried for one in samples)


def test_images_are_expanded_as_the_engine_got_them():
    image = 99
    (sample,) = samples_of(
        [
            turn(0, None, [1, image, 2], [10, 11], reason="first", engine_prompt=[1, image, image, image, 2],
                 image_ranges=[(1, 3)], versions=[(5, 0)]),
            turn(1, 0, [3, image], [12], image_ranges=[(1, 3), (8, 2)], versions=[(6, 0)],
                 engine_prompt=[1, image, image, image, 2, 10, 11, 3, image, image]),
        ]
    )  # fmt: skip
    assert sample.ids.tolist() == [1, 99, 99, 99, 2, 10, 11, 3, 99, 99, 12]
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert np.allclose(sample.logprobs, [0, 0, 0, 0, 0, -1, -1.1, 0, 0, 0, -1.2])
    fields = sample.fields()
    assert fields["weight_versions"] == [[5, 5], [6, 10]]
    assert fields["image_ranges"] == [(1, 3), (8, 2)]
    assert fields["images"] == [b"file image", b"file image"]
    assert sample.prompt_length == 5


def test_a_session_without_turns_has_no_samples():
    assert samples_of([]) == []


@pytest.mark.parametrize(
    ("turns", "rows"),
    [
        pytest.param(
            [(0, [1, 2, 3]), (3, [4, 5, 6])], [1, 2, 3, 4, 5, 6], id="of each turn its own"
        ),
        pytest.param([(0, [9, 9, 9]), (0, [1, 2, 3, 4, 5, 6])], [1, 2, 3, 4, 5, 6], id="all again"),
        pytest.param(
            [None, (0, [1, 2, 3, 4, 5, 6])], [1, 2, 3, 4, 5, 6], id="a later turn brings all"
        ),
        pytest.param([None, (3, [4, 5, 6])], None, id="none of a turn"),
        pytest.param([(0, [1, 2, 3]), None], None, id="none of the last turn"),
        pytest.param([(0, [1, 2, 3]), (3, [4])], None, id="too few, as the turn was aborted"),
        pytest.param([(0, [1, 2]), (3, [4, 5, 6])], None, id="a gap"),
    ],
)
def test_routed_experts_are_of_all_ids_but_the_last(turns, rows):
    first, second = turns
    (sample,) = samples_of(
        [
            turn(0, None, [1, 2], [10, 11], reason="first", experts=first),
            turn(1, 0, [3], [12, 13], experts=second),
        ]
    )
    found = sample.routed_experts
    assert (found and list(found.data)) == rows
    assert found is None or (found.shape, found.start) == ((6, 1, 1), 0)


def of_miles(turns: Sequence[Turn], max_seq_len: int | None = None) -> list[dict[str, Any]]:
    """What its trainer reads of samples."""
    body = SamplesBody(max_seq_len=max_seq_len, metadata={"leaf": "mine", "task": 17})
    parts = safetensors_of(lambda: iter(samples_of(turns)), body, {}, str, str)
    tensors = safetensors.numpy.load(b"".join(parts))
    samples: list[dict[str, Any]] = orjson.loads(tensors["_samples_meta"].tobytes())["samples"]
    for index, sample in enumerate(samples):
        sample["tokens"] = tensors[f"tokens.{index}"].tolist()
        sample["loss_mask"] = tensors[f"loss_mask.{index}"].tolist()
    return samples


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("stop", "completed"), ("tool_calls", "completed"), ("length", "truncated"), ("abort", "aborted"),
        ("error", "failed"),
    ],
)  # fmt: skip
def test_miles_status_is_that_of_the_last_turn(end: str, status: str):
    (sample,) = of_miles([turn(0, None, [1], [10], end="length"), turn(1, 0, [2], [11], end=end)])
    assert (sample["status"], sample["tokens"]) == (status, [1, 10, 2, 11])


@pytest.mark.parametrize(
    ("max_seq_len", "tokens", "versions", "prompts", "status"),
    [
        (8, [1, 2, 10, 11, 3, 12, 13], ["3", "4", "9"], 7, "completed"),
        (6, [1, 2, 10, 11, 3, 12], ["3", "4"], 7, "truncated"),
        (5, [1, 2, 10, 11], ["3"], 2, "completed"),
        (3, [1, 2, 10], ["3"], 2, "truncated"),
    ],
)
def test_what_miles_does_not_take_counts_nowhere(max_seq_len, tokens, versions, prompts, status):
    (sample,) = of_miles(
        [
            turn(0, None, [1, 2], [10, 11], versions=[(3, 0)], end="stop", mismatch="first"),
            turn(1, 0, [3], [12, 13], versions=[(4, 0), (9, 1)], end="stop", mismatch="second"),
        ],
        max_seq_len,
    )
    assert (sample["tokens"], sample["weight_versions"]) == (tokens, versions)
    assert (sample["status"], sample["response_length"]) == (status, len(tokens) - 2)
    assert sample["prefix_cache_info"] == {"cached_tokens": 0, "total_prompt_tokens": prompts}
    found = [one["detail"] for one in sample["metadata"]["tito_session_mismatch"]]
    assert found == ["first", "second"][: 1 + (prompts > 2)]
    assert sample["metadata"]["leaf"]["path_node_ids"] == [0, 1]


def test_a_turn_without_a_token_is_no_sample_of_miles():
    assert of_miles([turn(0, None, [1, 2], [], end="abort")]) == []
