"""An admitted request: what its checks and its generation need."""

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from app.call.open_requests import OpenRequest
from app.http.budget import Reservation
from app.http.connections import check_client
from app.http.keys import NO_KEY, Key
from app.http.request_ids import adopt
from app.inputs.chat_template import Chat, length_of, render_all
from app.inputs.tokenizer import TokenizerLoader, batches_of, encode_all
from app.pool.link import Link
from app.pool.request import CountBytes, Request, count_nothing
from titopool.deadline import Deadline
from titopool.errors import ModelNotFound
from titopool.settings.config import ServerConfig
from titopool.wire.commands import GetStatus
from titopool.wire.messages import WorkerFacts

Result = TypeVar("Result")
# Characters of a session's id that count, which bounds the time to hash it.
SESSION_LENGTH = 256


class _AllEnded(Exception):
    """Ends a wait for memory that the request no longer needs."""


def name_of(key: Key, request_id: str) -> str:
    """The name under which a request's log-probabilities are kept."""
    return f"{key.name}\n{request_id}"


def session_key(session_id: str | None) -> str:
    """What routing uses of a session's id; "" for none."""
    return (session_id or "")[:SESSION_LENGTH]


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
    # The client's session; "": none. Requests of a session prefer the same worker.
    session: str = ""
    # The client's connection; None under Flask's test client.
    client: socket.socket | None = None
    # What the request has taken of the front end's memory budget.
    reservation: Reservation | None = None
    # The client's key.
    key: Key = NO_KEY
    # Keeps the log-probabilities of the answer under a name; None: they are not kept.
    keep_logprobs: Callable[[str, Sequence[np.ndarray]], None] | None = None
    # For `GET /requests`.
    shown: OpenRequest = field(default_factory=lambda: OpenRequest("", "", "", ""))

    @property
    def kept_name(self) -> str:
        """Another key's request of the same id has another name."""
        return name_of(self.key, self.client_id)

    def identified(self, request_id: str | None, session_id: str | None) -> "Admission":
        """The admission with the ids of a body: a header's request id wins over the body's, the
        body's session over a header's."""
        session = session_key(session_id) or self.session
        self.shown.id = adopt(request_id)
        return replace(self, client_id=self.shown.id, session=session)

    def keep_memory(self, num_bytes: int) -> None:
        """Sets what the request takes, beside the text of its body, to `num_bytes`."""
        if self.reservation is not None:
            self.reservation.keep(self.reservation.num_body_bytes + num_bytes)

    def expect_results(self, request: Request) -> None:
        """Waits for room for the results of `request`, or until a client has ended all of its jobs.

        Raises:
            TitopoolError: as `Reservation.wait_for`.
        """
        shown, bounds = self.shown, request.bounds
        shown.hold(request)

        def check() -> None:
            check_client(self.client)
            if shown.has_ended:
                raise _AllEnded

        if self.reservation is None:
            return
        # A result is there twice while it is taken out of its message.
        most = sum(bounds) + max(bounds, default=0)
        # If all have ended, they end without a token, which needs no room.
        with suppress(_AllEnded):
            check()
            self.reservation.expect(
                most, self.deadline.left_s, check, partial(self.link.fail, request)
            )

    def settle_results(self) -> None:
        """All results have arrived."""
        if self.reservation is not None:
            self.reservation.settle()

    @property
    def count_results(self) -> CountBytes:
        """Counts the memory of results.

        It refers to the reservation only. The admission and `app.pool.request.Request`, which keeps
        it, would be a cycle, and the request's jobs would stay until garbage is collected.
        """
        if self.reservation is None:
            return count_nothing
        return self.reservation.receive

    def use_tokenizer(
        self,
        function: Callable[..., Result],
        *arguments: Any,
        size: int = 0,
        is_short: bool = False,
    ) -> Result:
        """Runs `function(tokenizer, *arguments)` in the tokenizer's thread.

        Args:
            size, is_short: as of `TokenizerLoader.use`.

        Raises:
            TitopoolError: as `TokenizerLoader.use`.
        """
        return self.tokenizer.use(
            function, *arguments,
            facts=self.facts, timeout_s=self.deadline.left_s, size=size, is_short=is_short,
            client=self.client,
        )  # fmt: skip

    def encode(
        self,
        texts: Sequence[str],
        locations: Sequence[str],
        *,
        with_special_tokens: bool = True,
        is_truncated: bool = False,
    ) -> list[list[int]]:
        """The token ids of each text, as `encode_all`; long lists in several turns."""
        ids = []
        for batch, size in batches_of([len(text) for text in texts]):
            ids += self.use_tokenizer(
                encode_all, texts[batch], locations[batch], self.facts.max_model_len,
                with_special_tokens, is_truncated, size=size,
            )  # fmt: skip
        return ids

    def render(self, chats: Sequence[Chat], *, is_truncated: bool = False) -> list[list[int]]:
        """The token ids of each conversation, as `render_all`; long lists in several turns."""
        ids = []
        for batch, size in batches_of([length_of(chat) for chat in chats]):
            ids += self.use_tokenizer(
                render_all, chats[batch], self.facts.max_model_len, is_truncated, size=size
            )
        return ids

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
