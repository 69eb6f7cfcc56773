"""The spans of a job in a worker: its wait for a slot, and the engine with prefill and decoding."""

import time
from collections.abc import Callable

import msgspec

from titopool.tracing import Span, Traces
from titopool.wire.messages import ID_BYTES, Completed, Failed, Job
from workers.engine.base import Timings

# Waits that are shorter are not shown.
LEAST_WAIT_S = 0.0005


class JobSpans:
    """The spans of one job whose request is traced."""

    def __init__(self, traces: Traces, job: Job, worker_id: str):
        """The job has arrived."""
        self._traces = traces
        self._began_s = time.monotonic()
        self._job = job
        self._span: Span = traces.begin(
            "job",
            {"traceparent": job.traceparent},
            {
                "titopool.worker": worker_id,
                "titopool.request_id": job.client_id,
                "titopool.job_id": job.job_id,
                "titopool.attempt": job.attempt,
                "titopool.num_completions": job.num_sequences,
                "gen_ai.usage.input_tokens": len(job.prompt_token_ids) // ID_BYTES,
            },
            is_server=True,
        )
        self._engine: Span = None
        self._engine_s: float | None = None
        self._first_s: float | None = None
        self._left_s: float | None = None
        self._timings: Timings | None = None
        # None while it runs, and if its front end has aborted it or the engine has died.
        self.result: Completed | Failed | None = None

    def enter_engine(self) -> Job:
        """The job as the engine gets it: within the engine's span."""
        self._engine_s = time.monotonic()
        if self._engine_s - self._began_s >= LEAST_WAIT_S:
            self._traces.add("slot wait", self._span, self._began_s, self._engine_s)
        self._engine = self._traces.begin("engine", self._span, begin_s=self._engine_s)
        context = self._traces.traceparent_of(self._engine)
        return msgspec.structs.replace(self._job, traceparent=context)

    def note_token(self) -> None:
        """A token has come; the first call counts."""
        if self._first_s is None:
            self._first_s = time.monotonic()

    def leave_engine(self, timings: Timings | None) -> None:
        """The engine has completed the job."""
        self._timings, self._left_s = timings, time.monotonic()

    def end(self) -> None:
        """The job has ended."""
        result = self.result
        if self._engine is not None:
            left_s = self._left_s or time.monotonic()
            self._add_steps(left_s)
            self._traces.end(self._engine, end_s=left_s)
        self._traces.end(
            self._span, _facts_of(result),
            error=result.code if isinstance(result, Failed) else "" if result else "aborted",
        )  # fmt: skip

    def _add_steps(self, now_s: float) -> None:
        add: Callable[..., None] = self._traces.add
        if (timings := self._timings) is not None:
            add("engine queue", self._engine, timings.queued_s, timings.scheduled_s)
            add("prefill", self._engine, timings.scheduled_s, timings.first_token_s)
            add("decode", self._engine, timings.first_token_s, timings.last_token_s)
        elif self._first_s is not None:
            # As the first token was noticed.
            add("prefill", self._engine, self._engine_s, self._first_s)
            add("decode", self._engine, self._first_s, now_s)


def _facts_of(result: Completed | Failed | None) -> dict[str, int | list[str]]:
    if not isinstance(result, Completed):
        return {}
    completions = result.completions
    return {
        "gen_ai.usage.output_tokens": sum(len(one.token_ids) for one in completions) // ID_BYTES,
        "gen_ai.response.finish_reasons": sorted({one.finish_reason for one in completions}),
        "titopool.num_cached_tokens": result.num_cached_tokens,
        "titopool.weight_versions": sorted(
            {str(version) for one in completions for version, _ in one.weight_versions}
        ),
    }
