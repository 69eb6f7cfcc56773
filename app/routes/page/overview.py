"""`GET /workers`: what each worker is, does and has done, as of its last heartbeat."""

import time
from typing import Any

from flask import Blueprint, Response

from app.http.responses import json_response
from app.openapi.answers.control import Overview
from app.openapi.operation import Operation
from app.pool.link import WorkerView
from app.pool.records import LastEnd
from app.service import Service, current_service
from titopool.wire.messages import Heartbeat
from titopool.wire.pool_files import WorkerEnd, read_ends

blueprint = Blueprint("overview", __name__)


@blueprint.get("/workers/")
@Operation(answer=Overview)
def workers() -> Response:
    """The workers in the order of their endpoints; 200 also while none is ready."""
    service = current_service()
    service.link.look_up_workers()
    service.link.wait_for_heartbeats()
    ends = read_ends(service.config.run_dir)
    listed = [describe(service, view, ends) for view in service.link.workers]
    return json_response({"draining": service.is_draining, "workers": listed})


def describe(service: Service, view: WorkerView, ends: dict[str, WorkerEnd]) -> dict[str, Any]:
    """One worker; null where it has to answer first.

    Args:
        ends: as the supervisor knows them, by name of the worker.
    """
    beat = view.heartbeat
    seen = view.last_end
    name = beat.worker_id if beat else seen.worker_id if seen else ""
    end = latest_end(_as_of_now(seen) if seen else None, ends.get(name))
    return {
        "worker": name or None,
        "endpoint": view.endpoint,
        "phase": view.phase,
        "reason": view.reason or None,
        "phase_s": round(beat.phase_s, 1) if beat else None,
        "silent_s": round(view.silent_s, 1),
        "last_end": (
            {"reason": end.reason, "ended_at": round(end.ended_at, 1),
             "ago_s": round(max(0.0, time.time() - end.ended_at), 1)}
            if end else None
        ),
        **(_of_engine(service, beat) if beat else {}),
    }  # fmt: skip


def _of_engine(service: Service, beat: Heartbeat) -> dict[str, Any]:
    facts, counters = beat.facts, beat.counters
    return {
        "model": facts.model if facts else None,
        "dtype": facts.dtype.removeprefix("torch.") if facts else None,
        "vllm_version": facts.vllm_version if facts else None,
        "weight_version": beat.weights.version,
        "weight_label": service.link.label_of(beat.weights.version),
        "loop_stood_s": round(beat.loop_stood_s, 1),
        "num_sequences": beat.num_sequences,
        "num_slots": facts.max_num_seqs if facts else None,
        "num_prompt_tokens": counters.num_prompt_tokens,
        "num_cached_tokens": counters.num_cached_tokens,
        "num_completion_tokens": counters.num_completion_tokens,
        "num_completed_jobs": counters.num_completed_jobs,
        "num_failed_jobs": counters.num_failed_jobs,
    }


def _as_of_now(seen: LastEnd) -> WorkerEnd:
    """The last heartbeat is the last sign of life: a silent worker is lost much later."""
    return WorkerEnd(seen.reason, time.time() - (time.monotonic() - seen.last_seen))


# The supervisor sees an end up to its poll after the front ends, or before them.
SAME_END_S = 10.0


def latest_end(seen: WorkerEnd | None, told: WorkerEnd | None) -> WorkerEnd | None:
    """The end that this front end saw, or the supervisor's record, which has the exit's cause.

    A worker may also have ended in a way that only one of the two noticed.
    """
    if seen is None or told is None:
        return seen or told
    return told if told.ended_at > seen.ended_at - SAME_END_S else seen
