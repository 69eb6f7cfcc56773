"""A pool whose workers are actors of a Ray cluster.

Runs in: the pool's process, a child of gunicorn's master, in place of the supervisor. Owns: a
placement group and an actor for each worker, and the file of endpoints. Each actor keeps its worker
running (`workers/cluster/worker_actor.py`); this module scales the pool and follows the actors'
addresses.
"""

import functools
import logging
import os
import time
import uuid
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from titopool.launch import child_environment
from titopool.settings.config import ServerConfig
from titopool.wire.run_dir import EndpointsFile
from workers.cluster.worker_actor import WorkerActor, WorkerState
from workers.supervisor.scale import Scale
from workers.supervisor.supervisor import LEAVE_MARGIN_S, StartFailed

# Not __name__: `workers` names who logs.
logger = logging.getLogger("workers.cluster")

# Between two looks at the actors.
POLL_S = 0.25
# How long a worker may wait for its GPUs before a line says so, and between two such lines.
WAIT_NOTICE_S = 30.0
# To end the workers with the server.
STOP_TIMEOUT_S = 4.0
# Every actor has a core.
NUM_CORES = 1.0
# Ray fails the call in flight when an actor ends, and lets the next one wait for its restart. An actor
# that fails so many in a row is not restarted.
MAX_ERRORS = 3
# How long Ray may fail to answer before the server ends.
RAY_TIMEOUT_S = 120.0
RAY_ERRORS = (RayError, ConnectionError, TimeoutError)


@dataclass
class RayWorker:
    """One worker, over all restarts of its actor."""

    index: int
    actor: Any
    # None: vLLM reserves the GPUs of an engine that spans nodes.
    group: PlacementGroup | None
    # A call of `state` that has not ended.
    pending: Any
    is_added: bool
    state: WorkerState | None = None
    has_been_ready: bool = False
    # Calls in a row that found no actor.
    num_errors: int = 0
    notice_at: float = field(default_factory=lambda: time.monotonic() + WAIT_NOTICE_S)
    leave_by: float = 0.0

    @property
    def phase(self) -> str:
        return self.state.phase if self.state else ""

    @property
    def is_leaving(self) -> bool:
        return self.leave_by > 0


