"""Probes, metrics, workers, and the description itself."""

from typing import Any

from app.openapi.answers.control import (
    Connections,
    Drained,
    Health,
    Live,
    MetricsHistory,
    OpenRequests,
    Overview,
    Ready,
    Scaled,
    WorldSize,
)
from app.openapi.operation import Example, Operation, Query
from app.openapi.operations.weights import BOOLEAN
from app.schemas.workers import SCALE_BODY
from titopool.errors import Conflict, NoReadyWorker, WeightsLost, WorkerNotFound

TAG = "admin"

OPERATIONS: dict[str, Operation] = {
    "health.health": Operation(tag=TAG, answer=Health, errors=(NoReadyWorker, WeightsLost)),
    "health.live": Operation(tag=TAG, answer=Live),
    "health.ready": Operation(tag=TAG, answer=Ready, other_answers={503: Ready}),
    "health.get_world_size": Operation(
        tag=TAG,
        summary="The number of ranks of all workers.",
        answer=WorldSize,
        errors=(NoReadyWorker,),
        query=(Query("include_dp", {**BOOLEAN, "default": True}, "false: of one worker"),),
    ),
    "metrics.metrics": Operation(
        tag=TAG, summary="The whole pool's metrics.", answer=str, media_type="text/plain"
    ),
    "history.history": Operation(
        tag=TAG,
        answer=MetricsHistory,
        query=(Query("since", {"type": "number"}, "only later samples; Unix time"),),
    ),
    "requests.requests": Operation(
        tag=TAG,
        answer=OpenRequests,
        query=(
            Query(
                "limit",
                {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
                "how many are listed, the oldest first",
            ),
        ),
    ),
    "overview.workers": Operation(tag=TAG, answer=Overview),
    "page.page": Operation(
        tag=TAG, summary="The page for a browser.", answer=str, media_type="text/html"
    ),
    "page.asset": Operation(
        tag=TAG,
        answer=str,
        media_type="text/css",
        other_media={"text/javascript": str, "image/svg+xml": str},
        path_parts={"version": "as the page names it", "name": "a file that the page names"},
    ),
    "workers.drain": Operation(
        tag=TAG,
        answer=Drained,
        status=202,
        errors=(WorkerNotFound, Conflict),
        path_parts={"name": "a worker, as `/ready` names it"},
    ),
    "workers.scale": Operation(
        tag=TAG,
        body=SCALE_BODY,
        answer=Scaled,
        status=202,
        errors=(Conflict,),
        examples={"two": Example("Two workers", {"num_workers": 2})},
    ),
    "workers.connections": Operation(tag=TAG, answer=Connections, errors=(Conflict,)),
    "description.document": Operation(tag=TAG, summary="This document.", answer=dict[str, Any]),
    "description.page": Operation(
        tag=TAG, summary="A page that shows this document.", answer=str, media_type="text/html"
    ),
    "description.asset": Operation(
        tag=TAG,
        summary="A file of that page.",
        answer=str,
        media_type="text/css",
        other_media={"text/javascript": str, "image/png": str},
        path_parts={"name": "a file that the page names"},
    ),
}
