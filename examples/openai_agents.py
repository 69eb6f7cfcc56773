"""GRPO on agents of OpenAI's Agents SDK, which is not changed, in sessions of a titopool server.

    python examples/openai_agents.py                     # starts a server, learns, draws agents.png
    python examples/openai_agents.py --control           # then as many steps without updates
    python examples/openai_agents.py --withhold-updates  # the server keeps the warm-up's weights

Task, tools, model, warm-up and loss are those of examples/agent.py. There the trainer plays the
conversations, as ids. Here the SDK plays them: `Runner.run` asks the model, calls the tool and asks
again. It knows messages only. The server keeps the ids that it sampled, and the trainer takes them
from the agent's session.

An agent fails that calls a tool which does not exist, or has no answer after two turns. Its reward
is 0, and the trainer learns from what it sampled. A call that cannot be read is an answer in text.

Each step counts sampled tokens that a trainer would get wrong:

- `retokenized`: it writes the messages at the end of a conversation with the chat template and
  tokenizes them. The messages are the SDK's, with calls and thoughts. The ids are aligned with the
  sampled ones as difflib does; sampled ids without a counterpart count.
- `without_thoughts`: the same, of a package that does not keep thoughts.
- `ours`: it takes the samples of the session. They are compared with the ids that the server's
  answers had when it sampled them.

Needs torch, transformers, matplotlib, titopool and openai-agents.
"""

import asyncio
import json
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
)
from transformers import AutoTokenizer, GenerationConfig

from titopool import AgentRun, AsyncClient, SessionSample, TitopoolError, run_agents_async
from titopool.client.weights_client import WeightsError

try:
    from examples import agent, grpo_parts
except ImportError:  # Python has this folder on its path when it runs this file.
    import agent  # type: ignore[no-redef]
    import grpo_parts  # type: ignore[no-redef]

# Writes thoughts and calls as the warm-up's scripts have them, so that messages which say the same
# as a script give its ids. An API's client has arguments as text, the server as an object.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.reasoning %}{{ '<think>' + message.reasoning + '</think>' }}{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "{% set given = call.function.arguments %}"
    '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (given if given is string else given | tojson) + '}</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A step of 64 agents takes the SDK 2.5 s of CPU time.
PROMPTS_PER_STEP, MAX_TURNS = 8, 2
SETTINGS = ModelSettings(
    temperature=1.0, max_tokens=agent.MAX_TOKENS,
    # For the count `ours`; sessions do not need it.
    extra_body={"return_token_ids": True},
)  # fmt: skip


# ---- the agent ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """A request and its answer, as they were sent."""

    messages: list[dict[str, Any]]
    message: dict[str, Any]
    prompt_ids: list[int]
    ids: list[int]


class Harness:
    """Plays agents of the SDK, and remembers what the server answered them."""

    def __init__(self, model: str, tools: agent.Tools, http: openai.DefaultAsyncHttpxClient):
        self.model, self.http = model, http
        # A strict tool makes the server sample calls under a grammar: log-probabilities are then of
        # the ids that it leaves, and the trainer's are of all ids.
        self.tools = [function_tool(one, strict_mode=False) for one in (tools.port, tools.rank)]
        # By the session's id, in the order of its turns.
        self.answered: defaultdict[str, list[Answered]] = defaultdict(list)
        http.event_hooks = {"response": [self._remember]}

    async def play(self, base_url: str, api_key: str, task: tuple[tuple[str, str], int]) -> float:
        """Answers a user; returns the reward.

        Raises:
            AgentsException: the agent has failed.
        """
        question, expected = task
        # Making an HTTP client takes 50 ms, so the agents share one.
        client = openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, max_retries=0, http_client=self.http
        )
        player = Agent(
            name="agent", tools=self.tools, model_settings=SETTINGS,
            model=OpenAIChatCompletionsModel(self.model, client),
        )  # fmt: skip
        result = await Runner.run(
            player, agent.prompt_of(question), max_turns=MAX_TURNS,
            run_config=RunConfig(tracing_disabled=True),
        )  # fmt: skip
        items = [one for one in result.new_items if one.type == "tool_call_output_item"]
        said = [str(one.output) for one in items]
        return float(said == [result.final_output] == [str(expected)])

    async def _remember(self, response: Any) -> None:
        await response.aread()
        if response.is_success:
            _, _, session_id, *_ = response.request.url.path.split("/")
            messages, answer = json.loads(response.request.content)["messages"], response.json()
            (choice,) = answer["choices"]
            self.answered[session_id].append(
                Answered(
                    messages, choice["message"], answer["prompt_token_ids"], choice["token_ids"]
                )
            )


async def run_step(url: str, seed: int) -> tuple[list[AgentRun], list[list[Answered]]]:
    """The agents of a step, and what the server answered each."""
    tools, questions = agent.questions_of(seed, PROMPTS_PER_STEP)
    async with (
        AsyncClient(url, timeout_s=agent.TIMEOUT_S) as client,
        openai.DefaultAsyncHttpxClient(timeout=agent.TIMEOUT_S) as http,
    ):
        harness = Harness((await client.info()).model, tools, http)
        runs = await run_agents_async(
            client, [(question, tools.known[question]) for question in questions],
            agent=harness.play, n=agent.GROUP_SIZE, concurrency=PROMPTS_PER_STEP * agent.GROUP_SIZE,
        )  # fmt: skip
    for run in runs:
        if run.error is not None and not isinstance(run.error, AgentsException):
            raise run.error
    return runs, [harness.answered[str(run.session_id)] for run in runs]


