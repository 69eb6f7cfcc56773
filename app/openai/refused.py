"""Routes of other chat APIs, which this server refuses by name."""

from flask import Blueprint, request

from app.http.request_ids import request_id
from app.route.error_schemas import Error, ErrorDetail
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
    status=404,
)
def refuse() -> Error:
    """A 404, which no client repeats, with the fields that OpenAI's and Anthropic's clients read."""
    path = request.path.rstrip("/")
    reason = f"{path}: this server does not have this route: {REASONS[path]}"
    return Error(
        error=ErrorDetail(
            message=f"{reason}; use /v1/chat/completions",
            type="not_found_error",
            code="not_found",
            param=None,
            request_id=request_id(),
        )
    )
