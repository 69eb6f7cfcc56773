"""Agents as they are: functions or commands that get a base URL and a key, each in a session of its own.

What an agent sent and sampled comes from its session, so the agent need not know of token ids.
"""

import asyncio
import functools
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import numpy as np

from titopool.client.agent_sessions import AsyncSession
from titopool.client.async_client import AsyncClient
from titopool.client.results import SessionSample
from titopool.client.sync_client import Client
from titopool.client.weights.trainer_group import run_in_thread
from titopool.errors import TitopoolError
from titopool.rollouts.agent_commands import environment_of, output_of
from titopool.rollouts.sequence import NO_VERSION, RolloutArrays, versions_of
from titopool.rollouts.tools import is_coroutine_function

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
# Gets the base URL, the key and the task.
Agent: TypeAlias = Callable[[str, str, Any], Any]
# Gets the base URL and the key.
Play: TypeAlias = Callable[[str, str], Coroutine[Any, Any, Any]]
# For an agent that was told to end, and for its session.
GRACE_S, END_TIMEOUT_S = 10.0, 30.0


@dataclass(frozen=True, eq=False)
class AgentRun:
    """What one agent did."""

    # The place of its task in `tasks`.
    task_index: int
    # None: no session could be made.
    session_id: str | None
    # In the order of the session's turns; also of an agent that failed.
    samples: tuple[SessionSample, ...]
    # What the function returned, or what the command wrote to its standard output; None: it failed.
    value: Any
    # The agent's exception; TimeoutError: it ran longer than `agent_timeout_s`;
    # subprocess.CalledProcessError: the command's exit status (`returncode`, with `stderr`) was not 0.
    error: BaseException | None

    def sequences(self) -> list[RolloutArrays]:
        """The samples for `pad_rollouts`; `samples` has the images and routed experts of each."""
        return [_arrays_of(one) for one in self.samples]


async def run_agents_async(
    client: AsyncClient,
    tasks: Sequence[Any],
    *,
    agent: Agent | None = None,
    command: Sequence[str] | Callable[[Any], Sequence[str]] | None = None,
    n: int = 1,
    concurrency: int = 64,
    agent_timeout_s: float = 600.0,
    metadata: Mapping[str, Any] | None = None,
    with_retried: bool = False,
) -> list[AgentRun]:
    """Runs n agents for each task, each in a session of its own, which ends with its agent.

    An agent that fails, hangs or dies costs its own run only, which has the exception as `error`.

    Args:
        agent: a function of the base URL (which ends in `/v1`), the key and the task. A coroutine
            function runs in the event loop of `client`, any other one in a thread. A thread cannot be
            stopped: after `agent_timeout_s` its requests fail, as their session has ended.
        command: in place of `agent`: a command and its arguments, or a function of the task that
            returns them. It gets OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
            ANTHROPIC_API_KEY and, as JSON, TITOPOOL_TASK, and none of the caller's variables
            TITOPOOL_…, whose keys open more. What it has started ends with it.
        n: agents of each task.
        concurrency: how many agents run at once.
        agent_timeout_s: of each agent.
        metadata: of each session.
        with_retried: also samples that the agent asked for again and did not go on from.

    Returns:
        Task-major, in the order of the tasks.

    Raises:
        ValueError, TypeError: an argument or a task is not usable; nothing has run.
    """
    if (agent is None) == (command is None):
        raise ValueError("agent, command: expected one of them, got both or neither")
    if min(n, concurrency) < 1 or not agent_timeout_s > 0:
        raise ValueError(
            "n, concurrency, agent_timeout_s: expected at least 1, 1 and a positive number, got "
            f"{n!r}, {concurrency!r} and {agent_timeout_s!r}"
        )
    plays = [_of_agent(agent, one) if agent else _of_command(command, one) for one in tasks]
    slots = asyncio.Semaphore(concurrency)

    async def run(index: int, play: Play) -> AgentRun:
        async with slots:
            return await _run(client, index, play, agent_timeout_s, metadata, with_retried)

    running = [
        asyncio.create_task(run(index, play)) for index, play in enumerate(plays) for _ in range(n)
    ]
    if not running:
        return []
    try:
        await asyncio.wait(running)
    except asyncio.CancelledError:
        for one in running:
            one.cancel()
        # Each ends its agent and its session first, within its deadlines.
        await asyncio.wait(running)
        raise
    return [one.result() for one in running]