class RayPool:
    """The workers of one server. Call `poll` again and again, and `stop` at the end."""

    def __init__(self, config: ServerConfig, secret: str):
        """Asks Ray for the first workers.

        Args:
            secret: the CURVE key of workers and front ends.
        """
        self._config = replace(config, num_workers=config.num_workers or num_workers_of(config))
        self._secret = secret
        self._scale = Scale(self._config)
        self._workers: list[RayWorker] = []
        self._endpoints_file = EndpointsFile(config.run_dir)
        # Servers on several hosts may have the same process number.
        self._name = f"{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        # Of one node, and of all that were seen: nodes with GPUs may be lost, or be drained.
        self._most_gpus = 0.0
        # Since when Ray has not answered.
        self._fails_since: float | None = None
        for _ in range(self._config.num_workers):
            self._add(is_added=False)

    @property
    def is_ready(self) -> bool:
        """Whether all workers are ready."""
        return all(worker.phase == "ready" for worker in self._workers)

    def poll(self) -> None:
        """Learns what has changed, and starts or ends workers.

        Errors of Ray, whose control service (GCS) may restart, are tolerated for `RAY_TIMEOUT_S`.

        Raises:
            StartFailed: one of the first workers cannot start.
            RayError, ConnectionError, TimeoutError: Ray has not answered for so long.
        """
        try:
            self._poll()
        except RAY_ERRORS as error:
            now = time.monotonic()
            if self._fails_since is None:
                self._fails_since = now
                logger.warning("Ray does not answer; trying again: %s", one_line(error))
            if now - self._fails_since > RAY_TIMEOUT_S:
                raise
            time.sleep(POLL_S)
        else:
            if self._fails_since is not None:
                logger.info("Ray answers again")
            self._fails_since = None

    def _poll(self) -> None:
        ray.wait([one.pending for one in self._workers], timeout=POLL_S)
        for worker in list(self._workers):
            self._follow(worker)
        self._leave_draining_nodes()
        self._follow_scale()
        endpoints = [
            one.state.endpoint for one in self._workers if one.state and one.state.endpoint
        ]
        self._endpoints_file.keep(endpoints)
        time.sleep(POLL_S)

    def stop(self) -> None:
        """Ends all workers. If Ray does not answer, they end with this process, their owner."""
        try:
            calls = [worker.actor.stop.remote() for worker in self._workers]
            ray.wait(calls, num_returns=len(calls), timeout=STOP_TIMEOUT_S)
            for worker in list(self._workers):
                self._remove(worker)
        except RAY_ERRORS as error:
            logger.warning("the actors could not be ended: %s", one_line(error))

    # ---- one worker ------------------------------------------------------------------

    def _add(self, *, is_added: bool) -> bool:
        """Asks Ray for one more worker; returns False if none can be placed for now."""
        index = min(set(range(len(self._workers) + 1)) - {one.index for one in self._workers})
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._most_gpus = max(self._most_gpus, *map(gpus_of, nodes), 0.0)
        num_gpus = self._config.gpus_per_worker if self._most_gpus else 0
        placed = self._reserve(nodes, num_gpus)
        if placed is None:
            return False
        group, strategy = placed
        settings = self._settings(spans_nodes=group is None)
        base = self._config.worker_port
        port = base + index if base else 0
        options = {
            "name": f"titopool worker {index} of {self._name}", "num_cpus": NUM_CORES,
            "num_gpus": num_gpus if group is not None else 0, "scheduling_strategy": strategy,
            "max_restarts": -1, "max_concurrency": 4,
            "runtime_env": {"env_vars": environment_of_actors()},
        }  # fmt: skip
        try:
            actor = (
                ray.remote(WorkerActor)
                .options(**options)
                .remote(index, settings, self._secret, port)
            )
            self._workers.append(RayWorker(index, actor, group, actor.state.remote(), is_added))
        except RAY_ERRORS:
            # The next attempt reserves anew.
            if group is not None:
                remove_placement_group(group)
            raise
        return True

    def _reserve(
        self, nodes: Sequence[Mapping[str, Any]], num_gpus: int
    ) -> tuple[PlacementGroup | None, Any] | None:
        """A placement group on one node, and how Ray places the actor in it.

        The GPUs of an engine that needs those of several nodes are vLLM's to reserve, from a node
        that has some. Returns None if there is no such node, as all are about to leave.

        Args:
            nodes: those of `ray.nodes()` that are alive.
        """
        if num_gpus > self._most_gpus:
            first = largest_node(nodes, draining_nodes())
            return (None, NodeAffinitySchedulingStrategy(first, soft=False)) if first else None
        bundle = {"CPU": NUM_CORES} | ({"GPU": float(num_gpus)} if num_gpus else {})
        group = placement_group([bundle], strategy="STRICT_PACK")
        return group, PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)

    def _settings(self, *, spans_nodes: bool) -> dict[str, str]:
        """The variables of a worker's settings; files and folders of this host have no meaning there."""
        config = replace(
            self._config, num_workers=1, max_workers=0, run_dir="", curve_key_file="", cluster="",
            tls_cert_file="", tls_key_file="", api_key_file="", api_key="", admin_key="",
        )  # fmt: skip
        if spans_nodes:
            extra = f"{config.engine_args} --distributed-executor-backend ray".strip()
            config = replace(config, engine_args=extra)
        return config.to_environment()

    def _follow(self, worker: RayWorker) -> None:
        """Takes a worker's next report, if it has come."""
        if worker.is_leaving and time.monotonic() > worker.leave_by:
            self._remove(worker)
            return
        if not ray.wait([worker.pending], timeout=0)[0]:
            self._note_wait(worker)
            return
        try:
            worker.state = ray.get(worker.pending)
        except RayActorError as error:
            # Ray restarts the actor, or cannot: then another takes its place.
            logger.error(
                "worker %d: its actor or node has ended: %s", worker.index, one_line(error)
            )
            worker.state, worker.num_errors = None, worker.num_errors + 1
            if worker.num_errors == MAX_ERRORS:
                self._replace(worker, one_line(error))
                return
        except RayError as error:
            logger.error("worker %d: %s", worker.index, one_line(error))
        else:
            worker.num_errors = 0
            worker.has_been_ready |= worker.phase == "ready"
        worker.pending = worker.actor.state.remote()
        if worker.state is None:
            return
        if worker.state.failure:
            if not worker.is_added:
                raise StartFailed(worker.state.failure)
            logger.error("%s; it leaves", worker.state.failure)
            self._remove(worker)
            self._scale.forget_one()
        elif worker.state.has_ended:
            self._remove(worker)
            if not worker.is_leaving:
                # A client has asked it to.
                self._scale.forget_one()
            logger.info("worker %d has left; %d workers stay", worker.index, len(self._workers))

    def _replace(self, worker: RayWorker, cause: str) -> None:
        """Asks Ray for a new actor in place of one that it does not restart."""
        if not worker.has_been_ready and not worker.is_added:
            raise StartFailed(f"worker {worker.index} could not start: {cause}")
        self._remove(worker)
        self._add(is_added=True)

    def _note_wait(self, worker: RayWorker) -> None:
        if worker.state is None and time.monotonic() > worker.notice_at:
            worker.notice_at = time.monotonic() + WAIT_NOTICE_S
            logger.warning(
                "worker %d waits for Ray: it needs %d GPUs of one node and a core; `ray status` shows "
                "what is free", worker.index, self._config.gpus_per_worker if self._most_gpus else 0,
            )  # fmt: skip

    def _let_go(self, worker: RayWorker) -> None:
        worker.leave_by = time.monotonic() + self._config.drain_timeout_s + LEAVE_MARGIN_S
        if worker.phase == "ready":
            worker.actor.leave.remote()
        else:
            self._remove(worker)

    def _remove(self, worker: RayWorker) -> None:
        # Both calls may be repeated if Ray does not answer.
        ray.kill(worker.actor)
        if worker.group is not None:
            remove_placement_group(worker.group)
        self._workers.remove(worker)

    # ---- all -------------------------------------------------------------------------

    def _leave_draining_nodes(self) -> None:
        """Lets the workers go whose nodes Ray drains; others will take their place elsewhere."""
        draining = draining_nodes()
        for worker in list(self._workers):
            if worker.state and worker.state.node_id in draining and not worker.is_leaving:
                logger.info("worker %d leaves: Ray drains its node", worker.index)
                self._let_go(worker)

    def _follow_scale(self) -> None:
        staying = [worker for worker in self._workers if not worker.is_leaving]
        states = [one.state for one in staying if one.state and one.state.phase == "ready"]
        loads = [state.load for state in states if state.load is not None]
        self._scale.follow(loads, len(staying) - len(states), time.monotonic())
        for _ in range(self._scale.wanted - len(staying)):
            if self._add(is_added=True):
                logger.info("a worker joins: %d are wanted", self._scale.wanted)
        # First those that do not serve yet, then the youngest.
        staying.sort(key=lambda worker: (worker.phase != "ready", worker.index))
        for worker in staying[self._scale.wanted :]:
            logger.info("worker %d leaves: %d are wanted", worker.index, self._scale.wanted)
            self._let_go(worker)


