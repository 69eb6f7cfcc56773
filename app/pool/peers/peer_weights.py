"""Lets a worker that lacks the pool's weights take them from one that serves them.

Runs in: each gunicorn process, a greenlet for each such worker. Every front end tries, after a random
time: a worker that fetches already refuses the next one. Nothing waits for the fetch itself, and a
worker that has failed is seen again by its heartbeats.
"""

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass

import gevent

from app.pool.command_sender import CommandSender
from app.pool.records import Worker
from app.pool.state import Pool
from titopool.deadline import Deadline
from titopool.errors import TitopoolError
from titopool.wire.commands import FetchWeights, OfferWeights, Peer
from titopool.wire.pool_state import PoolWeights
from titopool.wire.sockets import listen_address

logger = logging.getLogger(__name__)

# Of its own heartbeats: a worker that cannot load the pool's weights by itself.
LACKING = ("waiting_for_weights", "stale")
# Facts that two workers must share, so that the bytes of one fit the other.
COMPARED_FACTS = ("model", "vllm_version", "world_size", "dtype")
# Between two attempts for one worker: at first, and at most. Each is drawn from 0.5 to 1.5 times that.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
# Workers that are asked in one attempt.
MAX_ASKED = 3


@dataclass
class Attempts:
    """The attempts for one worker process."""

    next_at: Deadline
    pause_s: float
    greenlet: gevent.Greenlet | None = None


class PeerWeights:
    """The workers that lack the pool's weights, and attempts to get them."""

    def __init__(self, commands: CommandSender, pool: Pool):
        self._commands = commands
        self._pool = pool
        # By incarnation.
        self._attempts: dict[str, Attempts] = {}

    def tick(self) -> None:
        """Starts the attempts that are due; returns at once."""
        behind = {
            one.heartbeat.incarnation
            for one in self._workers()
            if one.heartbeat and one.phase != "ready"
        }
        self._attempts = {key: one for key, one in self._attempts.items() if key in behind}
        for worker in self._workers():
            if not self._lacks_weights(worker) or worker.heartbeat is None:
                continue
            attempts = self._attempts.setdefault(
                worker.heartbeat.incarnation,
                Attempts(Deadline.after(random.uniform(0, FIRST_PAUSE_S)), FIRST_PAUSE_S),
            )
            if attempts.next_at.has_passed and not attempts.greenlet:
                attempts.next_at = Deadline.after(attempts.pause_s * random.uniform(0.5, 1.5))
                attempts.pause_s = min(2 * attempts.pause_s, LONGEST_PAUSE_S)
                attempts.greenlet = gevent.spawn(self._help, worker)

    def _workers(self) -> Iterator[Worker]:
        return iter(self._pool.sorted_workers())

    def _lacks_weights(self, worker: Worker) -> bool:
        beat, wanted = worker.heartbeat, self._pool.view.state.weights
        return (
            beat is not None
            and beat.phase in LACKING
            and worker.phase != "mismatched"
            and not wanted.is_initial
            and beat.pool.weights.order == wanted.order
        )

    def _help(self, worker: Worker) -> None:
        wanted = self._pool.view.state.weights
        try:
            peers, reason = self._find_peers(worker, wanted)
            fetch = FetchWeights(wanted, peers, reason)
            (outcome,) = self._commands.gather_outcomes([worker], fetch)
            if outcome.error is not None:
                # Another front end was faster, or the worker has got its weights.
                logger.debug("%s fetches no weights: %s", worker.endpoint, outcome.error.message)
        except TitopoolError as error:
            logger.warning("%s could not fetch the pool's weights: %s", worker.endpoint, error)

    def _find_peers(self, worker: Worker, wanted: PoolWeights) -> tuple[list[Peer], str]:
        """An offer of the weights, by rank; without one, the reason."""
        able = [one for one in self._workers() if self._may_give(one, worker, wanted)]
        reasons = []
        for giver in random.sample(able, min(len(able), MAX_ASKED)):
            (outcome,) = self._commands.gather_outcomes([giver], OfferWeights(wanted))
            if outcome.result is not None:
                host = listen_address(giver.endpoint)
                return [
                    Peer(f"{host}:{one['port']}", one["key"]) for one in outcome.result["peers"]
                ], ""
            assert giver.heartbeat is not None
            assert outcome.error is not None
            reasons.append(f"{giver.heartbeat.worker_id}: {outcome.error.message}")
        return [], "; ".join(reasons) or (
            "expected a ready worker with the same vLLM, model and parallel sizes, got none"
        )

    def _may_give(self, giver: Worker, taker: Worker, wanted: PoolWeights) -> bool:
        mine, its = taker.heartbeat, giver.heartbeat
        if mine is None or its is None or mine.facts is None or its.facts is None:
            return False
        is_serving = giver.phase == "ready" and its.weights.order == wanted.order
        return is_serving and all(
            getattr(mine.facts, name) == getattr(its.facts, name) for name in COMPARED_FACTS
        )
