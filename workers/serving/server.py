"""A worker's side of the wire.

Runs in: each worker process, one asyncio loop. Owns: the ROUTER socket and the open jobs.
Talks to: every front end's `app/pool/link.py` that said Hello, and the engine beside it. The
engine loads in a thread, so that front ends and supervisor see the phase meanwhile.
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import zmq

from titopool.errors import GenerationFailed, TitopoolError
from titopool.settings.config import ServerConfig
from titopool.wire import messages
from titopool.wire.commands import Command
from titopool.wire.messages import (
    Abort,
    Chunk,
    Completed,
    Failed,
    Generate,
    Heartbeat,
    Hello,
    Job,
    WorkerCounters,
)
from titopool.wire.sockets import bind_router
from workers.engine.base import Engine, EngineDead, OnChunk
from workers.process import EXIT_FAILED, EXIT_WEIGHTS_UNKNOWN, in_daemon_thread, kill_children
from workers.serving.control import Control
from workers.serving.jobs import FrontEnd, JobKey, count, prefix_of

logger = logging.getLogger(__name__)

# How long the engine may take to stop before its processes are killed.
CLOSE_TIMEOUT_S = 3.0
# How long a worker that must end goes on, for answers to leave.
STOP_PAUSE_S = 0.1
# How long changes of load are gathered before the front ends hear of them.
LOAD_REPORT_S = 0.01
# Of a heartbeat; 128 KiB are the digests of a million tokens.
MAX_PREFIX_BYTES = 128 * 1024


class WorkerServer:
    """Serves one engine at one endpoint until it is told to stop or the engine dies."""

    def __init__(
        self,
        engine: Engine,
        *,
        endpoint: str,
        worker_id: str,
        config: ServerConfig,
        report: Callable[[str], None],
        parent_pid: int | None = None,
    ):
        """`report` gets each phase; `parent_pid` is the process to stop with, if any."""
        self._engine = engine
        self._endpoint = endpoint
        self._worker_id = worker_id
        self._config = config
        self._report_phase = report
        self._parent_pid = parent_pid
        self._incarnation = uuid.uuid4().hex
        # Of the process, if `run` says why it stopped.
        self.exit_code = EXIT_FAILED
        self._phase, self._phase_since = "starting", time.monotonic()
        self._facts: messages.WorkerFacts | None = None
        self._loaded_at = 0.0
        self._front_ends: dict[bytes, FrontEnd] = {}
        self._flush_planned = self._report_planned = False
        self._counters = WorkerCounters()
        self._control = Control(
            engine, config, worker_id=worker_id, on_applied=self._beat, on_broken=self._break_off
        )
        self._blames_jobs = False
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> str:
        """Serves; returns why it stopped ("" when it was asked to).

        Raises:
            Exception: whatever kept the engine from loading.
        """
        self._loop = asyncio.get_running_loop()
        self._stop_reason: asyncio.Future[str] = self._loop.create_future()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = bind_router(context, self._endpoint, self._config.curve_key_file)
        self._loop.add_reader(self._router.FD, self._receive)
        background = [
            self._loop.create_task(self._start_engine()),
            self._loop.create_task(self._send_heartbeats()),
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
            # Long enough for Stopping to leave.
            self._router.close(linger=500)
            context.term()

    def _stop_if_failed(self, task: asyncio.Task[None]) -> None:
        # A worker that sends no signs of life, say, is worth nothing to anybody.
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the worker failed", exc_info=task.exception())
            self.stop(f"the worker itself failed: {task.exception()!r}", blames_jobs=True)

    def stop(self, reason: str = "", *, blames_jobs: bool = False) -> None:
        """Makes `run` return; safe to call twice.

        With `blames_jobs` a job may be the cause: one that several workers end of is given up.
        """
        if not self._stop_reason.done():
            self._blames_jobs = blames_jobs
            self._stop_reason.set_result(reason)

    def _break_off(self, reason: str) -> None:
        """Stops with weights that nobody knows, once the answers that tell why have left."""
        self.exit_code = EXIT_WEIGHTS_UNKNOWN
        self._loop.call_later(STOP_PAUSE_S, self.stop, reason)

    async def _start_engine(self) -> None:
        try:
            facts = await in_daemon_thread(lambda: self._engine.load(self._enter_phase))
            self._enter_phase("warming")
            await self._engine.warm_up()
            await self._control.get_ready(facts.model)
        except Exception as error:
            if not self._stop_reason.done():
                self._stop_reason.set_exception(error)
            return
        self._facts, self._loaded_at = facts, time.time()
        self._enter_phase("ready")
        await self._probe_engine()

    def _enter_phase(self, phase: str) -> None:
        self._phase, self._phase_since = phase, time.monotonic()
        self._report_phase(phase)

    async def _probe_engine(self) -> None:
        timeout_s = self._config.engine_probe_timeout_s
        while True:
            await asyncio.sleep(timeout_s / 4)
            if self._control.is_in_a_call:
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
        # The descriptor tells only of changes: everything that is there must be read now.
        while True:
            try:
                identity, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                logger.warning("dropped a message that has not two frames")
                continue
            try:
                message = messages.decode_to_worker(frame)
            except messages.UNREADABLE as error:
                logger.warning("dropped a message that is none of ours: %s", error)
                continue
            try:
                self._handle(identity, message)
            except Exception:
                # Those behind it must be read: nothing tells of them again.
                logger.exception("a message was not understood")

    def _handle(self, identity: bytes, message: messages.ToWorker) -> None:
        match message:
            case Hello(pool=pool):
                self._control.hear(pool)
                self._greet(identity)
            case Generate(incarnation=self._incarnation, jobs=jobs):
                for job in jobs:
                    self._start_job(identity, job)
            case Abort(jobs=keys):
                for job_id, attempt in keys:
                    self._abort(identity, (job_id, attempt))
            case messages.Drift(num_compared=num_compared, num_drifted=num_drifted):
                self._counters.num_compared_prompts += num_compared
                self._counters.num_drifted_prompts += num_drifted
            case Command(incarnation=self._incarnation):
                self._spawn(self._answer(identity, message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _answer(self, identity: bytes, command: Command) -> None:
        self._send(identity, await self._control.answer(command, identity))

    def _greet(self, identity: bytes) -> None:
        front_end = self._front_ends.get(identity)
        if front_end is None:
            self._front_ends[identity] = FrontEnd(last_hello=time.monotonic())
            self._send(identity, self._heartbeat(self._front_ends[identity]))
        else:
            front_end.last_hello = time.monotonic()

    def _start_job(self, identity: bytes, job: Job) -> None:
        front_end = self._front_ends.get(identity)
        key = (job.job_id, job.attempt)
        if front_end is None or self._facts is None or key in front_end.jobs:
            logger.warning("ignored job %s of a front end that did not say Hello first", key)
            return
        task = self._loop.create_task(self._run_job(front_end, job))
        front_end.add(key, job, task)
        # Not in the task itself: one that is cancelled before its first step runs none of it.
        task.add_done_callback(lambda _: self._forget(front_end, key))
        self._plan_load_report()

    def _forget(self, front_end: FrontEnd, key: JobKey) -> None:
        front_end.forget(key)
        self._plan_load_report()

    def _abort(self, identity: bytes, key: JobKey) -> None:
        front_end = self._front_ends.get(identity)
        task = front_end.tasks.get(key) if front_end else None
        if task is not None and task.cancel():
            self._counters.num_aborted_jobs += 1

    # ---- running ---------------------------------------------------------------------

    async def _run_job(self, front_end: FrontEnd, job: Job) -> None:
        try:
            result = await self._result_of(job, lambda chunk: self._post(front_end, chunk))
            count(self._counters, job, result)
        except EngineDead as error:
            # No answer: the front end sends the job to another worker.
            self.stop(str(error), blames_jobs=True)
            return
        except Exception:
            logger.exception("job %d failed", job.job_id)
            result = Failed(
                job.job_id,
                job.attempt,
                GenerationFailed.code,
                f"worker {self._worker_id} failed on this prompt; its log has the reason",
            )
        self._post(front_end, result)
        self._tell_others(front_end, job, result)

    def _post(self, front_end: FrontEnd, result: Completed | Failed | Chunk) -> None:
        front_end.outbox.append(result)
        if not self._flush_planned:
            # What comes of one step of the engine travels in one message.
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def _tell_others(self, front_end: FrontEnd, job: Job, result: Completed | Failed) -> None:
        """Lets the other front ends send what begins like `job` here too."""
        if job.prefix is None or isinstance(result, Failed):
            return
        prefix = job.prefix + result.prefix
        for other in self._front_ends.values():
            if other is not front_end and len(other.prefixes) + len(prefix) <= MAX_PREFIX_BYTES:
                other.prefixes += prefix

    async def _result_of(self, job: Job, on_chunk: OnChunk) -> Completed | Failed:
        try:
            await self._control.before_job()
            generated = await self._engine.run(job, on_chunk)
        except TitopoolError as error:
            return Failed(job.job_id, job.attempt, error.code, error.message, error.param)
        self._counters.num_images += generated.num_images
        self._counters.image_seconds += generated.image_s
        return Completed(
            job.job_id,
            job.attempt,
            generated.completions,
            generated.num_cached_tokens,
            prefix_of(job, generated, self._facts),
            generated.prompt_token_ids,
            generated.prompt_logprobs,
            generated.adapter_version,
        )

    # ---- sending ---------------------------------------------------------------------

    def _flush(self) -> None:
        self._flush_planned = False
        for identity, front_end in self._front_ends.items():
            results, front_end.outbox = front_end.outbox, []
            if results:
                self._send_results(identity, results)

    def _send_results(self, identity: bytes, results: list[Completed | Failed | Chunk]) -> None:
        try:
            self._send(identity, messages.Results(results))
        except (UnicodeEncodeError, OverflowError, TypeError):
            # Nobody else's results may wait for one that cannot be written.
            logger.exception("a result cannot be encoded")
            if len(results) > 1:
                for one in results:
                    self._send_results(identity, [one])
            else:
                text = (
                    f"worker {self._worker_id} could not write the answer; its log has the reason"
                )
                job_id, attempt = results[0].job_id, results[0].attempt
                failed = Failed(job_id, attempt, GenerationFailed.code, text)
                self._send(identity, messages.Results([failed]))

    def _send(self, identity: bytes, message: messages.FromWorker) -> None:
        self._router.send_multipart([identity, messages.encode(message)], zmq.NOBLOCK)
        # Sending can swallow the descriptor's change that tells of a new message.
        if int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._receive)

    def _plan_load_report(self) -> None:
        if len(self._front_ends) > 1 and not self._report_planned:
            self._report_planned = True
            self._loop.call_later(LOAD_REPORT_S, self._report_load)

    def _report_load(self) -> None:
        self._report_planned = False
        # Also to those whose others have done nothing: they guess what they are not told.
        for identity, front_end in self._front_ends.items():
            self._send(identity, self._load_of_others(front_end))

    def _load_of_others(self, receiver: FrontEnd) -> messages.Load:
        others = [one for one in self._front_ends.values() if one is not receiver]
        return messages.Load(
            sum(one.num_sequences for one in others), sum(one.num_tokens for one in others)
        )

    async def _send_heartbeats(self) -> None:
        expected = time.monotonic()
        while True:
            interval_s = self._config.heartbeat_interval_s
            if time.monotonic() - expected > interval_s:
                # This process stood still: what front ends said meanwhile is not read yet.
                for front_end in self._front_ends.values():
                    front_end.last_hello = time.monotonic()
            expected = time.monotonic() + interval_s
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                self.stop("the supervisor is gone")
            if self._engine.has_died:
                self.stop("vLLM's engine process has ended", blames_jobs=True)
            self._forget_lost_front_ends()
            self._beat()
            await asyncio.sleep(interval_s)

    def _beat(self) -> None:
        for identity, front_end in self._front_ends.items():
            self._send(identity, self._heartbeat(front_end))

    def _heartbeat(self, receiver: FrontEnd) -> Heartbeat:
        others = self._load_of_others(receiver)
        prefixes, receiver.prefixes = bytes(receiver.prefixes), bytearray()
        return Heartbeat(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            phase=self._shown_phase(),
            phase_s=time.monotonic() - self._phase_since,
            weights=self._control.weights,
            adapters=self._control.adapters,
            pool=self._control.pool,
            facts=self._facts,
            loaded_at=self._loaded_at,
            num_front_ends=len(self._front_ends),
            other_sequences=others.other_sequences,
            other_tokens=others.other_tokens,
            num_sequences=sum(one.num_sequences for one in self._front_ends.values()),
            counters=self._counters,
            prefixes=prefixes,
        )

    def _forget_lost_front_ends(self) -> None:
        oldest = time.monotonic() - self._config.heartbeat_timeout_s
        for identity, front_end in list(self._front_ends.items()):
            if front_end.last_hello < oldest:
                logger.info("a front end is gone with %d jobs open", len(front_end.tasks))
                for task in front_end.tasks.values():
                    task.cancel()
                # One that was only slow sends its jobs again.
                self._send(identity, messages.Stopping(""))
                del self._front_ends[identity]
                self._spawn(self._control.lose_front_end(identity))

    def _shown_phase(self) -> str:
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
            logger.warning("the engine did not stop by itself: %s", type(error).__name__)
        kill_children()
