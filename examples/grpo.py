"""GRPO on a tiny random model that learns through a titopool server, on two CPU cores in minutes.

    python examples/grpo.py                    # starts a server, learns, writes grpo.png
    python examples/grpo.py --seeds 0 1 2      # three models, one after another
    python examples/grpo.py --sync             # no rollouts in flight while weights change
    python examples/grpo.py --withhold-updates  # the server keeps the first weights

The task: a prompt has three filler words and one country, anywhere. The right completion is the
country's capital and the end of text. The reported reward is on prompts that were not trained on.

While the trainer takes a step and sends weights, the server generates for the next steps. Requests
in flight continue with the new weights (policy "keep"), so one completion may have tokens of two
versions. The server's log-probability of each token is the denominator of the importance ratio.

Server and trainer run on the CPU, with vLLM's CPU build.

GRPO: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300. The clipped loss: Schulman et al. 2017, PPO,
arXiv 1707.06347. Needs torch, transformers, matplotlib and titopool.
"""

import argparse
import itertools
import random
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from titopool import Client, TitopoolError, TokenPipeline
from titopool.client.weights_client import WeightsError

try:
    from examples import grpo_parts
except ImportError:  # Python has this folder on its path when it runs this file.
    import grpo_parts  # type: ignore[no-redef]

CAPITALS = {
    "Japan": "Tokyo", "France": "Paris", "Egypt": "Cairo", "Peru": "Lima",
    "Kenya": "Nairobi", "Norway": "Oslo", "Cuba": "Havana", "Iran": "Tehran",
}  # fmt: skip
FILLERS = ["old", "new", "great", "little", "warm", "cold", "far", "near"]
WORDS = ["<end>", *CAPITALS.values(), *CAPITALS, *FILLERS]
END = 0
PROMPT_TOKENS, MAX_TOKENS = 4, 3
NUM_TRAINED, NUM_HELD_OUT = 512, 64

PROMPTS_PER_STEP, GROUP_SIZE = 32, 16
LEARNING_RATE, ENTROPY_BONUS = 5e-3, 0.05
# Mean reward of five steps at which training ends.
LEARNED = 0.93
TIMEOUT_S = 300.0


# ---- the task and the model ---------------------------------------------------------------


