"""Rollouts with the chat templates of model families; completions are written by the tests."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.servers import REPOSITORY, environment
from tests.kit.models.chat_templates import ADDED, END_OF_TURN, TEMPLATES, tokenizer_of
from tests.kit.peers.rollout_client import WritingClient, Written, written
from titopool.conversations.interface import ContextFull, HistoryRewritten, PromptChanged
from titopool.rollouts.rollout import Rollout

USER = {"role": "user", "content": " Why?\n"}
TOOL = {"role": "tool", "content": "42"}
NEXT = {"role": "user", "content": "And then?"}
TOKENIZERS = {family: tokenizer_of(family) for family in TEMPLATES}


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def start(family: str, *texts: str | Written, **options):
    """A rollout whose completions are `texts`, its client and the tokenizer."""
    tokenizer = tokenizer_of(family)
    completions = [one if isinstance(one, Written) else written(tokenizer, one) for one in texts]
    client = WritingClient(completions)
    return Rollout(client, messages=[USER], tokenizer=tokenizer, **options), client, tokenizer


def texts_of(rollout: Rollout, tokenizer) -> list[tuple[str, bool]]:
    """The text of each run of tokens with one author, and whether the model wrote it."""
    arrays = rollout.arrays()
    ends = [*(np.flatnonzero(np.diff(arrays.loss_mask)) + 1), len(arrays.ids)]
    starts = [0, *ends[:-1]]
    return [
        (tokenizer.decode(arrays.ids[start:end].tolist()), bool(arrays.loss_mask[start]))
        for start, end in zip(starts, ends, strict=True)
    ]


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3", "phi3"])
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize("new", [[NEXT], [TOOL], [TOOL, TOOL]], ids=["user", "tool", "tools"])
def test_a_turn_is_followed_by_what_the_template_writes_after_it(
    family: str, ends: bool, new: list
):
    """The whole conversation is the template's text, and only the turns count for the loss."""
    end = END_OF_TURN[family]
    first = "Because." + (end if ends else "")
    rollout, client, tokenizer = start(family, first, "So." + end)
    rollout.generate()
    rollout.add(new)
    rollout.generate()
    messages = [USER, {"role": "assistant", "content": "Because."}, *new]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert client.prompts[1] == encode(tokenizer, prompt)
    parts = texts_of(rollout, tokenizer)
    assert [text for text, is_sampled in parts if is_sampled] == [first, "So." + end]
    assert "".join(text for text, _ in parts) == prompt + "So." + end
    if not ends:
        assert parts[2][0].startswith(end)


def test_sampled_ids_stay_where_the_tokenizer_would_merge_them():
    rollout, client, tokenizer = start(
        "qwen2.5", Written(np.array([74, 71, 78, 78, 81, 2], np.int32))
    )
    turn = rollout.generate()
    assert encode(tokenizer, tokenizer.decode(turn.ids.tolist())) != turn.ids.tolist()
    client.completions = [written(tokenizer, "So.")]
    before = rollout.ids.tolist()
    rollout.add(NEXT)
    rollout.generate()
    assert client.prompts[1][: len(before)] == before
    assert before[-6:] == [74, 71, 78, 78, 81, 2]
    assert rollout.arrays(tokenizer).num_drifted > 0
    assert rollout.arrays().num_drifted is None


