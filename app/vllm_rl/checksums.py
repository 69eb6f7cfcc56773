"""`POST /weight_checker`: digests of the parameters of all engines."""

from typing import Any

from flask import Blueprint

from app.control.recipients import step_timeout_s, whole_pool
from app.pool.command_sender import results_of
from app.route.operation import COMMAND_ERRORS, Example, Operation
from app.vllm_rl.answers import Checksums, Compared
from app.vllm_rl.bodies import CheckerBody
from app.vllm_rl.statuses import never_repeated
from titopool.errors import InvalidRequest
from titopool.wire.commands import ReadChecksums

blueprint = Blueprint("checksums", __name__)

# How each engine's names begin: each engine is the first of its own.
OWN_PREFIX = "dp0:"


@blueprint.post("/weight_checker/")
@never_repeated
@Operation(
    description="`compare` needs `baseline`; `reset` is refused.",
    errors=COMMAND_ERRORS,
    examples={
        "checksum": Example("Digests", {"action": "checksum"}),
        "compare": Example(
            "A comparison", {"action": "compare", "baseline": {"dp0:lm_head.weight": "0"}}
        ),
    },
)
def weight_checker(body: CheckerBody) -> Checksums | Compared:
    """Digests by name (`checksum`), or their differences from a baseline (`compare`).

    Generation stops while an engine reads its parameters.
    """
    if body.action == "reset":
        raise InvalidRequest(
            "action: expected checksum or compare, got reset, which writes zeros into the model that "
            "serves; an update here writes every parameter or is refused",
            param="action",
        )
    if body.action == "compare" and body.baseline is None:
        raise InvalidRequest(
            "baseline: expected the checksums of an earlier call with action compare, got none",
            param="baseline",
        )
    found = _checksums()
    if body.action == "checksum" or body.baseline is None:
        return Checksums(checksums=found)
    names = found.keys() | body.baseline.keys()
    mismatches = sorted(name for name in names if found.get(name) != body.baseline.get(name))
    return Compared(match=not mismatches, mismatches=mismatches)


def _checksums() -> dict[str, str]:
    """The digests of all engines; worker i's names begin with `dp<i>:`, as with data parallelism."""
    commands, workers = whole_pool()
    results: list[dict[str, Any]] = results_of(
        commands.gather_outcomes(workers, ReadChecksums(), timeout_s=step_timeout_s())
    )
    return {
        f"dp{index}:{name.removeprefix(OWN_PREFIX)}": digest
        for index, result in enumerate(results)
        for name, digest in result["checksums"].items()
    }
