"""Clients for rollouts: one answers with completions that a test has written, one asks a server."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from titopool import Client, PromptResult


@dataclass
class Written:
    """A completion."""

    ids: np.ndarray
    finish_reason: str = "stop"
    weight_versions: Sequence[tuple[int, int]] = ((0, 0),)
    logprobs: Any = None

    def __post_init__(self):
        if self.logprobs is None:
            self.logprobs = -(1 + np.arange(len(self.ids), dtype=np.float32))


@dataclass
class Answer:
    prompt_ids: np.ndarray
    completions: tuple[Written, ...]
    # Offset and length of each image.
    image_ranges: Any = ()


@dataclass
class WritingClient:
    """Answers each call of `generate` with the next completion, and keeps the calls."""

    completions: list[Written]
    prompts: list[list[int]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)

    def generate(self, prompts: Any, **options: Any) -> list[Answer]:
        (prompt,) = prompts
        self.prompts.append(list(prompt))
        self.calls.append(options)
        completion = self.completions.pop(0)
        self.sampled.append(completion.ids.tolist())
        return [Answer(np.asarray(prompt, np.int32), (completion,))]


def written(tokenizer: Any, text: str, finish_reason: str = "stop", **options: Any) -> Written:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Written(np.array(ids, np.int32), finish_reason, **options)


class RecordingClient(Client):
    """titopool's client; keeps the prompts."""

    def __init__(self, url: str):
        super().__init__(url)
        self.prompts: list[list[int]] = []

    def generate(self, prompts: Any, **options: Any) -> list[PromptResult]:
        self.prompts += [np.asarray(prompt).tolist() for prompt in prompts]
        return super().generate(prompts, **options)