def make_prompts(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts for training and, disjoint from them, for the reported reward."""
    everything = []
    for country, place in itertools.product(CAPITALS, range(PROMPT_TOKENS)):
        for fillers in itertools.product(FILLERS, repeat=PROMPT_TOKENS - 1):
            words = [*fillers[:place], country, *fillers[place:]]
            everything.append([WORDS.index(word) for word in words])
    chosen = random.Random(seed).sample(everything, NUM_TRAINED + NUM_HELD_OUT)
    return chosen[:NUM_TRAINED], chosen[NUM_TRAINED:]


def reward_of(prompt: list[int], completion: list[int]) -> float:
    """1 for the capital and the end of text, 1/2 for the capital and more words, else 0."""
    (capital,) = [CAPITALS[WORDS[one]] for one in prompt if WORDS[one] in CAPITALS]
    if completion[:1] != [WORDS.index(capital)]:
        return 0.0
    return 1.0 if completion[1:] == [END] else 0.5


def make_model(seed: int) -> Qwen3ForCausalLM:
    """A random model of one layer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
        tie_word_embeddings=False, initializer_range=0.1, eos_token_id=END, pad_token_id=END,
        bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(torch.float32)


def save_model(model: Qwen3ForCausalLM, folder: str) -> None:
    """Writes the model and a tokenizer of `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=WORDS[0])
    text = Tokenizer(words)
    text.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text, eos_token=WORDS[END])
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


@contextmanager
def running_server() -> Iterator[str]:
    """The URL of a server of the model, which is stopped at the end."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(make_model(0), folder)
        with grpo_parts.server_of(folder, "--max-model-len", "64", "--max-num-seqs", "512") as url:
            yield url


# ---- rollouts -----------------------------------------------------------------------------


@dataclass
class Rollouts:
    """Sequences, padded on the right: B prompts of `PROMPT_TOKENS` and their completions, C wide."""

    ids: torch.Tensor  # [B, PROMPT_TOKENS + C]
    rewards: torch.Tensor  # [B]
    # [B, C]: the server's log-probability of each token, the version of the weights that sampled
    # it, and whether there is a token.
    logprobs: torch.Tensor
    versions: torch.Tensor
    mask: torch.Tensor
    seconds: float


def generate(client: Client, prompts: list[list[int]], n: int) -> Rollouts:
    """Samples `n` completions of each prompt, prompt after prompt."""
    began = time.monotonic()
    pipeline = TokenPipeline(client, pad_id=END)
    batch = pipeline.generate(prompts, n=n, max_tokens=MAX_TOKENS, temperature=1.0)
    rows = [batch.ids_of(row).tolist() for row in range(len(prompts) * n)]
    return Rollouts(
        ids=torch.tensor(batch.input_ids).long(),
        rewards=torch.tensor([reward_of(one[:PROMPT_TOKENS], one[PROMPT_TOKENS:]) for one in rows]),
        logprobs=torch.tensor(batch.logprobs),
        versions=torch.tensor(batch.weight_versions),
        mask=torch.tensor(batch.loss_mask) > 0,
        seconds=time.monotonic() - began,
    )


# ---- the trainer --------------------------------------------------------------------------


def importance_ratio(model: Any, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, C]: exp(trainer's - server's log-probability), and the entropy."""
    logits = model(rollouts.ids[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]
    all_logprobs = torch.log_softmax(logits, -1)
    sampled = all_logprobs.gather(-1, rollouts.ids[:, PROMPT_TOKENS:, None]).squeeze(-1)
    return (sampled - rollouts.logprobs).exp(), -(all_logprobs.exp() * all_logprobs).sum(-1)


def grpo_loss(rollouts: Rollouts, ratio: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """The clipped loss, with rewards normalized in each group of `GROUP_SIZE` completions."""
    advantages = grpo_parts.advantages_of(rollouts.rewards, GROUP_SIZE)[:, None]
    gain = grpo_parts.clipped_gain(ratio, advantages)
    return -(gain + ENTROPY_BONUS * entropy)[rollouts.mask].mean()


def train(
    url: str, seed: int, *, num_steps: int, in_flight: int, withhold_updates: bool = False
) -> list[dict[str, float]]:
    """Trains the model of `seed`; returns what was measured at each step.

    Tokens are at most `in_flight` versions older than the weights that learn from them.
    """
    model, (trained, held_out) = make_model(seed), make_prompts(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
    chooser, history = random.Random(seed), []
    batches: deque[Future[Rollouts]] = deque()

    def send_prompts(num_batches: int) -> None:
        while len(batches) < num_batches:
            prompts = chooser.sample(trained, PROMPTS_PER_STEP)
            batches.append(threads.submit(generate, client, prompts, GROUP_SIZE))

    with (
        ThreadPoolExecutor() as threads,
        Client(url, timeout_s=TIMEOUT_S) as client,
        client.weights(device="cpu", timeout_s=TIMEOUT_S) as weights,
    ):
        version = weights.update(model, policy="drain")["version"]
        for step in range(num_steps):
            held = generate(client, held_out, n=1)
            send_prompts(max(1, in_flight))
            began = time.monotonic()
            rollouts = batches.popleft().result(TIMEOUT_S)
            received = time.monotonic()
            ratio, entropy = importance_ratio(model, rollouts)
            history.append(measured(model, version, rollouts, ratio.detach(), held))
            grpo_parts.take_step(model, optimizer, grpo_loss(rollouts, ratio, entropy))
            stepped = time.monotonic()
            # These are generated while the weights change.
            send_prompts(in_flight)
            version += 1
            if not withhold_updates:
                weights.update(model, policy="keep", version=version)
            history[-1] |= {
                "generate_s": rollouts.seconds, "wait_s": received - began,
                "train_s": stepped - received, "update_s": time.monotonic() - stepped,
                "evaluate_s": held.seconds,
            }  # fmt: skip
            if step % 5 == 0 or step == num_steps - 1:
                shown = "  ".join(f"{name} {value:.3g}" for name, value in history[-1].items())
                print(f"seed {seed}  step {step}  {shown}", flush=True)
            if sum(one["reward"] for one in history[-5:]) / 5 >= LEARNED:
                break
    return history


@torch.no_grad()
def measured(
    model: Any, version: int, rollouts: Rollouts, ratio: torch.Tensor, held: Rollouts
) -> dict[str, float]:
    """Rewards, staleness in versions, and importance ratios."""
    ratio, staleness = ratio[rollouts.mask], (version - rollouts.versions)[rollouts.mask].float()
    held_ratio, held_versions = importance_ratio(model, held)[0], held.versions[held.mask]
    is_new = held_versions == version
    # Of tokens that the trainer's own weights sampled.
    new = torch.cat([ratio[staleness == 0], held_ratio[held.mask][is_new]])
    first, last = rollouts.versions[:, :1], rollouts.versions
    return {
        "version": version,
        "held_version": held_versions.max().item() if is_new.all() else held_versions.min().item(),
        "reward": held.rewards.mean().item(),
        "staleness": staleness.mean().item(),
        "max_staleness": staleness.max().item(),
        "mixed": ((first != last) & rollouts.mask).any(1).sum().item(),
        "ratio_low": ratio.quantile(0.05).item(),
        "ratio_high": ratio.quantile(0.95).item(),
        "num_new": len(new),
        "new_ratio_error": (new - 1).abs().max().item() if len(new) else 0.0,
    }


def summary(history: list[dict[str, float]]) -> str:
    """The reward's first and last values, and seconds per step (medians)."""
    above = [step for step, one in enumerate(history) if one["reward"] > 0.9]
    seconds = {
        name: median(one[name] for one in history) for name in history[0] if name.endswith("_s")
    }
    shown = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    first, last = history[0]["reward"], history[-1]["reward"]
    since = f"above 0.9 from step {above[0]}" if above else "never above 0.9"
    return f"reward {first:.3f} to {last:.3f} in {len(history)} steps, {since}; medians: {shown}"


def draw(histories: dict[str, list[dict[str, float]]], path: str) -> None:
    """Reward, importance ratio and staleness over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (reward, ratio, staleness) = pyplot.subplots(1, 3, figsize=(12, 3.5))
    for number, (label, history) in enumerate(histories.items()):
        columns = {name: [one[name] for one in history] for name in history[0]}
        steps, color = range(len(history)), f"C{number}"
        reward.plot(steps, columns["reward"], color=color, label=label)
        if "withheld" not in label:
            low, high = columns["ratio_low"], columns["ratio_high"]
            ratio.fill_between(steps, low, high, color=color, alpha=0.3)
            staleness.plot(steps, columns["staleness"], color=color)
    reward.axhline(1 / len(CAPITALS), color="gray", linestyle=":", label="best constant answer")
    reward.set(title="reward on prompts not trained on", ylim=(0, 1.02))
    reward.legend(loc="center right")
    ratio.set(title="importance ratio, 5th to 95th percentile", ylim=(0, 3))
    staleness.set(title="mean staleness of tokens, in versions", ylim=(0, None))
    for axes in (reward, ratio, staleness):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main(arguments: list[str] | None = None) -> dict[str, list[dict[str, float]]]:
    """Runs the command; returns what was measured at each step of each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="of a running server of this model; default: start one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=200, help="at most")
    parser.add_argument("--in-flight", type=int, default=1, help="batches, while weights change")
    parser.add_argument("--sync", action="store_const", dest="in_flight", const=0)
    parser.add_argument("--withhold-updates", action="store_true")
    parser.add_argument("--control", action="store_true", help="then as many steps without updates")
    parser.add_argument("--out", default="grpo.png", help="the picture")
    options = parser.parse_args(arguments)
    runs = [(seed, options.withhold_updates) for seed in options.seeds]
    runs += [(options.seeds[0], True)] * options.control
    histories = {}
    with ExitStack() as stack:
        url = options.url or stack.enter_context(running_server())
        for seed, withhold in runs:
            label = f"seed {seed}{', updates withheld' * withhold}"
            longest = max(map(len, histories.values()), default=options.steps)
            histories[label] = train(
                url, seed, num_steps=longest if withhold else options.steps, in_flight=options.in_flight,
                withhold_updates=withhold,
            )  # fmt: skip
            print(f"{label}: {summary(histories[label])}", flush=True)
    draw(histories, options.out)
    return histories


if __name__ == "__main__":
    # An end by SIGTERM also stops the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except (TitopoolError, WeightsError) as error:
        sys.exit(str(error))
