"""Workloads of `benchmarks.placement`: conversations whose tokens are known in advance."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from titopool.wire.prefixes import BLOCK_TOKENS, DIGEST_BYTES, prompt_hashes


@dataclass
class Turn:
    """One generation of a conversation."""

    prompt: bytes
    completion: bytes
    # Seconds after the end of the previous turn.
    delay_s: float
    max_tokens: int
    # Digests of the blocks of prompt and completion.
    prefix: bytes = b""

    def __post_init__(self) -> None:
        self.prefix = prompt_hashes(self.prompt + self.completion, None)
        self.num_prompt_tokens = len(self.prompt) // 4
        self.num_completion_tokens = len(self.completion) // 4
        self.num_prompt_bytes = self.num_prompt_tokens // BLOCK_TOKENS * DIGEST_BYTES


Conversation = list[Turn]


def single(prompt: bytes, completion: bytes, max_tokens: int) -> Conversation:
    return [Turn(prompt, completion, 0.0, max_tokens)]


def ids(chance: random.Random, num_tokens: int) -> bytes:
    return chance.randbytes(4 * num_tokens)


def long_tail(chance: random.Random, median: int, most: int, sigma: float = 1.0) -> int:
    return max(1, min(most, int(median * chance.lognormvariate(0, sigma))))


def equal_prompts(chance: random.Random, num_workers: int) -> list[Conversation]:
    """512 ids in, 512 out, nothing shared."""
    return [single(ids(chance, 512), ids(chance, 512), 512) for _ in range(384 * num_workers)]


def long_tailed(chance: random.Random, num_workers: int) -> list[Conversation]:
    """512 ids in, lognormal lengths out (median 400, 4,096 at most), nothing shared."""
    return [
        single(ids(chance, 512), ids(chance, long_tail(chance, 400, 4096)), 4096)
        for _ in range(384 * num_workers)
    ]


def two_tasks(chance: random.Random, num_workers: int) -> list[Conversation]:
    """As `long_tailed`, but first all short completions (median 150), then all long ones (600)."""
    num_each = 192 * num_workers
    return [
        single(ids(chance, 512), ids(chance, long_tail(chance, median, 4096)), 4096)
        for median in (150, 600)
        for _ in range(num_each)
    ]


def groups(chance: random.Random, num_workers: int) -> list[Conversation]:
    """8 requests for each prompt of 2,048 ids, in sequence.

    Lengths are lognormal around the group's median, because hard prompts have long completions.
    """
    found = []
    for _ in range(48 * num_workers):
        prompt, median = ids(chance, 2048), long_tail(chance, 250, 2048)
        for _ in range(8):
            completion = ids(chance, long_tail(chance, median, 2048, 0.5))
            found.append(single(prompt, completion, 2048))
    return found


def hot_prefix(chance: random.Random, num_workers: int) -> list[Conversation]:
    """1,024 ids that all prompts share and 256 that they do not; lognormal lengths."""
    shared = ids(chance, 1024)
    return [
        single(shared + ids(chance, 256), ids(chance, long_tail(chance, 200, 1024)), 1024)
        for _ in range(384 * num_workers)
    ]


def conversations(
    chance: random.Random, num_workers: int, num_each: int = 96, mean_delay_s: float = 2
) -> list[Conversation]:
    """5 turns: 1,024 ids, then each time the completion and 256 new ids, after 2 s on average.

    Lengths are lognormal around the conversation's median.
    """
    found = []
    for _ in range(num_each * num_workers):
        prompt, median, turns = ids(chance, 1024), long_tail(chance, 200, 1024), []
        for index in range(5):
            delay_s = chance.expovariate(1 / mean_delay_s) if index else 0.0
            completion = ids(chance, long_tail(chance, median, 1024, 0.5))
            turns.append(Turn(prompt, completion, delay_s, 1024))
            prompt = prompt + completion + ids(chance, 256)
        found.append(turns)
    return found


def many_conversations(chance: random.Random, num_workers: int) -> list[Conversation]:
    """As `conversations`, but more than the engines can run at once."""
    return conversations(chance, num_workers, 256)


def fast_conversations(chance: random.Random, num_workers: int) -> list[Conversation]:
    """As `conversations`, but a turn follows after 5 ms."""
    return conversations(chance, num_workers, mean_delay_s=0.005)


# Name, conversations, front ends.
WORKLOADS: list[tuple[str, Callable[[random.Random, int], list[Conversation]], int]] = [
    ("equal prompts", equal_prompts, 1),
    ("long-tailed lengths", long_tailed, 1),
    ("long-tailed, two tasks", two_tasks, 1),
    ("groups of 8", groups, 1),
    ("hot system prompt", hot_prefix, 1),
    ("conversations", conversations, 1),
    ("conversations, 2 front ends", conversations, 2),
    ("fast conversations, 4 front ends", fast_conversations, 4),
    ("too many conversations", many_conversations, 1),
]
