"""Ends requests with the tokens that they have: `POST /abort_requests`."""

from flask import Blueprint

from app.http.auth import current_key, sees_all_requests
from app.openapi.answers.control import AbortedRequests
from app.openapi.operation import COMMAND_ERRORS, Example, Operation
from app.pool.command_sender import successful_results
from app.routes.vllm_rl.statuses import never_repeated
from app.routes.weights.workers import reachable_workers
from app.schemas.vllm_rl import AbortRequestsBody
from titopool.wire.commands import AbortRequests
from titopool.wire.messages import owned_id

blueprint = Blueprint("aborts", __name__)

# How the ids begin that OpenAI's routes answer with, and vLLM's /inference/v1/generate.
PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-")


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
    return AbortedRequests(status="aborted", aborted=abort(body.request_ids or None))


def abort(request_ids: list[str] | None) -> int:
    """Ends the requests with these ids, None: all, at every worker and front end.

    A key that is no administrator's means its own requests: ids are easy to guess.

    Returns:
        The number of jobs that were ended.
    """
    wanted = request_ids and [one for given in request_ids for one in _meanings(given)]
    if wanted and not sees_all_requests():
        wanted = [owned_id(current_key().name, one) for one in wanted]
    commands, workers = reachable_workers()
    results = successful_results(commands.gather_outcomes(workers, AbortRequests(wanted)))
    return sum(one["num_aborted"] for one in results)


def _meanings(given: str) -> list[str]:
    """The clients' ids that `given` may mean: a header may begin with a prefix too."""
    return [given, *(given.removeprefix(one) for one in PREFIXES if given.startswith(one))]
