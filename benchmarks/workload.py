"""Workloads: every server gets the same prompts in the same patterns.

Prompts are random ids, new for each repeat. So a prefix cache finds only the prefixes that a pattern
shares on purpose.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.models import PROMPT_IDS

GROUP_SIZE = 8


@dataclass(frozen=True)
class Call:
    """One HTTP request: prompts with `n` completions each.

    `logprobs` and `prompt_logprobs` are numbers of alternatives to each sampled token and to each
    token of the prompt, as vLLM counts them. 0: the token's own only. None: no log-probabilities.
    `sampling` are further fields of vLLM's SamplingParams; `max_tokens` then is a limit.
    """

    prompts: list[list[int]]
    n: int = 1
    logprobs: int = 0
    prompt_logprobs: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pattern:
    """Calls, and how many of them are in flight at once."""

    name: str
    calls: list[Call]
    concurrency: int
    output_len: int

    @property
    def num_tokens(self) -> int:
        """All completion tokens."""
        return sum(len(call.prompts) * call.n for call in self.calls) * self.output_len


@dataclass(frozen=True)
class Sizes:
    """The prompts for one worker; w workers get w times as many."""

    num_prompts: int
    input_len: int
    output_len: int
    long_input_len: int = 1024
    long_output_len: int = 512


PATTERNS = (
    "batch", "single", "queue", "groups", "short",
    "long prompts", "long answers", "alternatives", "scored prompts",
)  # fmt: skip
TITLES = {
    "batch": "one request with {num_prompts} prompts",
    "single": "{num_prompts} one-prompt requests at once",
    "queue": "{queue} requests, {queue_at_once} at once",
    "groups": "{groups} groups, n=8, half the prompt shared by all",
    "short": "one request at a time, 1 prompt, {short_len} tokens",
    "long prompts": "{long} one-prompt requests at once, {long_input_len} ids in",
    "long answers": "{long} one-prompt requests at once, {long_output_len} tokens out",
    "alternatives": "{num_prompts} one-prompt requests at once, logprobs {num_alternatives}",
    "scored prompts": "{long} one-prompt requests at once, {long_input_len} ids in, prompt_logprobs 0",
}
# One of so many prompts in the patterns with long ones.
LONG_SHARE = 8
NUM_ALTERNATIVES = 20
SHORT_LEN = 8
NUM_SHORT = 20


def describe(name: str, sizes: Sizes) -> str:
    """A pattern's title for the table."""
    return TITLES[name].format(
        num_prompts=sizes.num_prompts,
        queue=4 * sizes.num_prompts,
        queue_at_once=2 * sizes.num_prompts,
        groups=max(1, sizes.num_prompts // GROUP_SIZE),
        short_len=SHORT_LEN,
        long=_num_long(sizes),
        long_input_len=sizes.long_input_len,
        long_output_len=sizes.long_output_len,
        num_alternatives=NUM_ALTERNATIVES,
    )


def _num_long(sizes: Sizes) -> int:
    return max(1, sizes.num_prompts // LONG_SHARE)


def make_pattern(name: str, sizes: Sizes, *, repeat: int) -> Pattern:
    """The pattern `name`. Each `repeat` has new prompts."""
    chance = random.Random(f"{name} {repeat}")

    def prompts(count: int, length: int) -> list[list[int]]:
        return [chance.choices(PROMPT_IDS, k=length) for _ in range(count)]

    def one_by_one(count: int, length: int, **fields: int) -> list[Call]:
        return [Call([prompt], **fields) for prompt in prompts(count, length)]

    count, length = sizes.num_prompts, sizes.input_len
    output_len, num_long = sizes.output_len, _num_long(sizes)
    at_once: int | None = None
    match name:
        case "batch":
            calls, at_once = [Call(prompts(count, length))], 1
        case "single":
            calls = one_by_one(count, length)
        case "queue":
            calls, at_once = one_by_one(4 * count, length), 2 * count
        case "groups":
            (shared,) = prompts(1, length // 2)
            own = prompts(max(1, count // GROUP_SIZE), length - length // 2)
            calls = [Call([shared + rest], n=GROUP_SIZE) for rest in own]
        case "short":
            calls, at_once, output_len = one_by_one(NUM_SHORT, length), 1, SHORT_LEN
        case "long prompts":
            calls = one_by_one(num_long, sizes.long_input_len)
        case "long answers":
            calls, output_len = one_by_one(num_long, length), sizes.long_output_len
        case "alternatives":
            calls = one_by_one(count, length, logprobs=NUM_ALTERNATIVES)
        case "scored prompts":
            calls = one_by_one(num_long, sizes.long_input_len, prompt_logprobs=0)
        case _:
            raise ValueError(f"pattern: expected one of {PATTERNS}, got {name!r}")
    return Pattern(name, calls, at_once or len(calls), output_len)
