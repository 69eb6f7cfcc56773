"""Sessions of agents, which the server keeps: made by `Client.session` and `AsyncClient.session`.

Runs in: trainers and agents. The sessions of HTTP are those of `titopool/client/sessions.py`.
"""

import functools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar
from urllib.parse import quote

from titopool.answers.sessions import SessionAnswer, SessionMade
from titopool.client import answers, bodies
from titopool.client.answers import Answer
from titopool.client.results import SessionSample
from titopool.errors import SessionEnded, TitopoolError

logger = logging.getLogger(__name__)

R = TypeVar("R")
# A client's request for a path.
Call = Callable[..., Coroutine[Any, Any, Answer]]
# Runs to its end what it gets an asynchronous client for.
Run = Callable[[Callable[[Any], Coroutine[Any, Any, Any]]], Any]


class AsyncSession:
    """A session, whose turns the server remembers as token ids; an asynchronous context manager."""

    def __init__(self, call: Call, server_url: str, made: SessionMade):
        self._call = call
        # 128 random bits in hexadecimal.
        self.id = made.session_id
        # For packages that speak to OpenAI's API; those of Anthropic's take it without `/v1`.
        self.base_url = server_url + made.path
        # Opens this session's generating routes and nothing else.
        self.api_key = made.key
        self._path = f"/sessions/{quote(self.id, safe='')}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        """As `end`; an error of the block goes before one of `end`, which is logged."""
        try:
            await self.end()
        except TitopoolError as error:
            if kind is None:
                raise
            logger.warning("a session did not end: %s", error)

    async def read(self) -> SessionAnswer:
        """The session's turns and usage.

        Raises:
            SessionNotFound: the server does not know it any more.
            SessionEnded: it has ended, or had no call for too long.
            TitopoolError: the server's error by its code, or why there was no answer.
        """
        answer = await self._call(f"{self._path}?records=false")
        return answers.json_answer(answer, SessionAnswer)

    async def samples(self) -> list[SessionSample]:
        """What was sent and sampled: a sample for each turn that nothing goes on from, in their order.

        Raises:
            TitopoolError: as `read`.
        """
        accept = {"Accept": answers.MSGPACK}
        return answers.samples_of(await self._call(f"{self._path}/samples", headers=accept))

    async def end(self) -> None:
        """Ends the session and its requests that run; the server forgets its turns. One that has ended
        stays so.

        Raises:
            TitopoolError: as `read`, but SessionEnded.
        """
        try:
            await self._call(self._path, method="DELETE")
        except SessionEnded:
            pass


def _blocking(
    method: Callable[[AsyncSession], Coroutine[Any, Any, R]],
) -> Callable[["Session"], R]:
    @functools.wraps(method)
    def call(self: "Session") -> R:
        found: R = self.run(lambda _: method(self.session))
        return found

    return call


class Session:
    """A session, whose turns the server remembers as token ids; a context manager that ends it."""

    def __init__(self, run: Run, session: AsyncSession):
        self.run, self.session = run, session
        self.id, self.base_url, self.api_key = session.id, session.base_url, session.api_key

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.run(lambda _: self.session.__aexit__(*error))

    read = _blocking(AsyncSession.read)
    samples = _blocking(AsyncSession.samples)
    end = _blocking(AsyncSession.end)


def body_of(metadata: Mapping[str, Any] | None) -> bytes:
    """The body that makes a session.

    Raises:
        InvalidRequest: JSON has no such value.
    """
    return bodies.json_body({"metadata": dict(metadata or {})})