def test_arrays_have_an_author_a_logprob_and_a_version_for_each_token():
    rollout, _, tokenizer = start(
        "llama3", written(tokenizer_of("llama3"), "Because of it", weight_versions=((3, 0), (4, 2)))
    )
    prompt = rollout.ids
    turn = rollout.generate(max_tokens=5)
    new = rollout.add(NEXT)
    arrays = rollout.arrays()
    sampled = slice(len(prompt), len(prompt) + len(turn.ids))
    assert arrays.prompt_length == len(prompt)
    assert arrays.ids.tolist() == [*prompt, *turn.ids, *new]
    assert (arrays.ids.dtype, arrays.logprobs.dtype) == (np.int32, np.float32)
    assert arrays.attention_mask.tolist() == [1] * len(arrays.ids)
    assert arrays.loss_mask.nonzero()[0].tolist() == list(range(sampled.start, sampled.stop))
    assert arrays.logprobs[sampled].tolist() == turn.logprobs.tolist()
    assert arrays.logprobs.sum() == turn.logprobs.sum()
    versions = [3, 3, *[4] * (len(turn.ids) - 2)]
    assert arrays.weight_versions.tolist() == [-1] * len(prompt) + versions + [-1] * len(new)
    assert rollout.messages[1]["content"] == "Because of it"
    assert tokenizer.decode(new.tolist()).startswith("<|eot_id|><|start_header_id|>user")


@pytest.mark.parametrize(
    ("family", "first", "new", "options"),
    [
        pytest.param("qwen3", "<think>\nHm.\n</think>\n\nYes.", NEXT, {}, id="thinking-dropped"),
        pytest.param("r1", "Hm.</think>Yes.", NEXT, {}, id="thinking-never-rendered"),
        pytest.param(
            "qwen3", "Yes.", TOOL, {"chat_template_kwargs": {"enable_thinking": False}},
            id="empty-thought-of-the-prompt",
        ),
    ],
)  # fmt: skip
def test_a_template_that_rewrites_history_is_refused(family, first, new, options):
    rollout, _, _ = start(family, first + END_OF_TURN[family], **options)
    rollout.generate()
    before = rollout.ids.tolist()
    with pytest.raises(HistoryRewritten, match="expected a chat template that renders"):
        rollout.add(new)
    # Nothing has changed, so the rollout can be used for training.
    assert rollout.ids.tolist() == before


def test_thinking_before_a_tool_s_answer_stays():
    rollout, client, tokenizer = start("qwen3", "<think>\nHm.\n</think>\n\nCall.<|im_end|>", "Yes.")
    rollout.generate()
    rollout.add(TOOL)
    rollout.generate()
    assert "Hm.\n</think>\n\nCall.<|im_end|>\n<|im_start|>user" in tokenizer.decode(
        client.prompts[1]
    )


def test_a_rewrite_begins_a_sequence_with_its_own_mask():
    first = "<think>\nHm.\n</think>\n\nYes.<|im_end|>"
    rollout, client, tokenizer = start("qwen3", first, "Then.<|im_end|>", on_rewrite="branch")
    rollout.generate()
    ended = rollout.arrays()
    rollout.add(NEXT)
    rollout.generate()
    assert "Hm." not in tokenizer.decode(client.prompts[1])
    assert "Yes.<|im_end|>\n<|im_start|>user\nAnd then?" in tokenizer.decode(client.prompts[1])
    old, new = rollout.sequences()
    assert old.ids.tolist() == ended.ids.tolist()
    assert old.loss_mask.tolist() == ended.loss_mask.tolist()
    assert texts_of(rollout, tokenizer)[1] == ("Then.<|im_end|>", True)
    assert new.prompt_length == len(client.prompts[1])


def test_a_rewrite_may_be_ignored():
    first = "<think>\nHm.\n</think>\n\nYes.<|im_end|>"
    rollout, client, tokenizer = start("qwen3", first, "Then.<|im_end|>", "x", on_rewrite="keep")
    for message in (NEXT, NEXT):
        rollout.generate()
        before = rollout.ids.tolist()
        rollout.add(message)
        assert rollout.ids.tolist()[: len(before)] == before
    rollout.generate()
    assert "Hm.\n</think>\n\nYes.<|im_end|>\n<|im_start|>user" in tokenizer.decode(
        client.prompts[2]
    )


