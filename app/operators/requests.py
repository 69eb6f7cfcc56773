"""`GET /requests`: the requests in flight in all front ends of the server."""

from collections import Counter

import msgspec
from flask import Blueprint

from app.call.service import current_service
from app.http.auth import current_key, sees_all_requests
from app.pool.command_sender import CommandSender
from app.pool.records import Worker
from app.route.operation import Operation, Query
from app.route.query import query_count
from titopool.answers.operators import OpenRequest, OpenRequests
from titopool.wire.commands import CountTokens, GatherRequests
from titopool.wire.messages import ListedRequests, RequestInfo

blueprint = Blueprint("requests", __name__)

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
# A worker waits a second for front ends, and answers at once about its own jobs.
GATHER_TIMEOUT_S, COUNT_TIMEOUT_S = 2.0, 0.5


@blueprint.get("/requests/")
@Operation(
    query=(
        Query(
            "limit",
            {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
            "how many are listed, the oldest first",
        ),
    ),
)
def requests() -> OpenRequests:
    """The oldest requests in flight, at most `limit` of the query.

    Whichever front end is asked, it answers for all that share its workers; `num_missing` counts those
    that did not answer within a second. Ids, addresses and names of keys of other keys' requests are
    for administrators.
    """
    limit = query_count("limit", default=DEFAULT_LIMIT, most=MAX_LIMIT)
    service = current_service()
    service.link.wait_for_heartbeats()
    commands = service.link.commands
    workers = commands.known_workers()
    listed, num_missing = _all_front_ends(commands, workers, limit)
    own = service.requests.listed("", limit)
    if own.front_end not in (one.front_end for one in listed):
        listed.append(own)
    found = sorted((info for one in listed for info in one.requests), key=lambda info: -info.age_s)
    shown = _with_tokens(commands, workers, found[:limit])
    return OpenRequests(
        requests=[_visible(one) for one in shown],
        num_requests=sum(one.num_requests for one in listed),
        num_front_ends=len(listed),
        num_missing=num_missing,
    )


def _all_front_ends(
    commands: CommandSender, workers: list[Worker], limit: int
) -> tuple[list[ListedRequests], int]:
    """The answers of front ends, and how many did not answer in time.

    The worker that most of them use asks them.
    """
    if not workers:
        return [], 0
    best = max(workers, key=lambda one: one.heartbeat.num_front_ends if one.heartbeat else 0)
    action = GatherRequests(limit)
    (outcome,) = commands.gather_outcomes([best], action, timeout_s=GATHER_TIMEOUT_S)
    if outcome.result is None:
        # The worker did not answer, so that it is not known what all but this front end have.
        num_front_ends = best.heartbeat.num_front_ends if best.heartbeat else 1
        return [], max(0, num_front_ends - 1)
    listed = msgspec.convert(outcome.result["front_ends"], list[ListedRequests])
    return listed, int(outcome.result["num_missing"])


def _with_tokens(
    commands: CommandSender, workers: list[Worker], found: list[RequestInfo]
) -> list[RequestInfo]:
    """The requests with the tokens that only their workers know so far.

    Requests that share an id have the tokens that their front ends know.
    """
    running = [one for one in found if one.phase == "running"]
    uses = Counter(name for one in running for name in (one.id, *one.job_ids))
    asked = [name for name, num_uses in uses.items() if num_uses == 1]
    if not asked:
        return found
    outcomes = commands.gather_outcomes(workers, CountTokens(asked), timeout_s=COUNT_TIMEOUT_S)
    counts: dict[str, int] = {}
    for outcome in outcomes:
        for name, num_tokens in (outcome.result or {}).get("tokens", {}).items():
            counts[name] = counts.get(name, 0) + num_tokens

    def counted(one: RequestInfo) -> RequestInfo:
        more = sum(counts.get(name, 0) for name in (one.id, *one.job_ids))
        if one.phase != "running" or not more:
            return one
        return msgspec.structs.replace(one, tokens_out=one.tokens_out + more)

    return [counted(one) for one in found]


def _visible(info: RequestInfo) -> OpenRequest:
    """What the current client may see of a request."""
    shown = OpenRequest(**msgspec.structs.asdict(info) | {"age_s": round(info.age_s, 3)})
    if not sees_all_requests() and info.key != current_key().name:
        shown.id, shown.job_ids, shown.client, shown.key = None, [], None, None
    return shown
