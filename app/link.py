"""What a front-end process says to the workers and hears from them.

Runs in: each gunicorn process, a greenlet of its own. Owns: a `Wire` to each worker, and the
pool. Talks to: `workers/server.py`. Everything in a front-end process runs in gevent's one
thread, so nothing here needs a lock; handlers call `submit` and `cancel` directly, and what
they submit in one turn of the loop leaves in one message to each worker.
"""

import logging
import time
from dataclasses import dataclass

import gevent
import msgspec
import zmq
from gevent.event import Event

from app.commands import Commands
from app.discovery import Discovery
from app.placement import POLICIES
from app.pool import Pool
from app.request import Request
from app.wire import Wire
from titopool import messages
from titopool.commands import CommandDone
from titopool.config import ServerConfig
from titopool.errors import NoReadyWorker, QueueFull, TitopoolError
from titopool.messages import Failed, Heartbeat, Load, Results, Stopping, WorkerFacts

logger = logging.getLogger(__name__)

# A process that has just started asks the workers before it answers that none is ready.
MEETING_S = 2.0


@dataclass(frozen=True)
class WorkerView:
    """What /ready says of a worker."""

    endpoint: str
    heartbeat: Heartbeat | None
    silent_s: float


class Link:
    """Submits requests to the workers and brings their results back."""

    def __init__(self, config: ServerConfig, endpoints: tuple[str, ...]):
        """`endpoints` are as in the settings; host names among them are looked up again and again."""
        self._config = config
        self._discovery = Discovery(endpoints)
        self._pool = Pool(
            no_worker_timeout_s=config.worker_start_timeout_s,
            policy=POLICIES[config.placement](),
        )
        # For handlers: what the workers are told beside jobs.
        self.commands = Commands(self._send, self._pool)
        self._views: tuple[WorkerView, ...] = ()
        self._facts: WorkerFacts | None = None
        self._wires: dict[str, Wire] = {}
        # Wires that may have something to read.
        self._changed: set[Wire] = set()
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
        if self._facts is None:
            raise self._no_ready_worker()
        return self._facts

    @property
    def adapters(self) -> dict[str, int]:
        """LoRA adapters that every ready worker has in one version, by name."""
        beats = [view.heartbeat for view in self._views if view.heartbeat]
        of_ready = [beat.adapters for beat in beats if beat.phase == "ready"]
        first, *others = of_ready or [{}]
        return {
            name: version
            for name, version in first.items()
            if all(one.get(name) == version for one in others)
        }

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
        if not any(view.heartbeat and view.heartbeat.phase == "ready" for view in self._views):
            raise self._no_ready_worker()

    def _no_ready_worker(self) -> NoReadyWorker:
        phases = [
            f"{view.heartbeat.worker_id} is {view.heartbeat.phase}"
            if view.heartbeat
            else f"{view.endpoint} does not answer"
            for view in self._views
        ]
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
        next_tick = 0.0
        while not self._is_closing:
            self._wake.wait(max(0.0, next_tick - time.monotonic()))
            self._wake.clear()
            try:
                self._turn()
                late_s = time.monotonic() - next_tick
                if late_s >= 0:
                    if late_s > self._config.heartbeat_interval_s:
                        # This process stood still: what the workers said meanwhile is still on
                        # its way.
                        self._pool.forgive_silence(time.monotonic())
                    next_tick = time.monotonic() + self._config.heartbeat_interval_s
                    self._tick()
            except Exception:
                logger.exception("the link goes on after an error")
        self._discovery.close()
        for endpoint in list(self._wires):
            self._disconnect(endpoint)
        self._context.term()

    def _turn(self) -> None:
        """Reads what has come and sends what can go."""
        while self._changed:
            wire = self._changed.pop()
            self._receive(wire)
            if not wire.is_closed and wire.is_cut():
                self._lose(wire.endpoint, "its connection is closed")
        for request in self._pool.take_failed():
            self._abort(request)
        self._send_assignments()

    def _on_change(self, wire: Wire) -> None:
        self._changed.add(wire)
        self._wake.set()

    def _receive(self, wire: Wire) -> None:
        while not wire.is_closed and (frame := wire.receive()) is not None:
            try:
                message = messages.decode_from_worker(frame)
            except msgspec.MsgspecError as error:
                logger.error(
                    "dropped a message of %s that is none of ours: %s", wire.endpoint, error
                )
                continue
            try:
                self._handle(wire.endpoint, message)
            except Exception:
                # Those behind it must still be read: nothing tells of them a second time.
                logger.exception("the link goes on after a message of %s", wire.endpoint)

    def _handle(self, endpoint: str, message: messages.FromWorker) -> None:
        match message:
            case Results(results=results):
                self._pool.on_results(endpoint, results)
            case Heartbeat():
                self._pool.on_heartbeat(endpoint, message, time.monotonic())
                self._facts = message.facts or self._facts
                self._publish()
            case CommandDone():
                self.commands.on_done(endpoint, message)
            case Load():
                self._pool.on_load(endpoint, message)
            case Stopping(failure=failure):
                self._lose(endpoint, failure or "it was stopped", has_died=bool(failure))

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
        for worker, keys in self._pool.drop_done(request):
            self._send(worker.endpoint, messages.Abort(keys))

    def _tick(self) -> None:
        now = time.monotonic()
        self._follow_discovery(now)
        for worker in self._pool.silent_workers(now, self._config.heartbeat_timeout_s):
            self._lose(worker.endpoint, f"silent for {now - worker.last_seen:.0f} s")
        self._pool.fail_if_abandoned(now)
        for endpoint in self._wires:
            self._send(endpoint, messages.Hello())
        self._publish()

    def _follow_discovery(self, now: float) -> None:
        found = self._discovery.endpoints
        # By the wires: one that could not be made is tried again.
        for endpoint in found - self._wires.keys():
            self._pool.add_worker(endpoint, now)
            self._connect(endpoint)
        for endpoint in self._pool.workers.keys() - found:
            self._disconnect(endpoint)
            self._pool.remove_worker(endpoint)

    def _lose(self, endpoint: str, reason: str, *, has_died: bool = True) -> None:
        """A process that may come back is met on a new socket: what it still sends on the old
        one, and what was queued for it there, is gone."""
        self._pool.lose_worker(endpoint, reason, has_died=has_died)
        self.commands.on_lost(endpoint, reason)
        self._disconnect(endpoint)
        self._connect(endpoint)
        self._publish()

    def _connect(self, endpoint: str) -> None:
        key_file = self._config.curve_key_file
        self._wires[endpoint] = Wire(self._context, endpoint, key_file, self._on_change)
        self._send(endpoint, messages.Hello())

    def _disconnect(self, endpoint: str) -> None:
        wire = self._wires.pop(endpoint, None)
        if wire is None:
            # It could not be made.
            return
        self._changed.discard(wire)
        wire.close()

    def _publish(self) -> None:
        now = time.monotonic()
        self._views = tuple(
            WorkerView(worker.endpoint, worker.heartbeat, now - worker.last_seen)
            for worker in self._pool.workers.values()
        )
        has_met_all = bool(self._views) and all(view.heartbeat for view in self._views)
        if has_met_all or now > self._meet_until:
            self._has_met.set()


def stopping() -> NoReadyWorker:
    """What a request gets that is open when the process ends."""
    return NoReadyWorker("the server is stopping; the request was not answered in time")