def test_another_end_of_turn_is_not_followed_by_the_template_s():
    first = "Call.<|eom_id|>"
    rollout, client, tokenizer = start("llama3", first, "x")
    other, other_client, _ = start(
        "llama3", first, "x", end_of_turn_ids=[encode(tokenizer, "<|eom_id|>")[0]]
    )
    for one in (rollout, other):
        one.generate()
        one.add(TOOL)
        one.generate()
    assert "<|eom_id|><|eot_id|><|start" in tokenizer.decode(client.prompts[1])
    assert "<|eom_id|><|start" in tokenizer.decode(other_client.prompts[1])


def test_messages_added_one_by_one_are_rendered_together():
    together, _, tokenizer = start("qwen2.5", "Call.<|im_end|>")
    single, _, _ = start("qwen2.5", "Call.<|im_end|>")
    together.generate()
    single.generate()
    together.add([TOOL, TOOL, NEXT])
    for message in (TOOL, TOOL, NEXT):
        single.add(message)
    assert single.ids.tolist() == together.ids.tolist()
    assert single.messages == together.messages
    assert tokenizer.decode(single.ids.tolist()).count("<|im_start|>user") == 3


def test_messages_added_before_the_first_turn_belong_to_the_prompt():
    rollout, _, tokenizer = start("llama3")
    rollout.add(NEXT)
    text = tokenizer.apply_chat_template([USER, NEXT], tokenize=False, add_generation_prompt=True)
    assert rollout.ids.tolist() == encode(tokenizer, text)
    assert rollout.messages == [USER, NEXT]