def _blocking(
    run: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Client, P], R]:
    @functools.wraps(run)
    def call(client: Client, /, *args: P.args, **options: P.kwargs) -> R:
        have_ended = threading.Event()
        have_ended.set()

        async def whole(one: AsyncClient) -> R:
            have_ended.clear()
            try:
                return await run(one, *args, **options)
            finally:
                have_ended.set()

        try:
            return client._run(whole)
        except BaseException:
            # After Ctrl-C the process may exit; the sessions end first.
            have_ended.wait(GRACE_S + END_TIMEOUT_S)
            raise

    return call


run_agents = _blocking(run_agents_async)


async def _run(
    client: AsyncClient,
    index: int,
    play: Play,
    timeout_s: float,
    metadata: Mapping[str, Any] | None,
    with_retried: bool,
) -> AgentRun:
    try:
        session = await client.session(metadata)
    except TitopoolError as refused:
        return AgentRun(index, None, (), None, refused)
    try:
        value, error = await _outcome(play(session.base_url, session.api_key), timeout_s)
        try:
            samples = await session.samples()
        except TitopoolError as unread:
            return AgentRun(index, session.id, (), value, error or unread)
        kept = tuple(one for one in samples if with_retried or not one.was_retried)
        return AgentRun(index, session.id, kept, value, error)
    finally:
        await _end(session)


async def _end(session: AsyncSession) -> None:
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await session.end()
    except (TitopoolError, TimeoutError) as error:
        # The server ends it when it has had no call for long.
        logger.warning("a session did not end: %s: %s", type(error).__name__, error)


async def _outcome(
    playing: Coroutine[Any, Any, Any], timeout_s: float
) -> tuple[Any, BaseException | None]:
    """What an agent returned, and why it failed."""
    task = asyncio.create_task(_contained(playing))
    # One that goes on after its cancel may fail when nobody awaits it any more.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        is_late = not task.done()
    finally:
        if task.cancel():
            await asyncio.wait({task}, timeout=GRACE_S)
    if is_late:
        late = (
            f"expected an agent to end within {timeout_s:g} s (agent_timeout_s), got one that runs"
        )
        return None, TimeoutError(f"{late}; raise it, or give the agent fewer turns")
    if task.cancelled():
        return None, RuntimeError("expected an agent to end by itself, got one that was cancelled")
    error = task.exception()
    return (None, error) if error else (task.result(), None)


async def _contained(playing: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await playing
    except SystemExit as error:
        # It would end the event loop.
        raise RuntimeError(f"expected an agent to return, got {error!r}") from error


def _of_agent(agent: Agent, task: Any) -> Play:
    async def play(base_url: str, api_key: str) -> Any:
        if is_coroutine_function(agent):
            return await agent(base_url, api_key, task)
        ended = asyncio.wrap_future(run_in_thread(lambda: agent(base_url, api_key, task)))
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A cancel must not cancel the future, which the thread sets.
        return await asyncio.shield(ended)

    return play


def _of_command(command: Any, task: Any) -> Play:
    encoded = json.dumps(task, allow_nan=False)
    arguments = command(task) if callable(command) else command
    if isinstance(arguments, str) or not arguments:
        raise ValueError(f"command: expected a list of arguments, got {arguments!r}")

    async def play(base_url: str, api_key: str) -> str:
        own = environment_of(base_url, api_key, encoded)
        return await output_of(arguments, own)

    return play


def _arrays_of(sample: SessionSample) -> RolloutArrays:
    is_counted = sample.loss_mask == 1
    versions = versions_of(sample.weight_versions, len(sample.ids))
    return RolloutArrays(
        ids=sample.ids,
        attention_mask=np.ones(len(sample.ids), np.int8),
        loss_mask=is_counted.astype(np.int8),
        logprobs=np.where(is_counted, sample.logprobs, np.float32(0)),
        weight_versions=np.where(is_counted, versions, NO_VERSION),
        image_ranges=np.array(sample.image_ranges, np.int32).reshape(-1, 2),
    )
