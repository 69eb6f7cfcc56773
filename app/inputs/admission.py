"""An admitted request: what its checks and its generation need."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from app.inputs.tokenizer import TokenizerLoader
from app.pool.link import Link
from titopool.deadline import Deadline
from titopool.errors import ModelNotFound
from titopool.settings.config import ServerConfig
from titopool.wire.commands import GetStatus
from titopool.wire.messages import WorkerFacts

Result = TypeVar("Result")


@dataclass(frozen=True)
class Admission:
    """One HTTP request that counts against `max_open_requests` until `at_end` is closed."""

    config: ServerConfig
    link: Link
    tokenizer: TokenizerLoader
    # Of the model that the request is checked for; workers with another model do not run it.
    facts: WorkerFacts
    deadline: Deadline
    # Closed when the handler returns. A streamed response takes it over with `pop_all`.
    at_end: ExitStack
    # The client's id of the request, else one that is made here.
    client_id: str = ""

    def use_tokenizer(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Runs `function(tokenizer, *arguments)` in the tokenizer's thread."""
        return self.tokenizer.use(
            function, *arguments, facts=self.facts, timeout_s=self.deadline.left_s
        )

    def adapter_named(self, name: str | None, param: str = "model") -> str:
        """The LoRA adapter that a body requests by `name`; "" for the base model.

        Raises:
            ModelNotFound: neither the model nor an adapter has this name.
        """
        if name is None or name == self.facts.model:
            return ""
        if name not in self.link.adapters and self.facts.max_loras:
            # Another front end may have just loaded it. Each worker sends its adapters before it
            # answers GetStatus.
            commands = self.link.commands
            commands.gather_outcomes(commands.reachable_workers(), GetStatus())
        if name not in self.link.adapters:
            names = ", ".join(map(repr, [self.facts.model, *sorted(self.link.adapters)]))
            raise ModelNotFound(f"{param}: expected {names}, got {name!r}", param=param)
        return name
