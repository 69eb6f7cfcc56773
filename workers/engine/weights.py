"""What weight updates and pauses need of vLLM's AsyncLLM.

`WeightEngine` is what `workers/serving/control.py` asks for; `VllmWeights` is the only one that is
shipped. No call has a limit of its own: vLLM's utility calls hang when the engine is gone, so the
caller sets one. None may be cancelled and repeated in place of an answer that is late: see
`collective_rpc` in vLLM.
"""

import asyncio
from collections.abc import Collection
from typing import Any, Protocol

from titopool.errors import InvalidRequest, WeightUpdateFailed
from titopool.wire.commands import PauseMode
from workers.engine.versions import Progress, Versions

VLLM_MODES = {"keep": "keep", "drain": "wait", "abort": "abort"}
# How long outputs may be on their way to their requests once the engine stands.
SETTLE_S = 0.02
MAX_SETTLES = 100


class EngineBroken(Exception):
    """A process that holds the model can take no more updates: the worker must start again."""


class WeightEngine(Protocol):
    """The engine as updates see it."""

    # Whether requests under way can go on with other weights.
    can_keep: bool

    async def call(self, method: str, *args: Any) -> list[Any]:
        """What `titopool_weights_<method>` gives in each process that holds the model.

        Raises:
            InvalidRequest: a process refused.
            WeightUpdateFailed: it failed in one, or one refused what another has begun.
        """

    async def pause(self, policy: PauseMode) -> None:
        """Returns when no step runs; new requests wait from now on."""

    async def resume(self) -> None:
        """Goes on."""

    async def clear_caches(self) -> None:
        """Empties prefix, multimodal and encoder caches; generation must stand.

        Raises:
            WeightUpdateFailed: what is cached could not be cleared.
        """

    async def progress(self) -> Progress:
        """Tokens of the requests that are open when it is called; generation must stand."""


class VllmWeights:
    """One AsyncLLM."""

    def __init__(self, llm: Any, versions: Versions):
        self._llm = llm
        self._versions = versions
        # vLLM 0.32 forgets images whose keys and values were found in the prefix cache; a request
        # that is kept computes them again, and the engine ends for want of them.
        self.can_keep = not (llm.model_config.is_multimodal_model and _strips_images())

    async def call(self, method: str, *args: Any) -> list[Any]:
        answers = await self._llm.collective_rpc(f"titopool_weights_{method}", args=args)
        # A process that has begun to receive waits for tensors: the session must end.
        has_begun = method == "begin" and any(kind == "ok" for kind, _ in answers)
        for kind, value in answers:
            if kind == "refused" and not has_begun:
                raise InvalidRequest(value)
            if kind == "broken":
                raise EngineBroken(value)
            if kind != "ok":
                raise WeightUpdateFailed(value)
        return [value for _, value in answers]

    async def pause(self, policy: PauseMode) -> None:
        # AsyncLLM's own call sleeps afterwards, for outputs to arrive: see `progress`.
        core = self._llm.engine_core
        self._versions.num_aborts += policy == "abort"
        await core.pause_scheduler_async(mode=VLLM_MODES[policy], clear_cache=False)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def clear_caches(self) -> None:
        # Requests that are kept give up their keys and values and compute them again.
        is_clear, *_ = await asyncio.gather(
            self._llm.reset_prefix_cache(reset_running_requests=True),
            self._llm.reset_mm_cache(),
            self._llm.reset_encoder_cache(),
        )
        if not is_clear:
            raise WeightUpdateFailed("vLLM could not clear its prefix cache")

    async def progress(self) -> Progress:
        # Those that come while the engine stands have no token, and must not prolong the wait.
        waiting_for = set(self._versions.open)
        # What the engine made before it stood may still be in this process's queues.
        found, last = self._count(waiting_for), None
        for _ in range(MAX_SETTLES):
            still_open = waiting_for & self._versions.open
            if not still_open or (found == last and still_open <= found.keys()):
                break
            await asyncio.sleep(SETTLE_S)
            found, last = self._count(waiting_for), found
        return found

    def _count(self, request_ids: Collection[str]) -> dict[str, dict[int, int]]:
        """The tokens of those of the requests that are open."""
        found: dict[str, dict[int, int]] = {}
        for state in self._llm.output_processor.request_states.values():
            # Sequences of one request carry their own ids; it has the one that we gave.
            parent = state.parent_req
            request_id = state.external_req_id if parent is None else parent.external_req_id
            if request_id in request_ids and state.detokenizer is not None:
                counts = found.setdefault(request_id, {})
                counts[state.request_index] = state.detokenizer.num_output_tokens()
        return found


def _strips_images() -> bool:
    from vllm.v1.core.sched import output

    return hasattr(output, "strip_covered_mm_data")