def test_ids_start_a_conversation_and_go_on_in_messages():
    tokenizer = tokenizer_of("qwen2.5")
    client = WritingClient([written(tokenizer, "Yes.<|im_end|>"), written(tokenizer, "x")])
    rollout = Rollout(client, ids=[5, 6, 7], tokenizer=tokenizer)
    with pytest.raises(ValueError, match="call generate first"):
        rollout.add(NEXT)
    rollout.generate()
    new = rollout.add(NEXT)
    assert tokenizer.decode(new.tolist()) == (
        "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    )
    rollout.generate()
    rollout.add(ids=[9, 9])
    assert rollout.ids.tolist()[-2:] == [9, 9]
    assert rollout.arrays().loss_mask[-2:].tolist() == [0, 0]


def test_branches_share_a_prefix_and_nothing_else():
    rollout, client, tokenizer = start("llama3", "Because.<|eot_id|>", "One.", "Two.")
    rollout.generate()
    other = rollout.branch()
    prefix = rollout.ids.tolist()
    rollout.add(NEXT)
    rollout.generate()
    assert other.ids.tolist() == prefix
    other.add(TOOL)
    other.generate()
    assert client.prompts[2][: len(prefix)] == prefix
    assert [texts_of(one, tokenizer)[-1] for one in (rollout, other)] == [
        ("One.", True),
        ("Two.", True),
    ]
    assert (
        rollout.arrays().loss_mask[: len(prefix)].tolist()
        == other.arrays().loss_mask[: len(prefix)].tolist()
    )


def test_a_turn_goes_on_after_an_abort():
    tokenizer = tokenizer_of("qwen2.5")
    parts = [
        written(tokenizer, "Be", "abort", weight_versions=((1, 0),)),
        Written(np.zeros(0, np.int32), "abort", ()),
        written(tokenizer, "cause.<|im_end|>", weight_versions=((2, 0),)),
    ]
    client = WritingClient(parts)
    rollout = Rollout(client, messages=[USER], tokenizer=tokenizer)
    prompt = rollout.ids.tolist()
    turn = rollout.generate(max_tokens=9, num_resumes=5, seed=7)
    assert turn.finish_reason == "stop"
    begun = encode(tokenizer, "Be")
    assert client.prompts == [prompt, prompt + begun, prompt + begun]
    assert [one["max_tokens"] for one in client.calls] == [9, 9 - len(begun), 9 - len(begun)]
    assert len({one["seed"] for one in client.calls}) == 3
    assert turn.prompt_ids.tolist() == prompt
    assert turn.ids.tolist() == begun + encode(tokenizer, "cause.<|im_end|>")
    assert set(turn.weight_versions.tolist()) == {1, 2}
    assert rollout.messages[-1]["content"] == "Because."


def test_a_full_context_is_refused_and_nothing_is_cut():
    rollout, client, _ = start("llama3", "Because.", "x")
    length = len(rollout.ids)
    rollout, client, _ = start("llama3", "Because.", "x", max_context=length + 12)
    rollout.generate(max_tokens=50)
    assert client.calls[0]["max_tokens"] == 12
    before = rollout.ids.tolist()
    with pytest.raises(ContextFull, match=rf"at most {length + 11} tokens.* max_context, got"):
        rollout.add({"role": "user", "content": "a b c d e f g h"})
    assert rollout.ids.tolist() == before
    assert rollout.messages[-1]["role"] == "assistant"
    with pytest.raises(ContextFull):
        start("llama3", "x", max_context=length)[0].generate()


def test_a_prompt_that_the_server_changed_is_an_error():
    class Cutting(WritingClient):
        def generate(self, prompts, **options):
            return super().generate([prompts[0][1:]], **options)

    tokenizer = tokenizer_of("llama3")
    rollout = Rollout(Cutting([written(tokenizer, "x")]), messages=[USER], tokenizer=tokenizer)
    with pytest.raises(PromptChanged, match="the first 0 are equal"):
        rollout.generate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected messages or ids"),
        ({"ids": [[1]]}, "ids: expected a list of integers"),
        ({"ids": [1.5]}, "ids: expected a list of integers"),
        ({"ids": [-1]}, "ids: expected a list of integers"),
        ({"ids": [1], "on_rewrite": "no"}, "on_rewrite: expected raise, branch or keep"),
        ({"messages": [USER], "images": ["aa"]}, "got 1 too many"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "got too few"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Rollout(WritingClient([]), tokenizer=tokenizer_of("qwen2.5"), **arguments)


def test_rollouts_need_neither_torch_nor_the_server():
    blocked = ("torch", "vllm", "flask", "gevent", "transformers")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from titopool import Rollout"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment(), cwd=REPOSITORY, timeout=60
    )


IDS = st.lists(st.integers(0, 2047 + len(ADDED)), max_size=12)


@settings(max_examples=150)
@given(
    family=st.sampled_from(["qwen2.5", "llama3", "phi3"]),
    turns=st.lists(
        st.tuples(IDS, st.sampled_from(["", *END_OF_TURN.values()])), min_size=1, max_size=4
    ),
    contents=st.lists(st.text(max_size=12), min_size=4, max_size=4),
)
def test_any_sampled_ids_stay_and_are_no_rewrite(family, turns, contents):
    """Also special tokens and pieces of characters, whose text is tokenized to other ids."""
    tokenizer = TOKENIZERS[family]
    client = WritingClient(
        [Written(np.array(ids + encode(tokenizer, end), np.int32)) for ids, end in turns]
    )
    rollout = Rollout(client, messages=[USER], tokenizer=tokenizer)
    before: list[int] = []
    for (ids, end), content in zip(turns, contents, strict=False):
        rollout.generate()
        assert client.prompts[-1][: len(before)] == before
        before = rollout.ids.tolist()
        written_ids = ids + encode(tokenizer, end)
        assert before == client.prompts[-1] + written_ids
        new = rollout.add({"role": "user", "content": content})
        # One end of a turn, which the model or the template has written.
        text = END_OF_TURN[family] + ("" if family == "llama3" else "\n")
        closing, *newline = encode(tokenizer, text)
        is_closed = written_ids[-1:] == [closing] or written_ids[-2:] == [closing, *newline]
        assert (new[0] == closing) != is_closed or len(new) == 0
