"""Workers that leave, the number of workers of servers that start their own, and connections.

`POST /workers/NAME/drain`, `POST /workers/scale`, `POST /workers/connections`.
"""

import gevent
from flask import Blueprint
from gevent.lock import BoundedSemaphore

from app.call.service import current_service
from app.operators.bodies import ScaleBody
from app.pool.peers.connection_faults import find_connection_faults
from app.route.operation import Example, Operation
from titopool.answers.operators import Connections, Drained, Scaled
from titopool.deadline import Deadline
from titopool.errors import Conflict, InvalidRequest, TitopoolError, WorkerNotFound
from titopool.settings.gpus import most_workers
from titopool.wire.run_dir import write_wanted

blueprint = Blueprint("workers", __name__)

# Until a worker shows that it drains: its next heartbeat says so.
DRAIN_TIMEOUT_S = 5.0
POLL_S = 0.02

# Whoever lets the workers try their connections.
_trying = BoundedSemaphore(1)


@blueprint.post("/workers/<name>/drain/")
@Operation(
    status=202,
    errors=(WorkerNotFound, Conflict),
    path_parts={"name": "a worker, as `/ready` names it"},
)
def drain(name: str) -> Drained:
    """The worker `name` finishes its jobs and ends; this server does not start it again.

    Jobs that are in flight after `drain_timeout_s` run again at other workers. A worker that
    something else has started (Compose, Kubernetes, Slurm) is started again by that.

    Raises:
        WorkerNotFound: no worker that answers has this name.
        Conflict: the worker has not begun to leave within `DRAIN_TIMEOUT_S`.
    """
    link = current_service().link
    link.wait_for_heartbeats()
    if not link.drain(name):
        names = sorted(view.heartbeat.worker_id for view in link.workers if view.heartbeat)
        raise WorkerNotFound(
            f"expected the name of a worker ({', '.join(names) or 'none answers'}), got {name!r}"
        )
    deadline = Deadline.after(DRAIN_TIMEOUT_S)
    while (phase := _phase_of(name)) not in ("draining", "unreachable"):
        if deadline.has_passed:
            raise Conflict(
                f"expected worker {name} to drain within {DRAIN_TIMEOUT_S:g} s, got phase {phase}; "
                "ask /ready, and try again"
            )
        gevent.sleep(POLL_S)
    return Drained(worker=name, phase=phase)


def _phase_of(name: str) -> str:
    for view in current_service().link.workers:
        if view.heartbeat is not None and view.heartbeat.worker_id == name:
            return view.phase
    return "unreachable"


@blueprint.post("/workers/scale/")
@Operation(
    status=202,
    errors=(Conflict,),
    examples={"two": Example("Two workers", {"num_workers": 2})},
)
def scale(body: ScaleBody) -> Scaled:
    """`{"num_workers": N}`: workers start, or drain and end, until there are N.

    Raises:
        InvalidRequest: this host has too few GPUs.
        Conflict: the workers are started by something else.
        TitopoolError: `run_dir` cannot be written.
    """
    config = current_service().config
    if config.endpoints:
        raise Conflict(
            "expected a server that starts its own workers, got one whose workers run elsewhere "
            "(endpoints); scale them where they run: docker compose --scale, kubectl scale"
        )
    most = None if config.cluster else most_workers(config)
    if most is not None and body.num_workers > most:
        raise InvalidRequest(
            f"num_workers: expected at most {most}, as this host has GPUs or cores for so many, got "
            f"{body.num_workers}",
            param="num_workers",
        )
    link = current_service().link
    link.look_up_workers()
    num_now = len(link.workers)
    try:
        write_wanted(config.run_dir, body.num_workers)
    except OSError as error:
        raise TitopoolError(
            f"expected space in run_dir for the number of workers, got: {error}; make space on the "
            "server's disk, and send the call again"
        ) from error
    return Scaled(num_workers=body.num_workers, num_before=num_now)


@blueprint.post("/workers/connections/")
@Operation(errors=(Conflict,))
def connections() -> Connections:
    """Every worker tries to connect to the address of every other one.

    Takes up to 30 s where connections get no answer. `faults` has the pairs that cannot connect, and,
    with `peer_endpoint` null, the workers that tried nothing.

    Raises:
        Conflict: this front end is asked already. N workers open N² connections.
    """
    link = current_service().link
    link.wait_for_heartbeats()
    if not _trying.acquire(blocking=False):
        raise Conflict(
            "expected no other call of this route, got one that waits for its answer; try again when "
            "it has ended, in 30 s at most"
        )
    try:
        num_tried, faults = find_connection_faults(link.commands, link.workers)
    finally:
        _trying.release()
    return Connections(num_tried=num_tried, faults=faults)
