"""Probes: whether this process is alive, which workers can generate, and the pool's size."""

import os

from flask import Blueprint
from msgspec import UNSET

from app.call.service import current_service
from app.http.auth import sees_details
from app.pool.link import server_stopping
from app.route.operation import BOOLEAN, Operation, Query, Reply
from app.route.query import query_flag
from titopool.answers.operators import Health, Live, Ready, ReadyWorker, WorldSize
from titopool.errors import NoReadyWorker, WeightsLost

blueprint = Blueprint("health", __name__)


@blueprint.get("/health/")
@Operation(errors=(NoReadyWorker, WeightsLost))
def health() -> Health:
    """200 once generation is possible, 503 before (TRL's client polls it) and while the server ends."""
    service = current_service()
    if service.is_draining:
        raise server_stopping()
    service.link.check_ready()
    return Health(status="ok")


@blueprint.get("/liveness/")
@blueprint.get("/live/")
@Operation()
def live() -> Live:
    """200 whenever this process answers; the process id is for clients with a key, if one is set."""
    return Live(status="ok", pid=os.getpid() if sees_details() else UNSET)


@blueprint.get("/ready/")
@Operation(other_answers={503: Ready})
def ready() -> Reply[Ready]:
    """Each worker's phase and weight version; 503 while no worker is ready, or the server ends.

    Addresses of workers, and reasons, which may hold them, are for clients with a key, if one is
    set.
    """
    service = current_service()
    service.link.look_up_workers()
    service.link.wait_for_heartbeats()
    views = service.link.workers
    sees_all = sees_details()
    workers = [
        ReadyWorker(
            worker=beat.worker_id if (beat := view.heartbeat) else None,
            phase=view.phase,
            phase_s=round(beat.phase_s, 1) if beat else None,
            silent_s=round(view.silent_s, 1),
            weight_version=beat.weights.version if beat else None,
            endpoint=view.endpoint if sees_all else UNSET,
            reason=(view.reason or None) if sees_all else UNSET,
        )
        for view in views
    ]
    num_ready = sum(view.phase == "ready" for view in views)
    is_ready = num_ready > 0 and not service.is_draining
    body = Ready(ready=is_ready, draining=service.is_draining, num_ready=num_ready, workers=workers)
    return Reply(body, 200 if is_ready else 503)


@blueprint.get("/get_world_size/")
@Operation(
    summary="The number of ranks of all workers.",
    errors=(NoReadyWorker,),
    query=(Query("include_dp", {**BOOLEAN, "default": True}, "false: of one worker"),),
)
def get_world_size() -> WorldSize:
    """`{"world_size": …}`: tensor-parallel times pipeline-parallel size, summed over all workers.

    With `include_dp=false` in the query it is that of one worker, as in vLLM's server.
    TRL's client adds itself as the last rank of the weight-update group. Workers that are not ready
    count too: a smaller group would exclude them from all updates. Those that have joined a pool that
    serves count once they have loaded.
    """
    link = current_service().link
    link.wait_for_heartbeats()
    num_counted = (
        sum(not view.is_joining for view in link.workers)
        if query_flag("include_dp", default=True)
        else 1
    )
    world_size = link.facts.world_size * num_counted
    return WorldSize(world_size=world_size)
