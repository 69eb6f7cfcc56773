"""`POST /mismatch`: how far the sampler's log-probabilities are from a trainer's, live."""

from dataclasses import asdict

import gevent
from flask import Blueprint, Response

from app.call.call import admitted, name_of
from app.http.responses import json_response
from app.route.operation import MODEL_ERRORS, Example, Operation
from app.trl.answers import MismatchAnswer
from app.trl.bodies import MISMATCH_BODY
from titopool.errors import InvalidRequest, RequestNotFound
from titopool.mismatch.statistics import Mismatch, check_lengths, compare
from titopool.wire.messages import Compared

blueprint = Blueprint("mismatch", __name__)


@blueprint.post("/mismatch/")
@Operation(
    summary="Compare a trainer's log-probabilities with those that a request was answered with.",
    description="Values are from -10000 to 0: less is a mask's value.",
    body=MISMATCH_BODY,
    answer=MismatchAnswer,
    errors=(*MODEL_ERRORS, RequestNotFound),
    examples={
        "one": Example(
            "A request with one completion of two tokens",
            {"request_id": "rollout-17", "logprobs": [[-7.66, -9.08]]},
        )
    },
)
def mismatch() -> Response:
    """Statistics of one request, which also enter the metrics."""
    with admitted(MISMATCH_BODY) as (call, body):
        kept = call.kept.find(name_of(call.key, body.request_id))
        if kept is None:
            raise RequestNotFound(
                f"request_id: expected a request of the last 10 minutes that was answered with "
                f"log-probabilities, got {body.request_id!r}, of which nothing is kept; ask with "
                "logprobs, send its X-Request-Id, and see the setting kept_logprobs_bytes",
                param="request_id",
            )
        try:
            check_lengths(kept, body.logprobs)
            # Up to a second for millions of tokens.
            found = gevent.get_hub().threadpool.apply(compare, (kept, body.logprobs))
        except ValueError as error:
            raise InvalidRequest(f"logprobs: {error}", param="logprobs") from None
        call.link.report(_sums(found))
        mode = call.facts.logprobs_mode
        return json_response(
            MismatchAnswer(request_id=body.request_id, logprobs_mode=mode, **asdict(found))
        )


def _sums(found: Mismatch) -> Compared:
    count = found.num_tokens
    return Compared(
        num_tokens=count,
        difference=found.mean_difference * count,
        kl=found.kl * count,
        weights=found.mean_weight * count,
        squared_weights=found.mean_squared_weight * count,
    )