def play(url: str, tokenizer: Any, seed: int) -> agent.Played:
    """A step of agents."""
    runs, answered = asyncio.run(run_step(url, seed))
    counts = np.sum([counts_of(*one, tokenizer) for one in zip(runs, answered, strict=True)], 0)
    retokenized, without_thoughts, ours = counts.tolist()
    num_called = sum(bool(one[0].message.get("tool_calls")) for one in answered)
    return agent.Played(
        rewards=torch.tensor([run.value or 0.0 for run in runs]),
        sequences=[one for run in runs for one in run.sequences()],
        agents=[index for index, run in enumerate(runs) for _ in run.samples],
        measured={
            "called": num_called / len(runs), "failed": sum(run.error is not None for run in runs),
            "retokenized": retokenized, "without_thoughts": without_thoughts, "ours": ours,
        },
    )  # fmt: skip


# ---- tokens that a trainer would get wrong ------------------------------------------------


def counts_of(run: AgentRun, answered: list[Answered], tokenizer: Any) -> tuple[int, int, int]:
    """`retokenized`, `without_thoughts` and `ours` of a run."""
    retokenized = without_thoughts = 0
    for sample in run.samples:
        last = answered[sample.turns[-1]]
        messages = [*last.messages, last.message]
        retokenized += num_changed(sample, ids_of(messages, tokenizer))
        silent = [{**message, "reasoning": None} for message in messages]
        without_thoughts += num_changed(sample, ids_of(silent, tokenizer))
    return retokenized, without_thoughts, num_wrong(run.samples, answered)


def ids_of(messages: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, chat_template=CHAT_TEMPLATE, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def num_changed(sample: SessionSample, theirs: list[int]) -> int:
    """How many sampled ids `theirs` has no counterpart of."""
    ours = sample.ids.tolist()
    has_counterpart = np.zeros(len(ours), bool)
    for block in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks():
        has_counterpart[block.a : block.a + block.size] = True
    return int(((sample.loss_mask == 1) & ~has_counterpart).sum())


def num_wrong(samples: Sequence[SessionSample], answered: list[Answered]) -> int:
    """How many sampled ids the samples have otherwise than the answers, or do not count once."""
    num_sampled = sum(len(one.ids) for one in answered)
    wrong = abs(num_sampled - sum(int(sample.loss_mask.sum()) for sample in samples))
    for sample in samples:
        for turn in (answered[number] for number in sample.turns):
            expected, start = [*turn.prompt_ids, *turn.ids], len(turn.prompt_ids)
            got = sample.ids[: len(expected)].tolist()
            is_same = [one == other for one, other in zip(got, expected, strict=True)]
            # With another prompt, all log-probabilities of the turn are of something else.
            wrong += is_same[start:].count(False) if all(is_same[:start]) else len(turn.ids)
    return wrong


# ---- the command --------------------------------------------------------------------------


@contextmanager
def running_server() -> Iterator[str]:
    """The URL of a server of the model's shape, which reads thoughts and calls."""
    with tempfile.TemporaryDirectory() as folder:
        agent.save_model(folder, 0)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(folder)
        # The SDK's requests do not say where a turn ends.
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        GenerationConfig(eos_token_id=end).save_pretrained(folder)
        with grpo_parts.server_of(
            folder, "--max-model-len", "512", "--max-num-seqs", "128",
            "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
        ) as url:  # fmt: skip
            yield url


def draw(histories: dict[str, list[dict[str, float]]], path: str) -> None:
    """Rewards, and the sum of changed tokens up to each step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (reward, changed) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for number, (label, history) in enumerate(histories.items()):
        reward.plot([one["reward"] for one in history], color=f"C{number}", label=label)
        if "withheld" not in label:
            for name, style in (("retokenized", "-"), ("ours", ":")):
                sums = np.cumsum([one[name] for one in history])
                changed.plot(sums, style, color=f"C{number}", label=f"{label}, {name}")
    reward.set(title="mean reward", ylim=(0, 1.02))
    changed.set(title="sampled tokens that change, up to the step", ylim=(-1, None))
    for axes in (reward, changed):
        axes.set_xlabel("step")
        axes.legend(loc="best", fontsize="small")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def totals(history: list[dict[str, float]]) -> str:
    """The counts of all steps."""
    names = ("tokens", "retokenized", "without_thoughts", "ours", "failed")
    return ", ".join(f"{name} {sum(one[name] for one in history):.0f}" for name in names)


def main(arguments: list[str] | None = None) -> dict[str, list[dict[str, float]]]:
    """Runs the command; returns what was measured at each step of each run."""
    parser = agent.parser_of(__doc__)
    parser.add_argument("--control", action="store_true", help="then as many steps without updates")
    parser.add_argument("--out", default="agents.png", help="the picture; numbers go beside it")
    options = parser.parse_args(arguments)
    runs = [(seed, options.withhold_updates) for seed in options.seed]
    runs += [(options.seed[0], True)] * options.control
    histories: dict[str, list[dict[str, float]]] = {}
    with running_server() as url:
        for seed, withheld in runs:
            label = f"seed {seed}{', updates withheld' * withheld}"
            longest = max(map(len, histories.values()), default=options.steps)
            num_steps = longest if withheld else options.steps
            histories[label] = agent.learn(
                url, seed, num_steps=num_steps, withhold_updates=withheld, play=play
            )
            print(f"{label}: {totals(histories[label])}", flush=True)
    draw(histories, options.out)
    Path(options.out).with_suffix(".json").write_text(json.dumps(histories, indent=1) + "\n")
    return histories


if __name__ == "__main__":
    # More threads than one gain nothing with a model so small.
    torch.set_num_threads(1)
    # An end by SIGTERM also stops the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except (TitopoolError, WeightsError) as error:
        sys.exit(str(error))