def num_workers_of(config: ServerConfig) -> int:
    """As many workers as the cluster has GPUs for, at least one."""
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    return max(1, num_gpus // config.gpus_per_worker)


def gpus_of(node: Mapping[str, Any]) -> float:
    """How many GPUs a node of `ray.nodes()` has."""
    return float(node["Resources"].get("GPU", 0))


def largest_node(nodes: Sequence[Mapping[str, Any]], draining: Container[str]) -> str | None:
    """The id of the node with most GPUs among those that stay; None if none has a GPU."""
    staying = [node for node in nodes if node["NodeID"] not in draining and gpus_of(node)]
    return str(max(staying, key=gpus_of)["NodeID"]) if staying else None


def draining_nodes() -> set[str]:
    """Ids of the nodes that an autoscaler or `ray drain-node` is about to take away."""
    # Ray has no public function for it. A pool without it is better than none.
    try:
        return set(ray._private.state.state.get_draining_nodes())
    except Exception as error:
        _note_unknown_nodes(one_line(error))
        return set()


@functools.cache
def _note_unknown_nodes(reason: str) -> None:
    """Logs each reason once."""
    logger.warning("Ray does not say which nodes it drains: %s", reason)


def environment_of_actors() -> dict[str, str]:
    """Variables with which actors find this installation, and settings of libraries of this process."""
    # Ray's own form of them must not reach the workers.
    path = child_environment(dict(os.environ)).get("PYTHONPATH")
    found = {name: text for name, text in os.environ.items() if name.startswith(("VLLM_", "HF_"))}
    return found | ({"PYTHONPATH": path} if path else {})


def one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
