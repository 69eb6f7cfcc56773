"""What a front-end process says to the workers and hears from them.

Runs in: each gunicorn process, a greenlet of its own. Owns: a `WorkerSocket` to each worker, and the
pool. Talks to: `workers/serving/server.py`. Everything in a front-end process runs in gevent's one
thread, so nothing here needs a lock; handlers call `submit` and `cancel` directly, and what
they submit in one turn of the loop leaves in one message to each worker.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gevent
import zmq
from gevent.event import Event

from app.pool.command_sender import CommandSender
from app.pool.discovery import Discovery
from app.pool.pending import Request
from app.pool.placement import ROUTING_POLICIES
from app.pool.records import Worker
from app.pool.state import Pool, natural_order
from app.pool.worker_socket import ConnectionState, WorkerSocket
from titopool.errors import NoReadyWorker, QueueFull, TitopoolError
from titopool.settings.config import ServerConfig
from titopool.wire import messages
from titopool.wire.commands import CommandDone
from titopool.wire.messages import Failed, Heartbeat, Load, Results, Stopping, WorkerFacts

logger = logging.getLogger(__name__)

# A process that has just started asks the workers before it answers that none is ready.
MEETING_S = 2.0
# How long an endpoint that refuses connections is left alone, at first and at most.
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 5.0
# Between two lines in the log about errors of the link itself.
COMPLAIN_EVERY_S = 10.0
REFUSED = (
    "it closes connections before they are set up: is curve_key_file the worker's, and is a worker "
    "of titopool at this port?"
)


@dataclass(frozen=True)
class WorkerView:
    """What /ready says of a worker."""

    endpoint: str
    heartbeat: Heartbeat | None
    phase: str
    # Why it gets no jobs, where its phase does not tell.
    reason: str
    silent_s: float


@dataclass
class Retry:
    """When an endpoint that could not be connected is tried again, and why it could not."""

    after: float
    pause_s: float
    reason: str


class Link:
    """Submits requests to the workers and brings their results back."""

    def __init__(self, config: ServerConfig, endpoints: tuple[str, ...]):
        """`endpoints` are as in the settings; host names among them are looked up again and again."""
        self._config = config
        self._discovery = Discovery(endpoints)
        self._pool = Pool(
            no_worker_timeout_s=config.worker_start_timeout_s,
            policy=ROUTING_POLICIES[config.placement](),
            on_lost=lambda endpoint, reason: self.commands.on_worker_lost(endpoint, reason),
        )
        # For handlers: what the workers are told apart from jobs.
        self.commands = CommandSender(self._send, self._pool)
        self._views: tuple[WorkerView, ...] = ()
        self._wires: dict[str, WorkerSocket] = {}
        # Of endpoints that refuse connections.
        self._retries: dict[str, Retry] = {}
        self._complained_at = -COMPLAIN_EVERY_S
        # Wires that may have something to read.
        self._changed: set[WorkerSocket] = set()
        self._wake = Event()
        self._greenlet: gevent.Greenlet | None = None
        self._is_closing = False
        # Set when every worker has been heard of, or has had the time to say something.
        self._has_met = Event()
        self._meet_until = float("inf")

    # ---- for handlers ----------------------------------------------------------------

    def start(self) -> None:
        """Connects to the workers, once."""
        if self._greenlet is None and not self._is_closing:
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            self._discovery.start()
            self._meet_until = time.monotonic() + MEETING_S
            self._greenlet = gevent.spawn(self._run)

    def close(self) -> None:
        """Ends every open request and the connections; returns at once."""
        if self._is_closing:
            return
        self._is_closing = True
        for request in self._pool.open_requests():
            request.fail(stopping())
        self._wake.set()

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """Every worker as of the last heartbeat or tick."""
        return self._views

    @property
    def facts(self) -> WorkerFacts:
        """Facts of the model that the workers serve; stay known while workers restart.

        Raises:
            NoReadyWorker: no worker has been ready yet.
        """
        self._has_met.wait(MEETING_S)
        if self._pool.facts is None:
            raise self._no_ready_worker()
        return self._pool.facts

    @property
    def adapters(self) -> dict[str, int]:
        """LoRA adapters by name, and their versions, that a worker can run now."""
        return self._pool.adapters

    @property
    def pause_left_s(self) -> float | None:
        """Seconds that are left of a client's pause, as far as is known here; None: none is."""
        pause = self._pool.state(time.monotonic()).pause
        return pause.lease_left_s if pause.mode else None

    @property
    def needs_prefixes(self) -> bool:
        """Whether jobs should bring the digests of their prompts."""
        has_choice = self._config.placement == "prefix" and len(self._views) > 1
        return has_choice and self.facts.num_cache_tokens > 0

    def meet(self) -> None:
        """Returns when every worker has been heard of, or has had the time to say something."""
        self._has_met.wait(MEETING_S)

    def check_ready(self) -> None:
        """Raises NoReadyWorker unless a worker can generate now."""
        self._has_met.wait(MEETING_S)
        if not any(view.phase == "ready" for view in self._views):
            if self._pool.has_lost_weights:
                raise self._pool.weights_lost()
            raise self._no_ready_worker()

    def _no_ready_worker(self) -> NoReadyWorker:
        phases = []
        for view in self._views:
            beat, reason = view.heartbeat, f" ({view.reason})" if view.reason else ""
            text = (
                f"{beat.worker_id} is {view.phase}" if beat else f"{view.endpoint} does not answer"
            )
            phases.append(text + reason)
        return NoReadyWorker(
            f"no worker is ready yet: {'; '.join(phases) or 'none is known'}; ask /ready and try again",
            retry_after_s=2,
        )

    def submit(self, request: Request) -> None:
        """Sends the request's jobs to workers; it ends by `complete` or `fail`.

        Raises:
            QueueFull: too many prompts are open in this process.
        """
        limit = self._config.max_queued_prompts
        if self._pool.num_open_jobs + len(request.jobs) > limit:
            raise QueueFull(
                f"{self._pool.num_open_jobs} prompts are open here and {len(request.jobs)} more "
                f"would exceed max_queued_prompts ({limit}); try again later",
                retry_after_s=1,
            )
        if self._is_closing:
            request.fail(stopping())
            return
        self._pool.submit(request)
        self._wake.set()

    def cancel(self, request: Request, error: TitopoolError) -> None:
        """Ends the request with `error`, if it is open, and stops its jobs."""
        if request.fail(error):
            self._abort(request)
            # Others may have waited for its place.
            self._wake.set()

    def report_drift(self, *, has_drifted: bool) -> None:
        """Has a comparison of messages with ids counted, by any worker: /metrics sums them."""
        for view in self._views:
            if view.heartbeat is not None:
                self._send(view.endpoint, messages.Drift(1, int(has_drifted)))
                return

    # ---- the link's greenlet ---------------------------------------------------------

    def _run(self) -> None:
        next_tick = time.monotonic()
        while not self._is_closing:
            self._wake.wait(max(0.0, next_tick - time.monotonic()))
            self._wake.clear()
            self._guarded(self._turn)
            late_s = time.monotonic() - next_tick
            if late_s >= 0:
                # Set before the tick: an error in it comes again in the next one, not at once.
                next_tick = time.monotonic() + self._config.heartbeat_interval_s
                if late_s > self._config.heartbeat_interval_s:
                    # This process stood still: what the workers said meanwhile is not read yet.
                    self._pool.restart_silence_timers(time.monotonic())
                self._guarded(self._tick)
        self._discovery.close()
        for endpoint in list(self._wires):
            self._disconnect(endpoint)
        self._context.term()

    def _guarded(self, step: Callable[..., None], *arguments: Any) -> None:
        """Takes a step of the loop; an error is logged and leaves the others to be taken."""
        try:
            step(*arguments)
        except Exception:
            if time.monotonic() - self._complained_at >= COMPLAIN_EVERY_S:
                self._complained_at = time.monotonic()
                logger.exception("the link goes on after an error")

    def _turn(self) -> None:
        """Reads what has come and sends what can go."""
        while self._changed:
            self._guarded(self._look_at, self._changed.pop())
        for request in self._pool.take_failed():
            self._guarded(self._abort, request)
        self._guarded(self._send_assignments)

    def _look_at(self, wire: WorkerSocket) -> None:
        self._receive(wire)
        if wire.is_closed:
            return
        fate = wire.state()
        if fate is ConnectionState.CLOSED:
            self._lose(wire.endpoint, "its connection is closed")
        elif fate is ConnectionState.REFUSED:
            if self._pool.workers[wire.endpoint].heartbeat is not None:
                self._pool.mark_worker_lost(wire.endpoint, "its connection is closed")
            self._disconnect(wire.endpoint)
            self._retry_later(wire.endpoint, REFUSED)

    def _on_change(self, wire: WorkerSocket) -> None:
        self._changed.add(wire)
        self._wake.set()

    def _receive(self, wire: WorkerSocket) -> None:
        while not wire.is_closed and (frame := wire.receive()) is not None:
            try:
                message = messages.decode_from_worker(frame)
            except messages.UNREADABLE as error:
                logger.error("dropped an undecodable message from %s: %s", wire.endpoint, error)
                continue
            # Whatever is wrong with it, those behind it must be read: nothing tells of them again.
            self._guarded(self._handle, wire.endpoint, message)

    def _handle(self, endpoint: str, message: messages.FromWorker) -> None:
        match message:
            case Results(results=results):
                self._pool.on_results(endpoint, results)
            case Heartbeat():
                self._retries.pop(endpoint, None)
                self._pool.on_heartbeat(endpoint, message, time.monotonic())
                self._publish()
            case CommandDone():
                self.commands.on_done(endpoint, message)
            case Load():
                self._pool.on_load(endpoint, message)
            case Stopping(reason=reason, blames_jobs=blames_jobs):
                self._lose(endpoint, reason or "it was stopped", has_died=blames_jobs)

    def _send_assignments(self) -> None:
        for worker, jobs in self._pool.assign():
            assert worker.heartbeat is not None
            try:
                self._send(worker.endpoint, messages.Generate(worker.heartbeat.incarnation, jobs))
            except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):
                # Handlers encode what clients send; what slips through ends, and nothing else.
                logger.exception("jobs cannot be encoded")
                text = "the front end could not send it on; its log has the reason"
                failed = [Failed(job.job_id, job.attempt, TitopoolError.code, text) for job in jobs]
                self._pool.on_results(worker.endpoint, failed)

    def _send(self, endpoint: str, message: messages.ToWorker) -> None:
        if endpoint in self._wires:
            self._wires[endpoint].send(messages.encode(message))

    def _abort(self, request: Request) -> None:
        for worker, keys in self._pool.withdraw(request):
            self._send(worker.endpoint, messages.Abort(keys))

    def _tick(self) -> None:
        now = time.monotonic()
        self._guarded(self._follow_discovery, now)
        for worker in self._pool.silent_workers(now, self._config.heartbeat_timeout_s):
            self._guarded(self._lose, worker.endpoint, f"silent for {now - worker.last_seen:.0f} s")
        self._guarded(self._pool.fail_waiting_without_worker, now)
        for endpoint in list(self._wires):
            self._guarded(self._greet, endpoint)
        self._publish()

    def _follow_discovery(self, now: float) -> None:
        found = self._discovery.endpoints
        # Of equal workers placement takes the first: all front ends have the same one.
        for endpoint in sorted(found - self._pool.workers.keys(), key=natural_order):
            self._pool.add_worker(endpoint, now)
        for worker in list(self._pool.workers.values()):
            # A name may leave out an address for a moment: a worker that lives stays.
            if worker.endpoint not in found and worker.heartbeat is None:
                self._disconnect(worker.endpoint)
                self._retries.pop(worker.endpoint, None)
                self._pool.remove_worker(worker.endpoint)
            elif worker.endpoint not in self._wires:
                self._connect(worker.endpoint, now)

    def _lose(self, endpoint: str, reason: str, *, has_died: bool = True) -> None:
        """A process that may come back is met on a new socket: what it still sends on the old
        one, and what was queued for it there, is gone."""
        self._pool.mark_worker_lost(endpoint, reason, has_died=has_died)
        self._disconnect(endpoint)
        self._connect(endpoint, time.monotonic())
        self._publish()

    def _connect(self, endpoint: str, now: float) -> None:
        retry = self._retries.get(endpoint)
        if retry is not None and now < retry.after:
            return
        try:
            key_file = self._config.curve_key_file
            self._wires[endpoint] = WorkerSocket(self._context, endpoint, key_file, self._on_change)
        except (OSError, zmq.ZMQError, TitopoolError) as error:
            self._retry_later(endpoint, f"it cannot be connected: {error}")
        else:
            self._greet(endpoint)

    def _retry_later(self, endpoint: str, reason: str) -> None:
        known = self._retries.get(endpoint)
        if known is None:
            logger.warning("the worker at %s: %s", endpoint, reason)
        pause_s = min(2 * known.pause_s, LONGEST_RETRY_S) if known else FIRST_RETRY_S
        self._retries[endpoint] = Retry(time.monotonic() + pause_s, pause_s, reason)

    def _greet(self, endpoint: str) -> None:
        self._send(endpoint, messages.Hello(self._pool.state(time.monotonic())))

    def _disconnect(self, endpoint: str) -> None:
        wire = self._wires.pop(endpoint, None)
        if wire is None:
            return
        self._changed.discard(wire)
        wire.close()

    def _publish(self) -> None:
        now = time.monotonic()
        self._views = tuple(
            WorkerView(
                worker.endpoint, worker.heartbeat, worker.phase, self._reason_of(worker),
                now - worker.last_seen,
            )
            for worker in self._pool.in_order()
        )  # fmt: skip
        has_met_all = bool(self._views) and all(view.heartbeat for view in self._views)
        if has_met_all or now > self._meet_until:
            self._has_met.set()

    def _reason_of(self, worker: Worker) -> str:
        retry = self._retries.get(worker.endpoint)
        return retry.reason if retry else worker.reason


def stopping() -> NoReadyWorker:
    """What a request gets that is open when the process ends."""
    return NoReadyWorker("the server is stopping; the request was not answered in time")
