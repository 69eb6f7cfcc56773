"""`GET /metrics`: the whole server in Prometheus' text format."""

from flask import Blueprint, Response
from prometheus_client import CONTENT_TYPE_LATEST

from app.call.service import current_service
from app.operators.metrics.exposition import exposition
from app.route.operation import Operation

blueprint = Blueprint("metrics", __name__)


@blueprint.get("/metrics/")
@Operation(summary="The whole pool's metrics.", answer=str, media_type="text/plain")
def metrics() -> Response:
    """Prometheus' text format."""
    return Response(exposition(current_service()), content_type=CONTENT_TYPE_LATEST)
