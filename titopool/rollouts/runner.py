"""Many rollouts at once, with tools or an environment between their turns."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

from titopool.client.sync_client import Client
from titopool.conversations.interface import ContextFull, Message
from titopool.rollouts.groups import Groups, StoppableClient, abort, stop
from titopool.rollouts.rollout import Rollout, derived_seed, make_renderer
from titopool.rollouts.tools import (
    Tool,
    ToolCall,
    answers,
    calls_of,
    check_blocking,
    schemas_of,
)

logger = logging.getLogger(__name__)

# Called after a turn: the messages that answer it, or None to end the rollout.
Environment: TypeAlias = Callable[[Rollout], Iterable[Message] | Message | None]
# How often an aborted completion goes on: a trainer may abort with every update.
MAX_RESUMES = 100


def run_rollouts(
    client: Client,
    prompts: Sequence[Any],
    *,
    tools: Sequence[Tool] = (),
    environment: Environment | None = None,
    parse_tool_calls: Callable[[str], Sequence[ToolCall]] | None = None,
    closes_thoughts: bool = False,
    n: int = 1,
    num_needed: int | None = None,
    max_turns: int = 8,
    concurrency: int = 64,
    progress: bool = False,
    tokenizer: Any = None,
    rollout_options: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> list[Rollout]:
    """Plays n rollouts of each prompt to their end.

    After a turn, the calls of `tools` in its text are run. A turn without calls goes to
    `environment`. Without one, it ends the rollout.

    A failure ends only its rollout, which has the exception as `error`; its tokens so far stay. A
    completion that an update or a pause aborts goes on from its ids. `stop_reason` of a rollout is
    `answered` (a turn called no tool), `environment` (it returned None), `max_turns`, `context`
    (no room within `max_context`), `error`, or the finish reason of a turn that did not end itself
    (`length`, `repetition`, `abort`): such a turn goes to `environment`, never to tools. One that was
    cut within a thought ends its rollout, but with `closes_thoughts`.

    Ctrl-C stops the generation of all rollouts, on the server too.

    With `num_needed`, more prompts play than a batch needs, so that it need not wait for the
    longest completions. The batch then has fewer long completions than the model writes, and a
    policy that learns from it learns to be brief: keep the surplus small, compare lengths with those
    of a run without `num_needed`, and play dropped prompts again, which lessens the bias.

    Args:
        prompts: conversations (lists of messages), or lists of token ids.
        tools: functions whose schemas the template gets; see `schemas_of`. They run in threads, up
            to `concurrency` at once, so they must be safe to call from several threads.
        environment: gets the rollout after a turn, and returns the messages that answer it.
        parse_tool_calls: finds the calls in a turn's text. None: those outside of thoughts, as the
            model's family writes them where `Rollout.info` names one, or in Hermes' form.
        closes_thoughts: a turn that was cut within a thought goes on after the thought's end, whose
            ids do not count for the loss, in place of ending the rollout. That takes one of `max_turns`.
        n: rollouts of each prompt. With a `seed`, each draws random numbers of its own, in each turn
            (`derived_seed` of the prompt, the sample and the turn).
        num_needed: how many groups, each of a prompt's n rollouts, are returned: the first ones of
            which all rollouts end without an `error`. One with an error is returned only if all
            groups have ended and too few are without. The others are aborted, on the server too; a
            tool or an environment that runs for them in a thread ends by itself, and Python waits
            for it at its exit: give tools a timeout. None: all groups.
        max_turns: the most turns of the model in a rollout.
        concurrency: how many rollouts play at once.
        progress: shows a bar (tqdm).
        tokenizer: as for `Rollout`.
        rollout_options: further arguments of `Rollout`.
        sampling: options of `Rollout.generate`.

    Returns:
        Prompt-major, in the order of the prompts. A rollout's `prompt_index` is the place of its
        prompt in `prompts`.

    Raises:
        ValueError: an argument or a prompt is not usable; nothing has run.
        asyncio.CancelledError: the client was stopped.
    """
    check_blocking(tools, "tools")
    check_blocking([environment] if environment else [], "environment")
    if not isinstance(sampling.get("seed"), SupportsIndex | None):
        raise ValueError(f"seed: expected an integer, got {sampling['seed']!r}")
    if min(n, max_turns, concurrency) < 1:
        raise ValueError("n, max_turns, concurrency: expected at least 1")
    counts = range(1, len(prompts) + 1)
    if num_needed is not None and (type(num_needed) is not int or num_needed not in counts):
        raise ValueError(
            f"num_needed: expected an integer from 1 to {len(prompts)}, the number of prompts, got "
            f"{num_needed!r}"
        )
    options = dict(rollout_options or {})
    schemas = [*schemas_of(tools), *options.pop("tools", ())]
    template_kwargs = options.pop("chat_template_kwargs", None)
    options["renderer"] = make_renderer(client, tokenizer, schemas, template_kwargs)
    rollouts = [
        _begin(StoppableClient(client), prompt, index, options)
        for index, prompt in enumerate(prompts)
        for _ in range(n)
    ]
    groups = Groups(rollouts, n, num_needed or len(prompts))
    play = _Play(
        tools={tool.__name__: tool for tool in tools},
        environment=environment,
        parse=parse_tool_calls,
        closes_thoughts=closes_thoughts,
        max_turns=max_turns,
        sampling={"num_resumes": MAX_RESUMES, **sampling},
    )
    tasks = [(one, index % n) for index, one in enumerate(rollouts)]
    try:
        _in_threads(play.run, tasks, concurrency, progress, groups.are_enough)
    except asyncio.CancelledError:
        # The client was stopped, and its requests with it; or a tool raised it.
        stop(rollouts)
        raise
    except BaseException:
        abort(client, rollouts)
        raise
    needed, others = groups.split()
    abort(client, others)
    for one in needed:
        one.client = client
    return needed


def _begin(client: Any, prompt: Any, index: int, options: Mapping[str, Any]) -> Rollout:
    is_chat = len(prompt) > 0 and isinstance(prompt[0], Mapping)
    rollout = Rollout(client, **{"messages" if is_chat else "ids": prompt}, **options)
    rollout.prompt_index = index
    return rollout


@dataclass(frozen=True)
class _Play:
    """What the rollouts of a run have in common."""

    tools: Mapping[str, Tool]
    environment: Environment | None
    parse: Callable[[str], Sequence[ToolCall]] | None
    closes_thoughts: bool
    max_turns: int
    sampling: Mapping[str, Any]

    def run(self, rollout: Rollout, index: int) -> None:
        """Plays a rollout to its end; `index` is its place in the group."""
        sampling = dict(self.sampling)
        if (seed := sampling.get("seed")) is not None:
            sampling["seed"] = derived_seed(seed, rollout.prompt_index or 0, index)
        try:
            rollout.stop_reason = self._play(rollout, sampling)
        except ContextFull:
            rollout.stop_reason = "context"
        except Exception as error:
            rollout.stop_reason, rollout.error = "error", error
            logger.warning(
                "rollout %s ended: %s: %s", rollout.session_id, type(error).__name__, error
            )

    def _play(self, rollout: Rollout, sampling: Mapping[str, Any]) -> str:
        for left in range(self.max_turns - 1, -1, -1):
            finish_reason = rollout.generate(**sampling).finish_reason
            if self.closes_thoughts and left and finish_reason == "length" and rollout.is_thinking:
                rollout.close_thought()
                continue
            messages, stop_reason = self._answer(rollout, finish_reason)
            if messages is None:
                return stop_reason
            if left:
                rollout.add(messages)
        return "max_turns"

    def _answer(self, rollout: Rollout, finish_reason: str) -> tuple[Any, str]:
        """The messages that answer the last turn; None with the reason to stop."""
        if self.tools and finish_reason == "stop" and (calls := self._calls(rollout)):
            return list(answers(calls, self.tools)), ""
        if self.environment is not None:
            if finish_reason != "stop" and rollout.is_thinking:
                # What follows would stand within the thought.
                return None, finish_reason
            return self.environment(rollout), "environment"
        return None, "answered" if finish_reason == "stop" else finish_reason

    def _calls(self, rollout: Rollout) -> Sequence[ToolCall]:
        if self.parse is not None:
            return self.parse(rollout.last_text)
        said = rollout.last_said
        return calls_of(said, rollout.last_text) if said is not None else ()


def _in_threads(
    run: Callable[[Rollout, int], None],
    tasks: Sequence[tuple[Rollout, int]],
    concurrency: int,
    progress: bool,
    are_enough: Callable[[Rollout], bool],
) -> None:
    """Runs tasks until all, or enough, have ended.

    That, and what interrupts the caller, cancels those that have not begun. It waits for none.
    """
    pool = ThreadPoolExecutor(min(concurrency, len(tasks)) or 1, "rollout")
    try:
        futures = {pool.submit(run, *task): task[0] for task in tasks}
        ended: Iterable[None] = _until_enough(futures, are_enough)
        if progress:
            from tqdm import tqdm

            ended = tqdm(ended, total=len(futures), unit="rollout")
        for _ in ended:
            pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _until_enough(
    futures: Mapping[Future[None], Rollout], are_enough: Callable[[Rollout], bool]
) -> Iterator[None]:
    """Yields after each future."""
    for future in as_completed(futures):
        future.result()
        yield
        if are_enough(futures[future]):
            return
