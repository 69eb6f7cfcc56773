"""A worker's server: receives jobs and commands on a ZeroMQ socket and sends the results.

Runs in: each worker process, on its event loop. Owns: the ROUTER socket, which the watchdog's thread
uses too, each call under a lock, and the jobs in flight.
Talks to: `app/pool/link.py` of every front end that has sent `Hello`, and the engine. The engine
loads in a thread, so that the worker can report its phase while it loads.
"""

import asyncio
import itertools
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import msgspec
import zmq

from titopool.deadline import Deadline
from titopool.errors import GenerationFailed, TitopoolError
from titopool.settings.config import ServerConfig
from titopool.settings.logs import current_request
from titopool.settings.sampling import is_scored
from titopool.tracing import FLUSH_TIMEOUT_S, Traces
from titopool.wire import messages
from titopool.wire.commands import Command
from titopool.wire.distributions import Distribution
from titopool.wire.messages import (
    Abort,
    Chunk,
    Completed,
    Completion,
    Failed,
    FrontEndTotals,
    Generate,
    Heartbeat,
    Hello,
    Job,
    JobProgress,
    Result,
    WorkerCounters,
)
from titopool.wire.run_dir import RESTARTS, read_record
from titopool.wire.sockets import ANY_PORT, bind_router, listen_address
from workers.engine.base import Engine, EngineDead, OnChunk
from workers.engine.metrics.exposition import bounded
from workers.process import EXIT_FAILED, EXIT_WEIGHTS_UNKNOWN, in_daemon_thread, kill_children
from workers.serving.apart import ApartGroups, Turn
from workers.serving.control import Control
from workers.serving.front_end_queues import FrontEndQueues
from workers.serving.job_spans import JobSpans
from workers.serving.jobs import FrontEnd, JobKey, count_job, prefix_of, sum_of
from workers.serving.slots import EngineSlots, JobSlots
from workers.serving.steps import Steps
from workers.serving.watchdog import Watchdog
from workers.supervisor.phase_pipe import Load

logger = logging.getLogger(__name__)

# How long the engine may take to stop before its processes are killed.
CLOSE_TIMEOUT_S = 3.0
# From a broken weight update to the end of the worker: the answers must be sent first.
STOP_DELAY_S = 0.1
# Changes of load within this time are sent in one message.
LOAD_REPORT_S = 0.01
# Before a job starts that may end this process: front ends must learn that it started.
APART_LEAD_S = 0.02
# From the first token of such a job with a grammar until it counts as harmless: a mask that hangs may
# come some tokens later.
GRAMMAR_LEAD_S = 0.5
# Of one report of load; 128 KiB hold the digests of a million tokens.
MAX_PREFIX_BYTES = 128 * 1024
# Of the results in one message, unless one alone has more: a front end has a message in memory twice
# while it decodes it.
GROUP_BYTES = 2**20
# Between two messages with the metrics of the engine.
METRICS_S = 2.0
# Seconds for the images of one prompt.
IMAGE_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# For the socket that the event loop has, in the watchdog's thread.
LOCK_WAIT_S = 0.05
# Front ends whose totals are known apart, as they may come back; of others there is a sum.
MAX_LOST = 64
# Between two looks at the jobs that a worker finishes before it stops.
DRAIN_POLL_S = 0.05


