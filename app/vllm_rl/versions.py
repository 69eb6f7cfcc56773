"""The trainer's own name (label) of the version that serves.

The pool's version is an integer that grows with each update. vLLM's routes show the label in its
place, which is the integer as text unless the trainer gave another one.
"""

from flask import Blueprint

from app.control.recipients import reachable_workers
from app.pool.command_sender import successful_results
from app.route.operation import COMMAND_ERRORS, Example, Operation
from app.vllm_rl.answers import Labelled
from app.vllm_rl.bodies import VersionBody
from app.vllm_rl.statuses import never_repeated
from titopool.wire.commands import SetLabel
from titopool.wire.pool_state import next_clock

blueprint = Blueprint("versions", __name__)


@blueprint.post("/update_weight_version/")
@never_repeated
@Operation(
    errors=COMMAND_ERRORS,
    examples={"label": Example("A label", {"new_version": "step-7"})},
)
def update_weight_version(body: VersionBody) -> Labelled:
    """Gives the version that serves another label; the weights stay."""
    set_label(body.new_version)
    return Labelled(success=True, new_version=body.new_version)


def set_label(label: str) -> None:
    """Sets the label at the workers that answer; the others learn of it from the pool's state."""
    commands, workers = reachable_workers()
    clock = next_clock(commands.pool_state.weights.label_clock)
    successful_results(commands.gather_outcomes(workers, SetLabel(label, clock)))
