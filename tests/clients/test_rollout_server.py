"""Rollouts against a real server."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from app.inputs.chat_messages import read_conversation
from app.inputs.chat_template import Chat, render_all
from app.inputs.tools import normalized_tools
from harness.servers import Server
from tests.kit.models import reference
from tests.kit.models.chat_templates import TEMPLATES, tokenizer_of
from tests.kit.peers.rollout_client import RecordingClient
from titopool import Rollout, run_rollouts
from titopool.conversations.templates import LocalTemplate
from titopool.rollouts.tools import schemas_of

USER = {"role": "user", "content": "Tell me more about it."}
END_OF_TURN = 2
TOLERANCE = 1e-3
VOCABULARY = 2048


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def client(single_server: Server) -> Iterator[RecordingClient]:
    with RecordingClient(single_server.url) as client:
        yield client


def look_up(word: str, limit: int = 3) -> str:
    """Looks a word up.

    Args:
        word: The word.
        limit: How many meanings.
    """
    return f"{word} {limit}"


CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"word": "ü"}'},
}
PARTS = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
CONVERSATIONS = {
    "plain": [USER],
    "system": [{"role": "system", "content": " Be brief.\n"}, USER],
    "parts": [{"role": "user", "content": PARTS}],
    "tools": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": PARTS, "tool_call_id": "a"},
    ],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("is_prompt", [True, False])
def test_a_local_template_renders_as_the_server_does(family: str, name: str, is_prompt: bool):
    """The functions of the render route, in this process."""
    messages, tokenizer = CONVERSATIONS[name], tokenizer_of(family)
    tools = schemas_of([look_up])
    chat = Chat(
        read_conversation(messages, "messages").messages, "messages", normalized_tools(tools), {},
        is_prompt,
    )  # fmt: skip
    (expected,) = render_all(tokenizer, [chat], 4096)
    rollout = Rollout(None, messages=messages, tokenizer=tokenizer, tools=tools)
    assert (
        LocalTemplate(tokenizer, tools).render(rollout.messages, (), is_prompt=is_prompt).tolist()
        == expected
    )
    if is_prompt:
        assert rollout.ids.tolist() == expected


def test_the_server_s_render_route_gives_the_ids_of_a_local_tokenizer(client, tokenizer):
    options = {"seed": 4, "max_tokens": 20, "temperature": 1.0}
    local, remote = (
        Rollout(client, messages=[USER], tokenizer=one, tools=schemas_of([look_up]))
        for one in (tokenizer, None)
    )
    for bias in ({}, {str(END_OF_TURN): 30.0}):
        for rollout in (local, remote):
            rollout.generate(**options, stop_token_ids=[END_OF_TURN], logit_bias=bias)
            rollout.add([{"role": "tool", "content": "42"}, USER])
        assert local.ids.tolist() == remote.ids.tolist()
    assert local.messages == remote.messages
    assert local.arrays().loss_mask.tolist() == remote.arrays().loss_mask.tolist()


# A turn may be cut, end itself, and hold ids that no tokenizer would write for its text.
TURNS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24), "seed": st.integers(0, 2**31)},
    optional={"logit_bias": st.just({str(END_OF_TURN): 6.0}), "temperature": st.just(2.0)},
)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
MESSAGES = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "tool", "system"]), TEXTS,
)  # fmt: skip
STEPS = st.lists(
    st.one_of(
        TURNS,
        st.lists(MESSAGES, min_size=1, max_size=2),
        st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=9).map(tuple),
        st.just("branch"),
    ),
    min_size=1, max_size=7,
)  # fmt: skip


class Author:
    """A rollout, and what its tokens and their authors should be."""

    def __init__(self, rollout: Rollout, tokens: list[tuple[int, bool]]):
        self.rollout, self.tokens = rollout, tokens

    def step(self, step: Any) -> None:
        """Each step appends; the rest was there before."""
        if isinstance(step, dict):
            prompt = self.rollout.ids.tolist()
            turn = self.rollout.generate(stop_token_ids=[END_OF_TURN], **step)
            assert turn.prompt_ids.tolist() == prompt == self.rollout.client.prompts[-1]
            self.tokens += [(token, True) for token in turn.ids.tolist()]
        elif isinstance(step, tuple):
            self.rollout.add(ids=step)
            self.tokens += [(token, False) for token in step]
        elif self.rollout.last_turn is not None:
            before = len(self.rollout.ids)
            is_open = self.rollout.messages[-1]["role"] == "assistant"
            if is_open:
                self.rollout.add(step)
                self.tokens += [(token, False) for token in self.rollout.ids[before:].tolist()]

    def check(self) -> None:
        arrays = self.rollout.arrays()
        ids, mask = [token for token, _ in self.tokens], [int(one) for _, one in self.tokens]
        assert (arrays.ids.tolist(), arrays.loss_mask.tolist()) == (ids, mask)
        assert ((arrays.logprobs != 0) == (arrays.loss_mask == 1)).all()
        assert ((arrays.weight_versions >= 0) == (arrays.loss_mask == 1)).all()


@settings(
    max_examples=25, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    begin=st.one_of(
        st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=12),
        st.lists(MESSAGES, min_size=1, max_size=2).map(tuple),
    ),
    steps=STEPS,
)
def test_every_prompt_begins_with_the_turn_before_it(client, tokenizer, begin, steps):
    """Any conversation: random ids, cut turns, branches, messages and ids of an environment."""
    is_chat = isinstance(begin, tuple)
    rollout = Rollout(client, **{"messages" if is_chat else "ids": begin}, tokenizer=tokenizer)
    authors = [Author(rollout, [(token, False) for token in rollout.ids.tolist()])]
    for step in steps:
        if step == "branch":
            authors.append(Author(authors[-1].rollout.branch(), list(authors[-1].tokens)))
        else:
            authors[-1].step(step)
        for author in authors:
            author.check()


def text_path(client: RecordingClient, messages: list, num_turns: int, **options: Any):
    """The prompts of a conversation whose turns are sent as text, and the ids of the turns."""
    turns = []
    for _ in range(num_turns):
        prompt = client.render(messages)
        ((completion,),) = [one.completions for one in client.generate([prompt], **options)]
        text = client.detokenize(completion.ids.tolist()).removesuffix("<|im_end|>")
        turns.append((prompt, completion.ids))
        messages = [*messages, {"role": "assistant", "content": text}, USER]
    return turns


def num_lost(turns: list, prompts: list) -> int:
    """How many prompts do not begin with the prompt before them and its completion."""
    befores = [[*prompt, *ids] for prompt, ids in turns]
    return sum(
        list(prompt[: len(before)]) != before
        for before, prompt in zip(befores, prompts[1:], strict=False)
    )


def test_the_text_path_drifts_and_the_token_path_does_not(client, tokenizer):
    """Of four later turns each: the text path loses ids of all, the token path of none."""
    options = {"max_tokens": 24, "temperature": 1.0, "seed": 5, "session_id": "drift"}
    turns = text_path(client, [USER], 5, **options)
    rollout = Rollout(client, messages=[USER], tokenizer=tokenizer, session_id="drift")
    client.prompts = []
    played = []
    for _ in range(5):
        turn = rollout.generate(max_tokens=24, temperature=1.0, seed=5)
        played.append((turn.prompt_ids, turn.ids))
        rollout.add(USER)
    assert np.array_equal(played[0][1], turns[0][1])
    assert num_lost(turns, [prompt for prompt, _ in turns]) == 4
    assert num_lost(played, client.prompts) == 0
    arrays = rollout.arrays(tokenizer)
    sampled = int(arrays.loss_mask.sum())
    assert sampled == 120
    # What the text path would do to the ids of the token path.
    assert arrays.num_drifted is not None
    assert sampled // 10 < arrays.num_drifted < sampled
    print(f"{arrays.num_drifted} of {sampled} sampled tokens change when their text is tokenized")


@torch.inference_mode()
def test_the_trainer_s_forward_pass_has_the_rollout_s_logprobs(client, tokenizer, tiny_model):
    def environment(rollout):
        return USER

    rollouts = run_rollouts(
        client, [[USER], [5, 6, 7]], environment=environment, n=2, max_turns=4, seed=1,
        tokenizer=tokenizer, max_tokens=20, temperature=1.0,
    )  # fmt: skip
    for rollout in rollouts:
        assert rollout.error is None
        arrays = rollout.arrays()
        ids = torch.from_numpy(arrays.ids.astype(np.int64))[None]
        logits = reference.reference_model(tiny_model)(ids).logits[0, :-1].double()
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        mask = arrays.loss_mask[1:] == 1
        assert mask.sum() == sum(arrays.loss_mask) > 60
        assert np.abs(logprobs - arrays.logprobs[1:])[mask].max() < TOLERANCE
        assert (arrays.weight_versions[arrays.loss_mask == 1] == arrays.weight_versions.max()).all()


def test_a_rollout_goes_on_after_an_abort(single_server: Server, client, tokenizer):
    """`/abort_requests` ends the turn in flight; the turn goes on from its ids."""
    num_aborted = []

    def abort() -> None:
        while not num_aborted and not is_over.is_set():
            answer = single_server.post("/abort_requests", {"request_ids": ["to-abort"]})
            if answer.json()["aborted"]:
                num_aborted.append(answer.json()["aborted"])

    is_over = threading.Event()
    aborting = threading.Thread(target=abort)
    aborting.start()
    rollout = Rollout(client, messages=[USER], tokenizer=tokenizer)
    (played,) = run_rollouts(
        client, [[USER]], tokenizer=tokenizer, max_tokens=400, ignore_eos=True,
        request_id="to-abort",
    )  # fmt: skip
    is_over.set()
    aborting.join(60)
    assert num_aborted == [1]
    assert played.error is None
    assert len(client.prompts) == 2
    assert client.prompts[0] == rollout.ids.tolist()
    assert played.last_turn.finish_reason == "length"
    assert played.arrays().loss_mask.sum() == len(played.last_turn.ids) == 400
    assert played.ids[: len(client.prompts[1])].tolist() == client.prompts[1]
