"""`GET /metrics`: the whole server in Prometheus' text format."""

from flask import Blueprint, Response
from prometheus_client import CONTENT_TYPE_LATEST

from app.metrics.exposition import exposition
from app.openapi.operation import Operation
from app.service import current_service

blueprint = Blueprint("metrics", __name__)


@blueprint.get("/metrics/")
@Operation(summary="The whole pool's metrics.", answer=str, media_type="text/plain")
def metrics() -> Response:
    """Prometheus' text format."""
    return Response(exposition(current_service()), content_type=CONTENT_TYPE_LATEST)
