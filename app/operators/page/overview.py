"""`GET /workers`: what each worker is, does and has done, as of its last heartbeat."""

import time

from flask import Blueprint

from app.call.service import Service, current_service
from app.pool.link import WorkerView
from app.pool.records import LastEnd
from app.route.operation import Operation
from titopool.answers.operators import Overview, WorkerOverview
from titopool.answers.operators import WorkerEnd as ShownEnd
from titopool.wire.messages import Heartbeat
from titopool.wire.run_dir import ENDS, WorkerEnd, read_record

blueprint = Blueprint("overview", __name__)


@blueprint.get("/workers/")
@Operation()
def workers() -> Overview:
    """The workers in the order of their endpoints; 200 also while none is ready."""
    service = current_service()
    service.link.look_up_workers()
    service.link.wait_for_heartbeats()
    ends = read_record(service.config.run_dir, ENDS, dict[str, WorkerEnd], {})
    listed = [describe(service, view, ends) for view in service.link.workers]
    return Overview(draining=service.is_draining, workers=listed)


def describe(service: Service, view: WorkerView, ends: dict[str, WorkerEnd]) -> WorkerOverview:
    """One worker; null where it has to answer first.

    Args:
        ends: as the supervisor knows them, by name of the worker.
    """
    beat = view.heartbeat
    seen = view.last_end
    name = beat.worker_id if beat else seen.worker_id if seen else ""
    end = latest_end(_as_of_now(seen) if seen else None, ends.get(name))
    overview = WorkerOverview(
        worker=name or None,
        endpoint=view.endpoint,
        phase=view.phase,
        reason=view.reason or None,
        phase_s=round(beat.phase_s, 1) if beat else None,
        silent_s=round(view.silent_s, 1),
        last_end=_shown(end) if end else None,
    )
    if beat:
        _add_engine(overview, service, beat)
    return overview


def _shown(end: WorkerEnd) -> ShownEnd:
    ago_s = round(max(0.0, time.time() - end.ended_at), 1)
    return ShownEnd(reason=end.reason, ended_at=round(end.ended_at, 1), ago_s=ago_s)


def _add_engine(overview: WorkerOverview, service: Service, beat: Heartbeat) -> None:
    facts, counters = beat.facts, beat.counters
    overview.model = facts.model if facts else None
    overview.dtype = facts.dtype.removeprefix("torch.") if facts else None
    overview.vllm_version = facts.vllm_version if facts else None
    overview.weight_version = beat.weights.version
    overview.weight_label = service.link.label_of(beat.weights.version)
    overview.loop_stood_s = round(beat.loop_stood_s, 1)
    overview.num_sequences = beat.num_sequences
    overview.num_slots = facts.max_num_seqs if facts else None
    overview.num_prompt_tokens = counters.num_prompt_tokens
    overview.num_cached_tokens = counters.num_cached_tokens
    overview.num_completion_tokens = counters.num_completion_tokens
    overview.num_completed_jobs = counters.num_completed_jobs
    overview.num_failed_jobs = counters.num_failed_jobs


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
