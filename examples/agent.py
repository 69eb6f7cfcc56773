"""GRPO on a tiny agent with thoughts and tools, through a titopool server, on two CPU cores.

    python examples/agent.py                     # starts a server, warms a model up, learns
    python examples/agent.py --seed 0 1 2        # three models, one after another
    python examples/agent.py --withhold-updates  # the server keeps the weights of the warm-up

A user asks for the port or the rank of a process. Only the tools know it, and what they know is
drawn anew at each step. The agent thinks what to look up, calls a tool, and repeats its answer:

    user: port of worker?
    assistant: <think>port of worker</think>
               <tool_call>{"name": "port", "arguments": {"name": "worker"}}</tool_call>
    tool: 7
    assistant: <think>7</think>7

A random model cannot write a call. So it first imitates scripts (supervised learning). Their form is
right, but half of the time they look up something at random, and half of the time they answer at
random. Only GRPO makes the agent better than that. The reward is 1 if the tool says what was asked
for and the agent repeats it, else 0. A guess gains nothing.

GRPO: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300. Needs torch, transformers and titopool.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from titopool import Client, Rollout, TitopoolError, run_rollouts
from titopool.client.weights_client import WeightsError
from titopool.demo_model import VOCAB_SIZE, make_model
from titopool.rollouts.sequence import RolloutArrays

try:
    from examples import grpo_parts
except ImportError:  # Python has this folder on its path when it runs this file.
    import grpo_parts  # type: ignore[no-redef]

QUESTIONS = [
    (tool, name) for tool in ("port", "rank") for name in ("worker", "trainer", "server", "client")
]
# One token each, as in Qwen3's vocabulary.
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
WARM_UP_STEPS, WARM_UP_BATCH, WARM_UP_LEARNING_RATE, RIGHT = 250, 16, 1e-2, 0.5
PROMPTS_PER_STEP, GROUP_SIZE, MAX_TOKENS = 16, 8, 64
LEARNING_RATE = 1e-3
# Mean reward of five steps at which training ends.
LEARNED = 0.93
TIMEOUT_S = 300.0


# ---- the task -----------------------------------------------------------------------------


class Tools:
    """The functions that the agent may call, and what they know."""

    def __init__(self, chooser: random.Random):
        # All differ, so what another call says is never right.
        self.known = dict(zip(QUESTIONS, chooser.sample(range(10), len(QUESTIONS)), strict=True))

    def port(self, name: str) -> int:
        """Looks up a port.

        Args:
            name: The name of a process.
        """
        return self.known["port", name]

    def rank(self, name: str) -> int:
        """Looks up a rank.

        Args:
            name: The name of a process.
        """
        return self.known["rank", name]


def prompt_of(question: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{question[0]} of {question[1]}?"}]


def make_script(chooser: random.Random) -> list[dict[str, str]]:
    """A whole conversation, of whose two choices each is right with probability `RIGHT`, else random."""
    question, said = chooser.choice(QUESTIONS), chooser.randrange(10)
    tool, name = question if chooser.random() < RIGHT else chooser.choice(QUESTIONS)
    answer = said if chooser.random() < RIGHT else chooser.randrange(10)
    call = f'{{"name": "{tool}", "arguments": {{"name": "{name}"}}}}'
    first = f"<think>{tool} of {name}</think><tool_call>{call}</tool_call>"
    return [
        *prompt_of(question),
        {"role": "assistant", "content": first},
        {"role": "tool", "content": str(said)},
        {"role": "assistant", "content": f"<think>{answer}</think>{answer}"},
    ]


def reward_of(rollout: Rollout, expected: int) -> float:
    """1 if a tool has said what is expected, and the text after the last thought repeats it."""
    said = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    answer = rollout.last_text.rpartition("</think>")[2]
    return float(said == [answer] == [str(expected)])


# ---- the model and its warm-up ------------------------------------------------------------


def save_model(folder: str, seed: int) -> None:
    """Writes a random model of two layers, with the demo model's tokenizer and template."""
    make_model(
        folder, seed=seed, vocab_size=VOCAB_SIZE + len(TAGS), hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        initializer_range=0.1,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(TAGS)
    tokenizer.save_pretrained(folder)


def warmed_up(seed: int) -> tuple[Any, Any]:
    """The model of `seed` after it has imitated scripts, and its tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, seed)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    chooser = random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=WARM_UP_LEARNING_RATE)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, WARM_UP_STEPS)
    for _ in range(WARM_UP_STEPS):
        scripts = [tokens_of(make_script(chooser), tokenizer) for _ in range(WARM_UP_BATCH)]
        ids, mask = (pad_sequence(list(rows), True) for rows in zip(*scripts, strict=True))
        grpo_parts.take_step(model, optimizer, -logprobs_of(model, ids, mask).mean())
        decay.step()
    return model, tokenizer


def tokens_of(messages: list[dict[str, str]], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[T]: the ids of a conversation, and whether they are the assistant's."""
    ids, mask = [], []
    for message in messages:
        new = tokenizer(tokenizer.apply_chat_template([message], tokenize=False))["input_ids"]
        # The template begins a message with its role and a line's end, and ends it with another.
        begin = len(tokenizer(f"<|im_start|>{message['role']}\n")["input_ids"])
        is_model = message["role"] == "assistant"
        mask += [is_model and begin <= index < len(new) - 1 for index in range(len(new))]
        ids += new
    return torch.tensor(ids), torch.tensor(mask)


# ---- the trainer --------------------------------------------------------------------------


def logprobs_of(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of the tokens in the mask, sequence after sequence."""
    hidden = model.model(ids[:, :-1]).last_hidden_state[mask[:, 1:]]
    logprobs = torch.log_softmax(model.lm_head(hidden), -1)
    return logprobs.gather(-1, ids[mask][:, None]).squeeze(-1)


@dataclass(frozen=True)
class Played:
    """What a step's agents have done: `GROUP_SIZE` for each of its prompts, prompt after prompt."""

    # [agents]
    rewards: torch.Tensor
    # What they sampled, and the agent of each sequence.
    sequences: list[RolloutArrays]
    agents: list[int]
    measured: dict[str, float]


# Gets the server's URL, the tokenizer and a seed.
Play: TypeAlias = Callable[[str, Any, int], Played]


def questions_of(seed: int, num: int = PROMPTS_PER_STEP) -> tuple[Tools, list[tuple[str, str]]]:
    """The tools of a step, and what its users ask."""
    chooser = random.Random(seed)
    return Tools(chooser), chooser.choices(QUESTIONS, k=num)


def play(url: str, tokenizer: Any, seed: int) -> Played:
    """A step of rollouts."""
    tools, questions = questions_of(seed)
    with Client(url, timeout_s=TIMEOUT_S) as client:
        rollouts = run_rollouts(
            client, [prompt_of(question) for question in questions], tools=[tools.port, tools.rank],
            n=GROUP_SIZE, max_turns=2, concurrency=PROMPTS_PER_STEP * GROUP_SIZE,
            tokenizer=tokenizer, max_tokens=MAX_TOKENS, temperature=1.0, seed=seed,
            stop_token_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
        )  # fmt: skip
    if errors := [rollout.error for rollout in rollouts if rollout.error is not None]:
        raise errors[0]
    known = [tools.known[question] for question in questions for _ in range(GROUP_SIZE)]
    num_called = sum(len(rollout.messages) > 2 for rollout in rollouts)
    return Played(
        rewards=torch.tensor(list(map(reward_of, rollouts, known))),
        sequences=[rollout.arrays() for rollout in rollouts],
        agents=list(range(len(rollouts))),
        measured={"called": num_called / len(rollouts)},
    )


def take_step(model: Any, optimizer: torch.optim.Optimizer, played: Played) -> dict[str, float]:
    """A step of GRPO; returns what was measured."""
    ids, mask, logprobs, versions = (
        pad_sequence([torch.tensor(getattr(one, name)) for one in played.sequences], True)
        for name in ("ids", "loss_mask", "logprobs", "weight_versions")
    )
    ids, mask = ids.long(), mask > 0
    ratio = (logprobs_of(model, ids, mask) - logprobs[mask]).exp()
    advantages = grpo_parts.advantages_of(played.rewards, GROUP_SIZE)[played.agents]
    gain = grpo_parts.clipped_gain(ratio, advantages[mask.nonzero()[:, 0]])
    grpo_parts.take_step(model, optimizer, -gain.mean())
    return {
        "reward": played.rewards.mean().item(), **played.measured, "tokens": int(mask.sum()),
        "version": int(versions.max()), "ratio_error": (ratio - 1).abs().max().item(),
    }  # fmt: skip


def train(
    url: str, model: Any, tokenizer: Any, seed: int, *, num_steps: int, withhold_updates: bool,
    play: Play = play,
) -> list[dict[str, float]]:  # fmt: skip
    """Trains the model; returns what was measured at each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
    history: list[dict[str, float]] = []
    with (
        Client(url, timeout_s=TIMEOUT_S) as client,
        client.weights(device="cpu", timeout_s=TIMEOUT_S) as weights,
    ):
        weights.update(model, policy="drain")
        for step in range(num_steps):
            history.append(take_step(model, optimizer, play(url, tokenizer, 1000 * seed + step)))
            shown = "  ".join(f"{name} {value:.4g}" for name, value in history[-1].items())
            print(f"seed {seed}  step {step}  {shown}", flush=True)
            if sum(one["reward"] for one in history[-5:]) / 5 >= LEARNED:
                break
            if not withhold_updates:
                weights.update(model, policy="keep")
    return history


@contextmanager
def running_server() -> Iterator[str]:
    """The URL of a server of the model's shape: training sends the weights."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, 0)
        with grpo_parts.server_of(folder, "--max-model-len", "256", "--max-num-seqs", "128") as url:
            yield url


def learn(url: str, seed: int, **options: Any) -> list[dict[str, float]]:
    """Warms the model of `seed` up and trains it; the options are those of `train`."""
    began = time.monotonic()
    history = train(url, *warmed_up(seed), seed, **options)
    first, last = history[0]["reward"], history[-1]["reward"]
    spent = f"{len(history)} steps, {time.monotonic() - began:.0f} s"
    print(f"seed {seed}: mean reward {first:.3f} to {last:.3f} in {spent}", flush=True)
    return history


def parser_of(document: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(document or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60, help="at most")
    parser.add_argument("--withhold-updates", action="store_true")
    return parser


def main(arguments: list[str] | None = None) -> dict[int, list[dict[str, float]]]:
    """Runs the command; returns what was measured at each step of each seed."""
    options = parser_of(__doc__).parse_args(arguments)
    withheld = options.withhold_updates
    with running_server() as url:
        return {
            seed: learn(url, seed, num_steps=options.steps, withhold_updates=withheld)
            for seed in options.seed
        }


if __name__ == "__main__":
    # More threads than one gain nothing with a model so small.
    torch.set_num_threads(1)
    # An end by SIGTERM also stops the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except (TitopoolError, WeightsError) as error:
        sys.exit(str(error))
