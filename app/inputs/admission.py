"""A request that this process has taken on, as the checks of its body know it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from app.inputs.tokenizer import TokenizerLoader
from titopool.wire.messages import WorkerFacts

Result = TypeVar("Result")


@dataclass(frozen=True)
class Admission:
    """What a request is checked with."""

    tokenizer: TokenizerLoader
    # Of the model that it is checked for, and that must run it.
    facts: WorkerFacts
    # Monotonic seconds.
    deadline: float

    @property
    def left_s(self) -> float:
        """Seconds until its deadline."""
        return self.deadline - time.monotonic()

    def use_tokenizer(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """`function(tokenizer, *arguments)`, in the tokenizer's thread."""
        return self.tokenizer.use(function, *arguments, facts=self.facts, timeout_s=self.left_s)
