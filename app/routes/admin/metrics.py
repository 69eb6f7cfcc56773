"""`GET /metrics`: the whole server in Prometheus' text format."""

from flask import Blueprint, Response
from prometheus_client import CONTENT_TYPE_LATEST

from app.metrics.exposition import exposition
from app.service import current_service

blueprint = Blueprint("metrics", __name__)


@blueprint.get("/metrics/")
def metrics() -> Response:
    """Prometheus' text format."""
    return Response(exposition(current_service()), content_type=CONTENT_TYPE_LATEST)
