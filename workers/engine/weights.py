"""What weight updates and pauses need of an engine, and its implementation on vLLM's AsyncLLM.

Runs in: each worker process, on its event loop. No call has a timeout: vLLM's utility calls hang when
the engine process has ended, so the caller cancels them. The `timeout` of vLLM's `collective_rpc` must
not be used: the next call would get the late answer.
"""

import asyncio
from collections.abc import Collection
from typing import Any, Protocol

from titopool.errors import InvalidRequest, WeightUpdateFailed
from titopool.wire.pool_state import PauseMode
from workers.engine.versions import Progress, Versions

VLLM_MODES = {"keep": "keep", "drain": "wait", "abort": "abort"}
# Outputs may reach their requests this long after the engine has paused.
SETTLE_S = 0.02
MAX_SETTLES = 100


class EngineBroken(Exception):
    """A process that holds the model can take no more updates: the worker must restart."""


class WeightEngine(Protocol):
    """The engine's side of updates and pauses."""

    # Whether requests in flight can continue with new weights.
    can_keep: bool

    async def call(self, method: str, *args: Any) -> list[Any]:
        """The result of a method of `Host` (`workers/in_model/host.py`) in each process of the model.

        Raises:
            InvalidRequest: a process refused.
            WeightUpdateFailed: a process failed, or refused an update that another has begun.
            EngineBroken: a process can take no more updates.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Pauses generation and returns when no step runs; new requests wait."""

    async def resume(self) -> None:
        """Resumes generation."""

    async def clear_caches(self) -> None:
        """Empties the prefix and encoder caches; generation must be paused.

        Raises:
            WeightUpdateFailed: the prefix cache could not be cleared.
        """

    async def keep_keys(self) -> None:
        """Leaves keys and values to the requests that are open now, and empties the encoder cache."""

    async def progress(self) -> Progress:
        """Token counts of the requests that are open now; generation must be paused."""

    async def abort_requests(self, request_ids: Collection[str] | None) -> int:
        """Ends requests in flight with the tokens that they have; returns how many there were.

        Args:
            request_ids: the clients' ids; None: all requests.
        """

    def count_tokens(self, request_ids: Collection[str]) -> dict[str, int]:
        """Tokens of the unfinished completions of requests in flight, by the clients' ids."""


class VllmWeights:
    """`WeightEngine` of one AsyncLLM."""

    def __init__(self, llm: Any, versions: Versions):
        self._llm = llm
        self._versions = versions
        # vLLM 0.32 drops images whose keys and values it found in the prefix cache. A request that
        # continues computes the keys and values again, and the engine dies without the images.
        self.can_keep = not (llm.model_config.is_multimodal_model and _strips_images())

    async def call(self, method: str, *args: Any) -> list[Any]:
        answers = await self._llm.collective_rpc("titopool", args=(method, *args))
        # If one process refuses and another has begun to receive, the session must end.
        has_begun = method == "begin" and any(kind == "ok" for kind, _ in answers)
        for kind, value in answers:
            if kind == "refused" and not has_begun:
                raise InvalidRequest(value)
            if kind == "broken":
                raise EngineBroken(value)
            if kind != "ok":
                raise WeightUpdateFailed(value)
        return [value for _, value in answers]

    async def pause(self, mode: PauseMode) -> None:
        # AsyncLLM.pause_generation sleeps afterwards for outputs to arrive; `progress` does not need it.
        core = self._llm.engine_core
        if mode == "abort":
            # Those that wait run with what comes.
            self._versions.stop_jobs(None, waiting=False)
        await core.pause_scheduler_async(mode=VLLM_MODES[mode], clear_cache=False)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def keep_keys(self) -> None:
        states = self._llm.output_processor.request_states.values()
        prefilling = [one.external_req_id for one in states if one.is_prefilling]
        if unscored := self._versions.keep_keys(prefilling):
            await self._llm.abort(unscored)
        await self._llm.reset_encoder_cache()

    async def clear_caches(self) -> None:
        self._versions.clear_keys()
        # Requests that continue drop their keys and values and compute them again. The engine's
        # cache of processed images stays: it does not depend on weights, and `SentImages` counts on it.
        is_clear, *_ = await asyncio.gather(
            self._llm.reset_prefix_cache(reset_running_requests=True),
            self._llm.reset_encoder_cache(),
        )
        if not is_clear:
            raise WeightUpdateFailed("vLLM could not clear its prefix cache")

    async def progress(self) -> Progress:
        # Requests that arrive during the pause have no tokens and must not prolong the wait.
        waiting_for = set(self._versions.open)
        # Outputs from before the pause may still be in this process's queues.
        found, num_equal = self._count(waiting_for), 0
        while num_equal < MAX_SETTLES:
            still_open = waiting_for & self._versions.open
            if not still_open or (num_equal and still_open <= found.keys()):
                break
            await asyncio.sleep(SETTLE_S)
            found, last = self._count(waiting_for), found
            num_equal = num_equal + 1 if found == last else 0
        return found

    async def abort_requests(self, request_ids: Collection[str] | None) -> int:
        ids = list(
            self._versions.open if request_ids is None else self._versions.named(request_ids)
        )
        num_jobs = self._versions.stop_jobs(request_ids)
        if ids:
            await self._llm.abort(ids)
        return num_jobs

    def count_tokens(self, request_ids: Collection[str]) -> dict[str, int]:
        names = self._versions.client_ids_of(request_ids)
        totals: dict[str, int] = {}
        for request_id, num_tokens in self._count(names.keys()).items():
            name = names[request_id]
            totals[name] = totals.get(name, 0) + num_tokens
        return totals

    def _count(self, request_ids: Collection[str]) -> dict[str, int]:
        """Tokens of `request_ids`, as far as these requests are open."""
        return {
            state.external_req_id: state.detokenizer.num_output_tokens()
            for state in self._llm.output_processor.request_states.values()
            if state.external_req_id in request_ids and state.detokenizer is not None
        }


def _strips_images() -> bool:
    from vllm.v1.core.sched import output

    return hasattr(output, "strip_covered_mm_data")
