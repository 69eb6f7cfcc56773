"""Routes of other chat APIs, which this server refuses by name."""

from flask import Blueprint, Response, request

from app.http.request_ids import request_id
from app.http.responses import json_response
from app.route.error_schemas import Error
from app.route.operation import Operation

blueprint = Blueprint("other_apis", __name__)

REASONS = {
    "/v1/responses": "items of OpenAI's Responses API are not translated to chat messages",
    "/v1/messages": "messages of Anthropic's API are not translated to OpenAI's",
    "/v1/messages/count_tokens": "messages of Anthropic's API are not translated to OpenAI's",
}


@blueprint.post("/v1/responses/")
@blueprint.post("/v1/messages/")
@blueprint.post("/v1/messages/count_tokens/")
@Operation(
    summary="Not served: a 404 with the reason, as OpenAI's and Anthropic's clients read it.",
    answer=Error,
    status=404,
)
def refuse() -> Response:
    """A 404, which no client repeats, with the fields that OpenAI's and Anthropic's clients read."""
    path = request.path.rstrip("/")
    error = {
        "type": "not_found_error",
        "message": f"{path}: this server does not have this route: {REASONS[path]}; use "
        "/v1/chat/completions",
        "code": "not_found",
        "param": None,
    }
    return json_response({"error": error | {"request_id": request_id()}}, 404)
