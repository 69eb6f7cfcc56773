"""`POST /abort_requests`: ends requests with the tokens that they have."""

from flask import Blueprint, Response, request

from app.http.responses import json_response
from app.pool.command_sender import successful_results
from app.routes.weights.workers import reachable_workers
from app.schemas.decoding import decode_body
from app.schemas.vllm_rl import ABORT_REQUESTS_BODY
from titopool.wire.commands import AbortRequests

blueprint = Blueprint("aborts", __name__)

# How the ids begin that OpenAI's routes answer with.
PREFIXES = ("chatcmpl-", "cmpl-")


@blueprint.post("/abort_requests/")
def abort_requests() -> Response:
    """Ends the requests with these ids; without ids, all requests.

    An id is the header X-Request-Id of the request, or the id that OpenAI's routes answer with.
    Workers also end prompts that wait in the queue of any front end.
    """
    body = decode_body(request.get_data(), ABORT_REQUESTS_BODY)
    # As in vLLM, no id means all requests.
    wanted = [one for given in body.request_ids or () for one in _meanings(given)] or None
    commands, workers = reachable_workers()
    results = successful_results(commands.gather_outcomes(workers, AbortRequests(wanted)))
    aborted = sum(one["num_aborted"] for one in results)
    return json_response({"status": "aborted", "aborted": aborted})


def _meanings(given: str) -> list[str]:
    """The clients' ids that `given` may mean: a header may begin with a prefix too."""
    return [given, *(given.removeprefix(one) for one in PREFIXES if given.startswith(one))]
