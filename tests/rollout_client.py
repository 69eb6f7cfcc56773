"""A client that answers with completions that a test has written."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Written:
    """A completion."""

    ids: np.ndarray
    finish_reason: str = "stop"
    weight_versions: Sequence[tuple[int, int]] = ((0, 0),)

    @property
    def logprobs(self) -> np.ndarray:
        return -(1 + np.arange(len(self.ids), dtype=np.float32))


@dataclass
class Answer:
    prompt_ids: np.ndarray
    completions: tuple[Written, ...]


@dataclass
class WritingClient:
    """Answers each call of `generate` with the next completion, and keeps the calls."""

    completions: list[Written]
    prompts: list[list[int]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def generate(self, prompts: Any, **options: Any) -> list[Answer]:
        (prompt,) = prompts
        self.prompts.append(list(prompt))
        self.calls.append(options)
        return [Answer(np.asarray(prompt, np.int32), (self.completions.pop(0),))]


def written(tokenizer: Any, text: str, finish_reason: str = "stop", **options: Any) -> Written:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Written(np.array(ids, np.int32), finish_reason, **options)
