"""The state of each worker's weights, and the route that accepts the initial weights after a lost update."""

import uuid

import msgspec
from flask import Blueprint

from app.call.service import current_service
from app.control.recipients import reachable_workers, worker_statuses
from app.pool.command_sender import successful_results
from app.route.operation import COMMAND_ERRORS, Operation
from app.weights.bodies import AcceptBody
from titopool.answers.weights import Accepted, Weights
from titopool.errors import Conflict
from titopool.wire.commands import AcceptInitialWeights, GetStatus
from titopool.wire.pool_state import next_clock

blueprint = Blueprint("status", __name__)


@blueprint.get("/weights/")
@Operation(errors=COMMAND_ERRORS)
def status() -> Weights:
    """Each worker's state; for a worker that does not answer, its phase."""
    statuses = {one.endpoint: one.result for one in worker_statuses() if one.result}
    listed = [
        {
            **statuses.get(view.endpoint, {"worker": None, "state": view.phase}),
            "endpoint": view.endpoint,
        }
        for view in current_service().link.workers
    ]
    return msgspec.convert({"workers": listed}, Weights)


@blueprint.post("/weights/accept/")
@Operation(is_body_optional=True, errors=COMMAND_ERRORS)
def accept(body: AcceptBody) -> Accepted:
    """Lets the pool continue with the initial weights when all workers lost the last update."""
    commands, workers = reachable_workers()
    for one in commands.gather_outcomes(workers, GetStatus()):
        if one.result and not one.result["waits_for_weights"]:
            raise Conflict(
                f"accept: expected that every worker has lost the weights, but the worker at "
                f"{one.endpoint} serves version {one.result['weight_version']}; send a complete "
                "update for the other workers"
            )
    update_id = f"own-{uuid.uuid4().hex}"
    action = AcceptInitialWeights(update_id, next_clock(commands.pool_state.weights.clock))
    outcomes = commands.gather_outcomes(workers, action)
    successful_results(outcomes)
    restarting = [one.endpoint for one in outcomes if one.result and one.result["restarts"]]
    return Accepted(weight_version=0, restarting=restarting)