class WorkerServer:
    """Serves one engine at one endpoint until `stop` is called or the engine dies."""

    def __init__(
        self,
        engine: Engine,
        *,
        endpoint: str,
        worker_id: str,
        config: ServerConfig,
        report: Callable[[str], None],
        report_load: Callable[[Load], None] = lambda load: None,
        report_endpoint: Callable[[str], None] = lambda endpoint: None,
        report_alive: Callable[[], None] = lambda: None,
        parent_pid: int | None = None,
    ):
        """`report` gets each phase. The worker stops when its parent is no longer `parent_pid`.

        Args:
            endpoint: with port 0, `report_endpoint` gets the endpoint with the kernel's choice.
            report_alive: called every `heartbeat_interval_s`, in a thread.
        """
        self._engine = engine
        self._endpoint = endpoint
        self._worker_id = worker_id
        self._config = config
        self._report_phase, self._report_load_to_supervisor = report, report_load
        self._report_endpoint, self._report_alive = report_endpoint, report_alive
        self._parent_pid = parent_pid
        self._incarnation = uuid.uuid4().hex
        # The exit code of the process if `run` returns a reason.
        self.exit_code = EXIT_FAILED
        self._phase, self._phase_since = "starting", time.monotonic()
        self._facts: messages.WorkerFacts | None = None
        self._loaded_at = 0.0
        self._front_ends: dict[bytes, FrontEnd] = {}
        # Of those that have ended, or are silent; first the sum of those that do not come back.
        self._lost_totals: dict[bytes, FrontEndTotals] = {b"": FrontEndTotals()}
        # What was logged of front ends whose messages have another version.
        self._other_wires: set[str] = set()
        self._flush_planned = self._report_planned = False
        self._counters = engine.counters = WorkerCounters()
        self._key_totals: dict[str, messages.KeyTotals] = {}
        self._image_stages: dict[str, Distribution] = {}
        self._restarts = read_record(config.run_dir, RESTARTS.format(worker_id), dict[str, int], {})
        # Set when a front end wants metrics that did not want them before.
        self._metrics_wanted = asyncio.Event()
        self._queues = FrontEndQueues(self._send_to_all)
        self._control = Control(
            engine,
            config,
            worker_id=worker_id,
            listen_address=listen_address(endpoint),
            on_changed=self._send_heartbeats,
            on_broken=self._stop_with_unknown_weights,
            front_ends=self._queues,
        )
        self._blames_jobs = False
        # None without the setting `otlp_endpoint`.
        self._traces: Traces | None = None
        self._apart = ApartGroups(self._has_risks)
        self._slots = EngineSlots(lambda: self._num_running)
        # What was last reported of it.
        self._num_wanted_ahead = 0
        # A ZeroMQ socket may go from thread to thread, as a lock makes it.
        self._router_lock = threading.Lock()
        self._watchdog = Watchdog(
            config.heartbeat_interval_s, on_turn=self._speak_for_loop, limit_s=self._hang_limit_s
        )
        self._steps = Steps()
        self._background: set[asyncio.Task[None]] = set()
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> str:
        """Serves until the end; returns the reason for it ("" after `stop()`).

        Raises:
            Exception: the error with which loading the engine failed.
        """
        self._loop = asyncio.get_running_loop()
        self._stop_reason: asyncio.Future[str] = self._loop.create_future()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = bind_router(context, self._endpoint, self._config.curve_key_file)
        if self._endpoint.endswith(ANY_PORT):
            # ZeroMQ writes an IPv4 address as one of IPv6.
            port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2]
            self._report_endpoint(f"{self._endpoint.removesuffix(ANY_PORT)}:{port}")
        self._loop.add_reader(self._router.FD, self._receive)
        self._watchdog.start()
        background = [
            self._loop.create_task(self._start_engine()),
            self._loop.create_task(self._heartbeat_loop()),
            self._loop.create_task(self._metrics_loop()),
            self._loop.create_task(self._control.watch()),
            self._loop.create_task(self._control.follow_pool()),
        ]
        for task in background:
            task.add_done_callback(self._stop_if_failed)
        try:
            return await self._stop_reason
        finally:
            for task in background:
                task.cancel()
            self._loop.remove_reader(self._router.FD)
            await self._close(self._stop_cause())
            if self._traces is not None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(in_daemon_thread(self._traces.flush), FLUSH_TIMEOUT_S)
            self._watchdog.stop()
            # Long enough to send `Stopping`.
            self._router.close(linger=500)
            context.term()

    def _stop_if_failed(self, task: asyncio.Task[None]) -> None:
        # Without heartbeats, for example, front ends would mark the worker lost.
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the worker failed", exc_info=task.exception())
            self.stop(f"the worker itself failed: {task.exception()!r}", blames_jobs=True)

    def stop(self, reason: str = "", *, blames_jobs: bool = False) -> None:
        """Makes `run` return; a second call does nothing.

        `blames_jobs`: a job in flight may be the cause, which front ends then find.
        """
        if not self._stop_reason.done():
            self._blames_jobs = blames_jobs
            self._stop_reason.set_result(reason)

    def drain(self) -> None:
        """Takes no new jobs, finishes those in flight, and stops; a second call stops at once.

        Jobs that are in flight after `drain_timeout_s` go back to their front ends. A worker that is
        not ready stops at once.
        """
        if self._draining is not None or self._phase != "ready":
            self.stop()
        else:
            self._begin_to_drain("draining")

    def leave(self) -> None:
        """As `drain`, and the supervisor does not start this worker again; may be called again."""
        if self._phase == "ready":
            self._begin_to_drain("leaving")
        elif self._phase != "leaving":
            # Without this report, the end of a worker that loads is a failed start.
            self._enter_phase("leaving")
            if self._draining is None:
                self.stop()

    def _begin_to_drain(self, phase: str) -> None:
        self._draining = self._loop.create_task(self._drain())
        self._draining.add_done_callback(self._stop_if_failed)
        self._enter_phase(phase)
        self._send_heartbeats()

    async def _drain(self) -> None:
        deadline = Deadline.after(self._config.drain_timeout_s)
        while self._is_needed and not deadline.has_passed:
            await asyncio.sleep(DRAIN_POLL_S)
        self.stop()

    @property
    def _is_needed(self) -> bool:
        """Whether jobs are in flight, or a weight update is open that would fail without this worker."""
        return (
            self._control.has_open_update
            or bool(self._steps)
            or any(one.tasks or one.outbox for one in self._front_ends.values())
        )

    def _stop_with_unknown_weights(self, reason: str) -> None:
        """Stops after a weight update that left the model's weights in an unknown state."""
        self.exit_code = EXIT_WEIGHTS_UNKNOWN
        self._loop.call_later(STOP_DELAY_S, self.stop, reason)

    async def _start_engine(self) -> None:
        try:
            facts = await in_daemon_thread(lambda: self._engine.load(self._enter_phase))
            self._enter_phase("warming")
            await self._engine.warm_up()
            await self._control.start(facts.model)
        except Exception as error:
            if not self._stop_reason.done():
                self._stop_reason.set_exception(error)
            return
        if self._config.otlp_endpoint:
            # After the engine's process was forked.
            self._traces = Traces(self._config.otlp_endpoint, "titopool-worker")
        self._facts, self._loaded_at = facts, time.monotonic()
        self._slots.num_slots = facts.max_num_seqs
        self._slots.bunches = self._engine.has_decode_graphs
        # Imports hold the loop up.
        self._watchdog.start_over()
        self._enter_phase("ready")
        await self._probe_engine()

    def _enter_phase(self, phase: str) -> None:
        self._phase, self._phase_since = phase, time.monotonic()
        self._report_phase(phase)

    async def _probe_engine(self) -> None:
        timeout_s = self._config.engine_probe_timeout_s
        while True:
            await asyncio.sleep(timeout_s / 4)
            if self._control.has_call_in_flight:
                continue
            try:
                await asyncio.wait_for(self._engine.probe(), timeout_s)
            except Exception as error:
                self.stop(
                    f"the engine did not answer a probe within {timeout_s:g} s "
                    f"(engine_probe_timeout_s): {type(error).__name__} {error}",
                    blames_jobs=True,
                )

    # ---- receiving -------------------------------------------------------------------

    def _receive(self) -> None:
        # ZeroMQ's descriptor is edge-triggered: all messages must be read now.
        while True:
            try:
                with self._router_lock:
                    identity, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                logger.warning("dropped a message: expected 2 frames")
                continue
            try:
                message = messages.decode_to_worker(frame)
            except messages.UNREADABLE as error:
                if reason := messages.explain_other_wire(frame):
                    self._loop.call_soon(self._answer_other_wire, identity, reason)
                else:
                    logger.warning("dropped an undecodable message: %s", error)
                continue
            if isinstance(message, Hello):
                # Not behind the jobs of other messages: a front end that is silent is dropped.
                try:
                    self._control.merge_pool_state(message.pool)
                    self._on_hello(identity, message)
                except Exception:
                    # Continue with the messages behind it: the descriptor will not signal them again.
                    logger.exception("a message could not be handled")
            else:
                self._steps.add(self._handle(identity, message))

    def _handle(self, identity: bytes, message: messages.ToWorker) -> Iterator[None]:
        """The steps of a message: one for each job that it starts, else one."""
        match message:
            case Generate(incarnation=self._incarnation, apart=apart):
                jobs = message.whole_jobs()
                turns = self._apart.add(len(jobs), identity, apart) if apart and jobs else ()
                granted = message.granted[: len(jobs)]
                for job, turn, num in itertools.zip_longest(jobs, turns, granted):
                    num_granted = job.num_sequences if num is None else num
                    self._start_job(identity, job, turn, num_granted, is_new=message.is_new)
                    yield
                return
            case messages.Grant(jobs=more):
                for job_id, attempt, num in more:
                    self._grant(identity, (job_id, attempt), num)
            case Abort(jobs=keys):
                for job_id, attempt in keys:
                    self._abort(identity, (job_id, attempt))
            case messages.Drift(num_compared=num_compared, num_drifted=num_drifted):
                self._counters.num_compared_prompts += num_compared
                self._counters.num_drifted_prompts += num_drifted
            case messages.Compared():
                self._counters.num_mismatch_tokens += message.num_tokens
                self._counters.mismatch_difference += message.difference
                self._counters.mismatch_kl += message.kl
                self._counters.mismatch_weights += message.weights
                self._counters.mismatch_squared_weights += message.squared_weights
            case messages.Leave(incarnation=self._incarnation):
                self.leave()
            case messages.EndedWaiting() | messages.ListedRequests():
                self._queues.on_answer(identity, message)
            case Command(incarnation=self._incarnation):
                self._spawn(self._answer(identity, message))
        yield

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _answer(self, identity: bytes, command: Command) -> None:
        self._send(identity, await self._control.answer(command, identity))

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        front_end, totals = self._front_ends.get(identity), hello.front_end
        if front_end is None:
            self._lost_totals.pop(identity, None)
            self._front_ends[identity] = FrontEnd(time.monotonic(), totals)
            self._send_heartbeat(identity, self._front_ends[identity])
        else:
            front_end.last_hello, front_end.totals = time.monotonic(), totals
        if hello.wants_engine_metrics and not self._front_ends[identity].wants_metrics:
            self._metrics_wanted.set()
        self._front_ends[identity].wants_metrics = hello.wants_engine_metrics

    def _answer_other_wire(self, identity: bytes, reason: str) -> None:
        """A heartbeat, for a front end that says hello in another version of the messages."""
        if reason not in self._other_wires:
            self._other_wires.add(reason)
            logger.error("a front end is left alone: %s", reason)
        self._send(identity, self._heartbeat(identity, FrontEnd(time.monotonic())))

    def _start_job(
        self, identity: bytes, job: Job, turn: Turn | None, num_granted: int, *, is_new: bool
    ) -> None:
        front_end = self._front_ends.get(identity)
        key = (job.job_id, job.attempt)
        # After a stop its front end sends it to another worker.
        has_stopped = self._stop_reason.done()
        if has_stopped or front_end is None or self._facts is None or key in front_end.jobs:
            logger.warning(
                "ignored job %s: the worker stops, no Hello came first, the engine is not ready, or it "
                "is a repeat",
                key,
                extra={"request_id": job.client_id},
            )
            if turn is not None:
                turn.end()
            return

        def on_progress(num_ended: int) -> None:
            if num_ended:
                front_end.note_end(key)
            front_end.changed.add(key)
            self._plan_flush()
            # The slots of one job become free, or are taken, while no job comes or ends.
            self._plan_load_report()

        slots = JobSlots(
            self._slots, front_end.slots, key, job.num_sequences, on_progress, is_new=is_new
        )
        spans = None
        if job.traceparent and self._traces is not None:
            spans = JobSpans(self._traces, job, self._worker_id)
        task = self._loop.create_task(self._run_job(front_end, job, slots, turn, spans))
        front_end.add(key, job, task, slots)
        if turn is None:
            slots.grant(num_granted)
        # Not in the task: a task that is cancelled before its first step runs no `finally`.
        task.add_done_callback(lambda _: self._remove_job(front_end, key, turn, slots))
        if spans is not None:
            task.add_done_callback(lambda _: spans.end())
        # Not only when it ends: the next turn may come at once, through another front end.
        self._share_prefix(front_end, job.prefix)
        self._plan_load_report()

    def _grant(self, identity: bytes, key: JobKey, num: int) -> None:
        front_end = self._front_ends.get(identity)
        slots = front_end.job_slots.get(key) if front_end else None
        if slots is not None:
            slots.grant(num)
            self._plan_load_report()

    def _remove_job(
        self, front_end: FrontEnd, key: JobKey, turn: Turn | None, slots: JobSlots
    ) -> None:
        front_end.remove(key)
        if turn is not None:
            turn.end()
        self._apart.start_first()
        slots.leave()
        self._plan_load_report()

    def _abort(self, identity: bytes, key: JobKey) -> None:
        front_end = self._front_ends.get(identity)
        task = front_end.tasks.get(key) if front_end else None
        if task is not None and task.cancel():
            self._counters.num_aborted_jobs += 1

    # ---- running ---------------------------------------------------------------------

    async def _run_job(
        self,
        front_end: FrontEnd,
        job: Job,
        slots: JobSlots,
        turn: Turn | None = None,
        spans: JobSpans | None = None,
    ) -> None:
        def on_chunk(chunk: Chunk | JobProgress) -> None:
            if spans is not None:
                spans.note_token()
            if turn is not None and isinstance(chunk, JobProgress) and key in front_end.grammars:
                self._loop.call_later(GRAMMAR_LEAD_S, report, chunk)
            else:
                report(chunk)

        def report(chunk: Chunk | JobProgress) -> None:
            if key in front_end.new:
                front_end.new.discard(key)
                self._plan_load_report()
                if turn is not None:
                    turn.has_token()
                self._apart.start_first()
            self._post(front_end, chunk)

        key = (job.job_id, job.attempt)
        result: Completed | Failed
        # Of this task only.
        current_request.set(job.client_id)
        try:
            # A front end ends the jobs that it knows to wait here by itself. It takes others for begun,
            # for example where another front end's job got the slot that was free. Prompts are also
            # scored, and rendered, after an abort.
            ends_early = job.num_sequences and not is_scored(job)
            with (
                self._engine.versions.job(job, slots.stop, is_waiting=True)
                if ends_early
                else nullcontext()
            ):
                await self._wait_to_begin(front_end, job, slots, turn)
            if slots.is_stopped:
                self._post_aborted(front_end, job)
                return
            result = await self._generate(job, on_chunk, slots, spans)
            count_job(self._counters, self._key_totals, job, result)
        except TitopoolError as error:
            result = Failed(job.job_id, job.attempt, error.code, error.message, error.param)
            count_job(self._counters, self._key_totals, job, result)
        except EngineDead as error:
            # Without a result, the front end requeues the job for another worker.
            self.stop(str(error), blames_jobs=True)
            return
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            # A panic of a library in Rust is no `Exception`.
            logger.exception("job %d failed", job.job_id)
            result = self._failed(job, "failed on this prompt")
        if spans is not None:
            spans.result = result
        self._post(front_end, result)
        if isinstance(result, Completed) and result.prefix:
            self._share_prefix(front_end, (job.prefix or b"") + result.prefix)

    async def _wait_to_begin(
        self, front_end: FrontEnd, job: Job, slots: JobSlots, turn: Turn | None
    ) -> None:
        """Returns once the engine may have a job, or `slots` are stopped."""
        if turn is not None:
            await turn.wait()
            slots.grant_apart()
        if job.num_sequences and not await slots.take():
            return
        if turn is not None:
            await self._announce(front_end, job, APART_LEAD_S)
        elif self._apart:
            await self._apart.wait_beside()
            await self._announce(front_end, job, APART_LEAD_S)
        else:
            front_end.start((job.job_id, job.attempt), job)
            if slots.tells_starts:
                front_end.changed.add((job.job_id, job.attempt))
                self._plan_flush()
        await self._control.before_job()

    def _post_aborted(self, front_end: FrontEnd, job: Job) -> None:
        """Completes a job without a token."""
        version = self._control.adapters.get(job.adapter)
        completion = Completion(b"", "abort", None, [(self._engine.versions.current, 0)])
        if job.is_streamed:
            pieces = [(index, completion) for index in range(job.num_sequences)]
            chunk = Chunk(job.job_id, job.attempt, pieces, adapter_version=version)
            self._post(front_end, chunk)
        completions = [completion] * job.num_sequences
        result = Completed(job.job_id, job.attempt, completions, 0, adapter_version=version)
        self._post(front_end, result)

    async def _announce(self, front_end: FrontEnd, job: Job, lead_s: float) -> None:
        """Tells the front end that a job starts which had to wait; returns `lead_s` later."""
        key = (job.job_id, job.attempt)
        front_end.start(key, job)
        self._plan_load_report()
        front_end.changed.add(key)
        self._plan_flush()
        await asyncio.sleep(lead_s)

    def _has_risks(self, *, with_token: bool) -> bool:
        """Whether a job in the engine may end it; `with_token`: also one that has a token."""
        return any(one.risks if with_token else one.new for one in self._front_ends.values())

    def _failed(self, of: Job | Result, what: str) -> Failed:
        text = f"worker {self._worker_id} {what}; its log has the reason"
        return Failed(of.job_id, of.attempt, GenerationFailed.code, text)

    def _post(self, front_end: FrontEnd, result: Result) -> None:
        front_end.outbox.append(result)
        self._plan_flush()

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            # Results of one engine step are sent together.
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def _share_prefix(self, front_end: FrontEnd, prefix: bytes | None) -> None:
        """Lets the other front ends route prompts with this prefix to this worker."""
        if not prefix:
            return
        for other in self._front_ends.values():
            if other is not front_end and len(other.prefixes) + len(prefix) <= MAX_PREFIX_BYTES:
                other.prefixes += prefix

    async def _generate(
        self, job: Job, on_chunk: OnChunk, slots: JobSlots, spans: JobSpans | None
    ) -> Completed:
        if spans is None:
            generated = await self._engine.run(job, on_chunk, slots)
        else:
            generated = await self._engine.run(spans.enter_engine(), on_chunk, slots)
            spans.leave_engine(generated.timings)
        self._counters.num_images += generated.num_images
        self._counters.image_seconds += generated.image_s
        if generated.image_s:
            self._count_images(generated.image_decode_s, generated.image_s)
        return Completed(
            job.job_id,
            job.attempt,
            generated.completions,
            generated.num_cached_tokens,
            prefix_of(job, generated, self._facts),
            generated.prompt_token_ids,
            generated.prompt_logprobs,
            generated.adapter_version,
            list(generated.image_ranges),
        )

    def _count_images(self, decode_s: float, all_s: float) -> None:
        for stage, seconds in (("decode", decode_s), ("preprocess", all_s - decode_s)):
            self._image_stages.setdefault(stage, Distribution(IMAGE_BOUNDS)).add(seconds)

    # ---- sending ---------------------------------------------------------------------

    def _flush(self) -> None:
        self._flush_planned = False
        self._report_wanted_ahead()
        for identity, front_end in self._front_ends.items():
            results = front_end.take_results()
            for group in in_groups(results):
                self._send_results(identity, group)

    def _send_results(self, identity: bytes, results: list[Result]) -> None:
        try:
            self._send(identity, messages.Results(results))
        except (UnicodeEncodeError, OverflowError, TypeError):
            # One result that cannot be encoded must not hold back the others.
            logger.exception("a result could not be encoded")
            if len(results) > 1:
                for one in results:
                    self._send_results(identity, [one])
            else:
                failed = self._failed(results[0], "could not encode the result")
                self._send(identity, messages.Results([failed]))

    def _send(self, identity: bytes, message: messages.FromWorker) -> None:
        if self._transmit(identity, message):
            self._loop.call_soon(self._receive)

    def _transmit(
        self,
        identity: bytes,
        message: messages.FromWorker,
        *,
        wait_s: float = -1,
        still: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Sends, unless another thread has the socket for `wait_s`; whether the loop must then read.

        Sending may clear the descriptor's signal for a message that has arrived.

        Args:
            still: whether the message is to be sent, once this thread has the socket.
        """
        frame = messages.encode(message)
        if not self._router_lock.acquire(timeout=wait_s):
            return False
        try:
            if not still():
                return False
            self._router.send_multipart([identity, frame], zmq.NOBLOCK)
            return bool(int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        finally:
            self._router_lock.release()

    def _send_to_all(self, message: messages.FromWorker) -> Collection[bytes]:
        for identity in self._front_ends:
            self._send(identity, message)
        return self._front_ends.keys()

    def _report_wanted_ahead(self) -> None:
        """Tells front ends how much work to keep here, unless it has hardly changed."""
        wanted, last = self._slots.num_wanted_ahead, self._num_wanted_ahead
        if abs(wanted - last) > last // 2:
            self._num_wanted_ahead = wanted
            self._plan_load_report(is_for_one=True)

    def _plan_load_report(self, *, is_for_one: bool = False) -> None:
        """Plans a report of load to the front ends; `is_for_one`: also if there is only one."""
        if (is_for_one or len(self._front_ends) > 1) and not self._report_planned:
            self._report_planned = True
            self._loop.call_later(LOAD_REPORT_S, self._report_load)

    def _report_load(self) -> None:
        self._report_planned = False
        # To every front end, also without a change: a front end estimates what it has not received.
        for identity, front_end in self._front_ends.items():
            load = self._load_of_others(identity, front_end)
            prefixes, front_end.prefixes = bytes(front_end.prefixes), bytearray()
            self._send(identity, msgspec.structs.replace(load, prefixes=prefixes))

    def _load_of_others(self, identity: bytes, receiver: FrontEnd) -> messages.Load:
        others = [one for one in self._front_ends.values() if one is not receiver]
        return messages.Load(
            sum(one.slots.num_running for one in others), sum(one.num_tokens for one in others),
            sum(len(one.risks) for one in others), self._apart.of_others(identity),
            num_wanted_ahead=self._num_wanted_ahead,
        )  # fmt: skip

    async def _heartbeat_loop(self) -> None:
        interval_s = self._config.heartbeat_interval_s
        while True:
            if self._watchdog.loop_runs() > interval_s:
                # The Hello messages of the time in which this loop stood are not read yet.
                for front_end in self._front_ends.values():
                    front_end.last_hello = time.monotonic()
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                self.stop("the supervisor has ended")
            if self._engine.has_died:
                self.stop("vLLM's engine process has ended", blames_jobs=True)
            self._drop_lost_front_ends()
            # Slots that were kept for new requests may be free without an end.
            self._slots.fill()
            self._send_heartbeats()
            if self._facts is not None:
                totals, num_running = self._front_end_totals(), self._num_running
                load = Load(totals.num_waiting, num_running, self._facts.max_num_seqs)
                self._report_load_to_supervisor(load)
            await asyncio.sleep(interval_s)

    async def _metrics_loop(self) -> None:
        """Sends the engine's metrics to front ends that want them."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(METRICS_S):
                    await self._metrics_wanted.wait()
            self._metrics_wanted.clear()
            if not any(one.wants_metrics for one in self._front_ends.values()):
                continue
            families = []
            for family in self._engine.metrics(self._worker_id) if self._facts else ():
                families.append(family)
                # Other tasks run in between.
                await asyncio.sleep(0)
            message = bounded(families)
            for identity, front_end in self._front_ends.items():
                if front_end.wants_metrics:
                    self._send(identity, message)

    def _send_heartbeats(self) -> None:
        for identity, front_end in self._front_ends.items():
            self._send_heartbeat(identity, front_end)

    def _send_heartbeat(self, identity: bytes, front_end: FrontEnd) -> None:
        front_end.heartbeat = self._heartbeat(identity, front_end)
        self._send(identity, front_end.heartbeat)

    def _speak_for_loop(self, stood_s: float) -> None:
        """In the watchdog's thread: reports that the process runs, and sends heartbeats if the loop stands."""
        self._report_alive()
        for identity, front_end in list(self._front_ends.items()) if stood_s else ():
            if (last := front_end.heartbeat) is not None:
                beat = msgspec.structs.replace(
                    last, loop_stood_s=stood_s, longest_stand_s=max(stood_s, last.longest_stand_s)
                )
                # The loop may stand where it has the socket.
                still = partial(self._is_newest, front_end, last)
                if self._transmit(identity, beat, wait_s=LOCK_WAIT_S, still=still):
                    self._loop.call_soon_threadsafe(self._receive)

    def _is_newest(self, front_end: FrontEnd, beat: Heartbeat) -> bool:
        """Whether the loop has sent no later state since `beat`, nor that the worker stops."""
        return front_end.heartbeat is beat and self._phase != "stopping"

    def _hang_limit_s(self) -> float:
        """For how long the loop may stand now: for ever while it loads, as imports and the warm-up do.

        While the worker stops, the loop no longer shows itself, and waits for the engine and traces.
        A call to vLLM's processes for weights has its own timeout, which a loop that stands cannot keep.
        """
        limit_s = self._config.worker_hang_timeout_s
        if not limit_s or self._facts is None:
            return math.inf
        if self._phase == "stopping":
            return limit_s + CLOSE_TIMEOUT_S + FLUSH_TIMEOUT_S
        if self._control.has_open_update or self._control.has_call_in_flight:
            limit_s += self._config.weight_update_timeout_s
        return limit_s

    def _heartbeat(self, identity: bytes, receiver: FrontEnd) -> Heartbeat:
        others = self._load_of_others(identity, receiver)
        return Heartbeat(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            phase=self._shown_phase(),
            phase_s=time.monotonic() - self._phase_since,
            weights=self._control.weights,
            adapters=self._control.adapters,
            pool=self._control.pool,
            facts=self._facts,
            loaded_s=time.monotonic() - self._loaded_at if self._facts else 0.0,
            num_front_ends=len(self._front_ends),
            other_sequences=others.other_sequences,
            other_tokens=others.other_tokens,
            other_risks=others.other_risks,
            apart=others.apart,
            num_sequences=self._num_running,
            num_wanted_ahead=others.num_wanted_ahead,
            front_ends=self._front_end_totals(),
            counters=self._counters,
            keys=self._key_totals,
            updates=self._control.update_totals,
            update_phases=self._control.update_phases,
            pauses=self._control.pauses,
            image_stages=self._image_stages,
            restarts=self._restarts,
            longest_stand_s=self._watchdog.longest_s,
        )

    @property
    def _num_running(self) -> int:
        """Completions that the engine has."""
        return sum(one.slots.num_running for one in self._front_ends.values())

    def _front_end_totals(self) -> FrontEndTotals:
        totals = [one.totals for one in self._front_ends.values()]
        return sum_of([*totals, *self._lost_totals.values()])

    def _drop_lost_front_ends(self) -> None:
        oldest = time.monotonic() - self._config.heartbeat_timeout_s
        for identity, front_end in list(self._front_ends.items()):
            if front_end.last_hello < oldest:
                logger.info("a front end is lost with %d jobs in flight", len(front_end.tasks))
                for task in front_end.tasks.values():
                    task.cancel()
                # If the front end was only slow, it requeues its jobs.
                self._send(identity, messages.Stopping(""))
                del self._front_ends[identity]
                # Counters do not fall. Its memory is free, and its queue is gone.
                self._lost_totals[identity] = msgspec.structs.replace(
                    front_end.totals, memory_taken=0, memory_limit=0, num_waiting=0
                )
                if len(self._lost_totals) > MAX_LOST:
                    ended = self._lost_totals.pop(list(self._lost_totals)[1])
                    self._lost_totals[b""] = sum_of([self._lost_totals[b""], ended])
                self._spawn(self._control.on_front_end_lost(identity))

    def _shown_phase(self) -> str:
        if self._draining is not None:
            return "draining"
        return self._control.phase if self._phase == "ready" else self._phase

    def _stop_cause(self) -> str:
        if not self._stop_reason.done():
            return ""
        error = self._stop_reason.exception()
        return self._stop_reason.result() if error is None else repr(error)

    async def _close(self, reason: str) -> None:
        self._phase = "stopping"
        for identity in self._front_ends:
            self._send(identity, messages.Stopping(reason, self._blames_jobs))
        try:
            await asyncio.wait_for(in_daemon_thread(self._engine.close), CLOSE_TIMEOUT_S)
        except Exception as error:
            logger.warning(
                "the engine did not stop by itself and is killed: %s", type(error).__name__
            )
        kill_children()


def in_groups(results: Sequence[Result]) -> Iterator[list[Result]]:
    """`results` in their order, at most `GROUP_BYTES` in each group or one."""
    group, num_bytes = list[Result](), 0
    for one in results:
        # Others are short.
        size = one.num_bytes if isinstance(one, Completed | Chunk) else 0
        if group and num_bytes + size > GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(one)
        num_bytes += size
    if group:
        yield group
