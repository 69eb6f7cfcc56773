"""Weights from another worker: gives them, and takes them before this worker serves.

Runs in: each worker process, on its event loop. A front end asks a worker that serves the pool's
weights for an offer, and then this one to fetch them (`app/pool/peers/peer_weights.py`). A fetch is an
update without a group. Until its first byte a failure leaves the old weights; after that the model is
unknown: generation stands until another fetch or a complete update has succeeded.
"""

import logging
import time

from titopool.deadline import Deadline
from titopool.errors import Conflict, DeadlinePassed, InvalidRequest
from titopool.wire.commands import FetchWeights, OfferWeights, Peer
from titopool.wire.pool_state import PoolWeights
from workers.weights.state import Phase
from workers.weights.steps import Result
from workers.weights.updates import Updates

logger = logging.getLogger(__name__)

# Of `weight_update_timeout_s`: vLLM's processes end a fetch before this process gives up.
FETCH_SHARE = 0.9


class Peers:
    """Weights for and from other workers."""

    def __init__(self, updates: Updates, listen_address: str):
        """`listen_address` is this worker's own."""
        self.updates = updates
        self._listen_address = listen_address

    async def offer(self, action: OfferWeights) -> Result:
        """Lets other workers read this one's model until it changes or nobody reads it.

        Raises:
            Conflict: this worker does not serve these weights, or they are about to change.
            InvalidRequest: they cannot be read.
        """
        async with self.updates.accepting:
            is_changing = self.updates.state.phase is Phase.APPLYING or self.updates.is_in_model
            if self.updates.state.weights.order != action.weights.order or is_changing:
                raise Conflict(
                    f"offer: expected weights of version {action.weights.version} that serve; "
                    + self.updates.state.describe()
                )
            offers = await self.updates.call(
                "offer", self._listen_address, self.updates.config.peer_port, self.updates.timeout_s
            )
        if len({one["host"] for one in offers}) > 1:
            raise InvalidRequest("this worker's processes are on several hosts")
        return {"peers": [{"port": one["port"], "key": one["key"]} for one in offers]}

    async def fetch(self, action: FetchWeights) -> Result:
        """Accepts to take the pool's weights from another worker.

        Raises:
            Conflict: an update or another fetch is in progress, or these weights are not wanted.
        """
        async with self.updates.accepting:
            self.updates.check_not_broken()
            # A member of a group gets its next update, unless its trainer is gone: then none comes.
            waits = (
                bool(self.updates.state.session) and not await self.updates.trainer.is_abandoned()
            )
            wanted = self.updates.pool.weights
            is_lacking = self.updates.is_behind_pool and wanted.order == action.weights.order
            # Jobs of the old weights end first: if a fetch fails half-way, they could not go on.
            if not is_lacking or waits or self.updates.versions.num_jobs:
                raise Conflict(
                    f"fetch: expected weights of version {wanted.version} at a worker that lacks them, "
                    f"without a trainer's group and without jobs; {self.updates.state.describe()}, and "
                    f"{self.updates.versions.num_jobs} jobs are open"
                )
            self.updates.state.begin_apart("fetch", wanted, time.monotonic())
            self.updates.begin_clock()
            self.updates.staging = "peer"
            self.updates.steps.start(
                "fetch", wanted.update_id, self._run_fetch(wanted, action.peers)
            )
        return {}

    async def _run_fetch(self, update: PoolWeights, peers: list[Peer]) -> Result:
        budget = Deadline.after(FETCH_SHARE * self.updates.timeout_s)
        async with self.updates.ends_on_failure(
            "the weights of another worker could not be fetched"
        ):
            found = [(one.address, one.key) for one in peers]
            await self.updates.call("compare", found, budget.left_s)
            # The caches have keys and values of the old weights.
            await self.updates.stop_generation(self.updates.catch_up_mode)
            if budget.has_passed:
                raise DeadlinePassed("fetch: generation did not stop in time; the old weights stay")
            self.updates.pauses.is_held = True
            self.updates.state.fetch()
            results = await self.updates.call("fetch", budget.left_s)
            progress = await self.updates.engine.progress()
        self.updates.state.fetched(update.update_id, time.monotonic())
        await self.updates.serve(update, progress)
        logger.info("fetched the weights from another worker: %s", results)
        return {"processes": results}
