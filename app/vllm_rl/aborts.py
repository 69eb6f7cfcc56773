"""Ends requests with the tokens that they have: `POST /abort_requests`."""

from flask import Blueprint

from app.control.pool_commands import AbortedRequests, end_requests
from app.route.operation import COMMAND_ERRORS, Example, Operation
from app.vllm_rl.bodies import AbortRequestsBody
from app.vllm_rl.statuses import never_repeated

blueprint = Blueprint("aborts", __name__)


@blueprint.post("/abort_requests/")
@never_repeated
@Operation(
    errors=COMMAND_ERRORS,
    examples={"one": Example("One request", {"request_ids": ["rollout-17"]})},
)
def abort_requests(body: AbortRequestsBody) -> AbortedRequests:
    """Ends the requests with these ids; without ids, all requests.

    An id is the header X-Request-Id of the request, or the id that OpenAI's routes answer with.
    Workers also end prompts that wait in the queue of any front end.
    """
    # As in vLLM, no id means all requests.
    return AbortedRequests(status="aborted", aborted=end_requests(body.request_ids or None))
