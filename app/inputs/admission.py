"""What the checks of an admitted request's body need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from app.inputs.tokenizer import TokenizerLoader
from titopool.deadline import Deadline
from titopool.wire.messages import WorkerFacts

Result = TypeVar("Result")


@dataclass(frozen=True)
class Admission:
    """An admitted request: its tokenizer, model and deadline."""

    tokenizer: TokenizerLoader
    # The model that the request is checked for, and that must run it.
    facts: WorkerFacts
    deadline: Deadline

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline.left_s

    def use_tokenizer(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls `function(tokenizer, *arguments)` in the tokenizer's thread, until the deadline."""
        return self.tokenizer.use(function, *arguments, facts=self.facts, timeout_s=self.left_s)
