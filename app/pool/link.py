"""The link: a front-end process's connections to all workers.

Runs in: each gunicorn process, a greenlet of its own. Owns: a `WorkerSocket` to each worker, and
the `Pool`. Talks to: `workers/serving/server.py`. All greenlets share one thread, so nothing here
needs a lock: handlers call `submit` and `cancel` directly. Jobs that are submitted before the
link's greenlet runs leave in one message to each worker.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import gevent
import zmq
from gevent.event import Event

from app.counts.families import PLACED_JOBS, QUEUE_SECONDS, REQUEST_BOUNDS
from app.counts.front_end import FrontEndCounts, observe
from app.pool.command_sender import CommandSender
from app.pool.discovery import Discovery
from app.pool.peers.peer_weights import PeerWeights
from app.pool.placement import ROUTING_POLICIES
from app.pool.records import LastEnd, OpenJob, Worker, natural_order
from app.pool.request import Request
from app.pool.state import Pool
from app.pool.worker_socket import WorkerSocket
from app.time_slices import SLICE_S, YIELD_S
from titopool.collector import without_collector
from titopool.deadline import Deadline
from titopool.errors import InvalidRequest, NoReadyWorker, QueueFull, TitopoolError
from titopool.settings.config import ServerConfig
from titopool.wire import messages
from titopool.wire.commands import CommandDone
from titopool.wire.messages import (
    EndWaiting,
    EngineMetrics,
    Failed,
    FrontEndTotals,
    Heartbeat,
    ListRequests,
    Load,
    Results,
    Stopping,
    WorkerFacts,
)
from titopool.wire.pool_state import PoolWeights

logger = logging.getLogger(__name__)

# How long a process that has just started waits for heartbeats before it reports no ready worker,
# and a request for the first worker that is ready.
FIRST_HEARTBEATS_S = 2.0
# Pause before connecting again to an endpoint that refuses connections: at first, and at most.
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 5.0
# Least time between two log lines about errors of the link itself.
LOG_ERRORS_EVERY_S = 10.0
# After the last question for /metrics, workers send their engines' metrics for so long.
WANT_METRICS_S = 90.0
# How long the first question waits for them.
FIRST_METRICS_S = 0.3
# Of handlers that run in a row before the link's greenlet, one sends the jobs of all when this has
# passed. A handler takes about 0.7 ms: without it, 64 requests at once keep the engine idle for 45 ms.
SEND_WITHIN_S = 0.002
CLOSED = "its connection is closed"
REFUSED = (
    "it closes connections before they are set up: check that curve_key_file is the worker's, and "
    "that a worker of titopool listens at this port"
)


@dataclass(frozen=True)
class WorkerView:
    """A worker as routes show it."""

    endpoint: str
    heartbeat: Heartbeat | None
    phase: str
    # Why the worker gets no jobs, or for how long its event loop has stood; "" if the phase says it all.
    reason: str
    # Seconds since the last heartbeat of its event loop.
    silent_s: float
    # As `Worker.is_joining`.
    is_joining: bool = False
    # As `Worker.engine_metrics`.
    engine_metrics: EngineMetrics | None = None
    # Of the last process that was lost, as this front end saw it; None: there was none.
    last_end: LastEnd | None = None


class ListsRequests(Protocol):
    """What the link asks of `app.call.open_requests.OpenRequests`, for other front ends."""

    def listed(self, name: str, limit: int) -> messages.ListedRequests:
        """The `limit` oldest requests in flight; `name` is the question's."""

    def abort(self, client_ids: Collection[str] | None) -> tuple[int, list[str]]:
        """Ends what is not submitted; returns how many, and other ids of those that are."""


class _NoRequests:
    def listed(self, name: str, limit: int) -> messages.ListedRequests:
        return messages.ListedRequests(name, "", 0, [])

    def abort(self, client_ids: Collection[str] | None) -> tuple[int, list[str]]:
        return 0, []


NO_REQUESTS = _NoRequests()


@dataclass
class Retry:
    """When to connect again to an endpoint, and why the last attempt failed."""

    not_before: Deadline
    pause_s: float
    reason: str


class Link:
    """Submits requests to the workers and delivers their results."""

    def __init__(
        self,
        config: ServerConfig,
        endpoints: tuple[str, ...],
        totals: Callable[[], FrontEndTotals] = FrontEndTotals,
        counts: FrontEndCounts | None = None,
        requests: ListsRequests = NO_REQUESTS,
    ):
        """`endpoints` are those of the settings; host names are resolved again and again.

        Args:
            totals: of this front end, for the workers.
            counts: get the placement of jobs and their time in the queue; None: nothing does.
            requests: those in flight.
        """
        self._counts = counts
        self._config = config
        self._totals = totals
        self._requests = requests
        self._discovery = Discovery(endpoints)
        self._pool = Pool(
            no_worker_timeout_s=config.worker_start_timeout_s,
            policy=ROUTING_POLICIES[config.placement](),
            on_lost=lambda endpoint, reason: self.commands.on_worker_lost(endpoint, reason),
            on_placed=self._count_placed,
            # On a cluster, a worker's screen is its node's.
            are_starts_shown=not config.endpoints and not config.cluster,
        )
        # For handlers that send weight updates, pauses and adapters.
        self.commands = CommandSender(self._send, self._pool)
        self._peer_weights = PeerWeights(self.commands, self._pool)
        self._sockets: dict[str, WorkerSocket] = {}
        # By endpoint; entries stay until a heartbeat arrives.
        self._retries: dict[str, Retry] = {}
        self._next_error_log = Deadline(0.0)
        self._next_send = Deadline(0.0)
        # Sockets that may have something to read.
        self._changed: set[WorkerSocket] = set()
        self._wake = Event()
        self._greenlet: gevent.Greenlet | None = None
        self._is_closing = False
        # Set once every worker has sent a heartbeat, or `_first_heartbeats` has passed.
        self._has_heartbeats = Event()
        # Set once a worker was ready.
        self._has_facts = Event()
        # Set when the pool serves other weights.
        self._new_weights = Event()
        self._first_heartbeats = Deadline(float("inf"))
        # Until when workers send the metrics of their engines, and whether new ones came.
        self._wants_metrics = Deadline(0.0)
        self._new_metrics = Event()

    # ---- for handlers ----------------------------------------------------------------

    def start(self) -> None:
        """Connects to the workers; does nothing the second time."""
        if self._greenlet is None and not self._is_closing:
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            self._discovery.start()
            self._first_heartbeats = Deadline.after(FIRST_HEARTBEATS_S)
            self._greenlet = gevent.spawn(self._run)

    def close(self) -> None:
        """Fails every open request and closes the connections; returns at once."""
        if self._is_closing:
            return
        self._is_closing = True
        for request in self._pool.open_requests():
            request.fail(server_stopping())
        self._wake.set()

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """Every worker as of now, in the order of their endpoints."""
        now = time.monotonic()
        return tuple(
            WorkerView(
                worker.endpoint, worker.heartbeat, worker.phase,
                self._retries[worker.endpoint].reason
                if worker.endpoint in self._retries else worker.reason,
                now - worker.last_seen, worker.is_joining, worker.engine_metrics, worker.last_end,
            )
            for worker in self._pool.sorted_workers()
        )  # fmt: skip

    @property
    def facts(self) -> WorkerFacts:
        """Facts of the model that the pool serves; kept while all workers restart.

        Raises:
            NoReadyWorker: no worker has been ready yet.
        """
        self.wait_for_heartbeats()
        # The client may have seen at another front end that a worker is ready.
        self._has_facts.wait(FIRST_HEARTBEATS_S)
        if self._pool.view.facts is None:
            raise self._no_ready_worker()
        return self._pool.view.facts

    @property
    def adapters(self) -> dict[str, int]:
        """Versions of the LoRA adapters that a ready worker serves now, by name."""
        return self._pool.adapters

    @property
    def weights(self) -> PoolWeights:
        """The weights that the pool serves, as last reported."""
        return self._pool.view.state.weights

    def label_of(self, version: int) -> str:
        """The trainer's name for a version; the version as text if none is known."""
        return self._pool.view.label_of(version)

    def wait_for_weights(self, other: Event, timeout_s: float) -> None:
        """Returns when the pool serves other weights, `other` is set, or `timeout_s` has passed."""
        gevent.wait([self._new_weights, other], timeout=timeout_s, count=1)

    @property
    def pause_left_s(self) -> float | None:
        """Seconds until the client's pause expires, as last reported; None: no pause."""
        pause = self._pool.view.snapshot(time.monotonic()).pause
        return pause.lease_left_s if pause.mode else None

    @property
    def needs_prefixes(self) -> bool:
        """Whether jobs should bring the digests of their prompts."""
        has_choice = self._pool.policy.needs_prefixes and len(self._pool.workers) > 1
        return has_choice and self.facts.num_cache_tokens > 0

    def look_up_workers(self) -> None:
        """Knows the addresses that files have now: a client may have seen them at another front end."""
        if self._greenlet is None or self._is_closing:
            return
        self._discovery.read_files()
        self._follow_discovery(time.monotonic())

    def wait_for_heartbeats(self) -> None:
        """Returns once every worker has sent a heartbeat, or has had the time to send one."""
        self._has_heartbeats.wait(FIRST_HEARTBEATS_S)

    def check_ready(self) -> None:
        """Raises NoReadyWorker unless a worker can generate now."""
        self.wait_for_heartbeats()
        if not any(worker.phase == "ready" for worker in self._pool.workers.values()):
            if self._pool.has_lost_weights:
                raise self._pool.weights_lost()
            raise self._no_ready_worker()

    def _no_ready_worker(self) -> NoReadyWorker:
        phases = []
        for view in self.workers:
            beat, reason = view.heartbeat, f" ({view.reason})" if view.reason else ""
            text = (
                f"{beat.worker_id} is {view.phase}" if beat else f"{view.endpoint} does not answer"
            )
            phases.append(text + reason)
        return NoReadyWorker(
            f"no worker is ready yet: {'; '.join(phases) or 'none is known'}; ask /ready and try again",
            retry_after_s=2,
        )

    def check_num_prompts(self, num: int) -> None:
        """Raises InvalidRequest if a request of `num` prompts alone has more than may be open."""
        limit = self._config.max_queued_prompts
        if num > limit:
            raise InvalidRequest(
                f"expected at most {limit} prompts in one request (max_queued_prompts), got {num}; send "
                "several requests, one after another"
            )

    def submit(self, request: Request, *, aborted: Collection[str] = ()) -> None:
        """Queues the request's jobs; the request ends by `complete` or `fail`.

        Args:
            aborted: the clients' ids of its jobs if it was aborted before it had any: they end
                without a token, except those whose prompts are scored.

        Raises:
            QueueFull: too many prompts are open in this process.
        """
        limit = self._config.max_queued_prompts
        if self._pool.num_open_jobs + len(request.jobs) > limit:
            raise QueueFull(
                f"expected at most {limit} open prompts in this process (max_queued_prompts), got "
                f"{len(request.jobs)} on top of {self._pool.num_open_jobs}; try again later",
                retry_after_s=1,
            )
        if self._is_closing:
            request.fail(server_stopping())
            return
        request.submitted_at = time.monotonic()
        # Collections would visit the request's jobs again and again.
        with without_collector():
            self._pool.submit(request)
        if aborted:
            # Before they are sent.
            self.end_waiting(aborted, request)
        if self._next_send.has_passed and not request.is_done:
            self._log_errors(self._send_assignments)
        else:
            self._wake.set()

    def want_engine_metrics(self) -> None:
        """Lets workers send the metrics of their engines; the first call waits for them shortly."""
        is_first = self._wants_metrics.has_passed
        self._wants_metrics = Deadline.after(WANT_METRICS_S)
        if not is_first:
            return
        for endpoint, worker_socket in list(self._sockets.items()):
            if worker_socket.is_connected:
                self._send_hello(endpoint)
        deadline = Deadline.after(FIRST_METRICS_S)
        while not deadline.has_passed and any(
            one.facts and one.engine_metrics is None for one in self._pool.workers.values()
        ):
            self._new_metrics.clear()
            self._new_metrics.wait(deadline.left_s)

    def cancel(self, request: Request, error: TitopoolError) -> None:
        """Fails the request with `error` and aborts its jobs, unless the request has ended."""
        if request.fail(error):
            self._abort(request)
            # Waiting jobs may take the slots.
            self._wake.set()

    def fail(self, request: Request, error: TitopoolError) -> None:
        """Fails the request with `error`; its jobs are aborted in the link's next turn."""
        self._pool.fail(request, error)
        self._wake.set()

    def end_waiting(self, client_ids: Collection[str] | None, only: Request | None = None) -> int:
        """Ends jobs that wait as aborted, as `Pool.end_waiting`; returns how many there were."""
        num_ended, aborts = self._pool.end_waiting(client_ids, only)
        self._send_aborts(aborts)
        # As in `cancel`.
        self._wake.set()
        return num_ended

    def where_is(self, request: Request) -> tuple[list[str], bool]:
        """As `Pool.where_is`."""
        return self._pool.where_is(request)

    def drain(self, worker_id: str) -> bool:
        """Asks the worker of this name to finish its jobs and to end; whether there is one."""
        for view in self.workers:
            if view.heartbeat is not None and view.heartbeat.worker_id == worker_id:
                self._send(view.endpoint, messages.Leave(view.heartbeat.incarnation))
                return True
        return False

    @property
    def num_waiting(self) -> int:
        """Prompts that wait in this process for a worker."""
        return self._pool.num_waiting

    def report(self, message: messages.Drift | messages.Compared) -> None:
        """Lets a worker count a comparison, so that /metrics can sum them."""
        for view in self.workers:
            if view.heartbeat is not None:
                self._send(view.endpoint, message)
                return

    # ---- the link's greenlet ---------------------------------------------------------

    def _run(self) -> None:
        interval_s = self._config.heartbeat_interval_s
        next_tick = Deadline.after(0.0)
        while not self._is_closing:
            self._wake.wait(next_tick.left_s)
            self._wake.clear()
            self._log_errors(self._read_and_send)
            if self._changed:
                # Workers may send faster than this greenlet reads: others run in between.
                gevent.sleep(YIELD_S)
            if next_tick.has_passed:
                was_blocked = time.monotonic() - next_tick.at_s > interval_s
                # Set before the tick, so that a tick that fails is not repeated at once.
                next_tick = Deadline.after(interval_s)
                if was_blocked:
                    # This process did not run; heartbeats of that time are still unread.
                    self._pool.restart_silence_timers(time.monotonic())
                self._log_errors(self._tick)
        self._discovery.close()
        for endpoint in list(self._sockets):
            self._disconnect(endpoint)
        self._context.term()

    def _log_errors(self, step: Callable[..., None], *arguments: Any) -> None:
        """Calls `step`; an error is logged, so that the other steps still run."""
        try:
            step(*arguments)
        except Exception:
            if self._next_error_log.has_passed:
                self._next_error_log = Deadline.after(LOG_ERRORS_EVERY_S)
                logger.exception("the link goes on after an error")

    def _read_and_send(self) -> None:
        """Reads messages, aborts failed requests and sends assigned jobs."""
        changed, self._changed = self._changed, set()
        ends_s = time.monotonic() + SLICE_S
        for worker_socket in changed:
            self._log_errors(self._read, worker_socket, ends_s)
        for request in self._pool.take_failed():
            self._log_errors(self._abort, request)
        self._log_errors(self._send_assignments)

    def _on_change(self, worker_socket: WorkerSocket) -> None:
        self._changed.add(worker_socket)
        self._wake.set()

    def _read(self, worker_socket: WorkerSocket, ends_s: float) -> None:
        """Reads a socket until it is empty, then the state of its connection.

        Args:
            ends_s: monotonic; from then on, one message is read, and the rest in the next turn.
        """
        endpoint, has_read = worker_socket.endpoint, False
        while not worker_socket.is_closed:
            if has_read and time.monotonic() > ends_s:
                # Its heartbeats may stand behind what is not read.
                self._pool.workers[endpoint].last_seen = time.monotonic()
                self._on_change(worker_socket)
                return
            if (frame := worker_socket.receive()) is None:
                break
            has_read = True
            try:
                message = messages.decode_from_worker(frame)
            except messages.UNREADABLE as error:
                if reason := messages.explain_other_wire(frame):
                    self._leave_alone(endpoint, reason)
                    return
                logger.error("dropped an undecodable message from %s: %s", endpoint, error)
                continue
            # After an error the rest must still be read: the socket does not signal it again.
            self._log_errors(self._handle, endpoint, message)
        if worker_socket.is_closed:
            return
        state = worker_socket.read_state()
        if state == "connected":
            self._send_hello(endpoint)
        elif state == "closed":
            self._lose(endpoint, CLOSED)
        elif state == "refused":
            # A local socket has no key: its process ended before it took the connection.
            self._leave_alone(endpoint, REFUSED if endpoint.startswith("tcp://") else CLOSED)

    def _handle(self, endpoint: str, message: messages.FromWorker) -> None:
        match message:
            case Results(results=results):
                self._pool.on_results(endpoint, results)
            case Heartbeat():
                self._retries.pop(endpoint, None)
                before = self.weights
                self._pool.on_heartbeat(endpoint, message, time.monotonic())
                if self.weights is not before:
                    # Those who wait for the next change wait for another event.
                    changed, self._new_weights = self._new_weights, Event()
                    changed.set()
                self._note_heartbeats()
            case CommandDone():
                self.commands.on_done(endpoint, message)
            case Load():
                self._pool.on_load(endpoint, message)
            case EngineMetrics():
                self._pool.workers[endpoint].engine_metrics = message
                self._new_metrics.set()
            case EndWaiting(name=name, client_ids=client_ids):
                num_ended, others = self._requests.abort(client_ids)
                wanted = None if client_ids is None else [*client_ids, *others]
                num_ended += self.end_waiting(wanted)
                self._send(endpoint, messages.EndedWaiting(name, num_ended, others))
            case ListRequests(name=name, limit=limit):
                self._send(endpoint, self._requests.listed(name, limit))
            case Stopping(reason=reason, blames_jobs=blames_jobs):
                self._lose(endpoint, reason or "it was stopped", blames_jobs=blames_jobs)

    def _count_placed(self, worker: Worker, open_job: OpenJob, reason: str) -> None:
        counts, request = self._counts, open_job.request
        if counts is None or worker.heartbeat is None:
            return
        counts.values(PLACED_JOBS, worker.heartbeat.worker_id, reason)[0] += 1
        if reason != "requeued" and request.submitted_at:
            waited_s = time.monotonic() - request.submitted_at
            observe(counts.values(QUEUE_SECONDS), REQUEST_BOUNDS, waited_s)

    def _send_assignments(self) -> None:
        self._next_send = Deadline.after(SEND_WITHIN_S)
        for one in self._pool.assign():
            worker, jobs = one.worker, one.jobs
            assert worker.heartbeat is not None
            try:
                if jobs:
                    generate = messages.Generate.of_jobs(
                        worker.heartbeat.incarnation, jobs, one.apart, one.is_new, one.granted
                    )
                    self._send(worker.endpoint, generate)
                if one.more:
                    self._send(worker.endpoint, messages.Grant(list(one.more.values())))
            except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):
                # Handlers encode what clients send; if they missed a value, only these jobs fail.
                logger.exception("jobs cannot be encoded")
                text = "the front end could not encode the job; see its log"
                failed = [Failed(job.job_id, job.attempt, TitopoolError.code, text) for job in jobs]
                self._pool.on_results(worker.endpoint, failed)

    def _send(self, endpoint: str, message: messages.ToWorker) -> None:
        if endpoint in self._sockets:
            self._sockets[endpoint].send(messages.encode(message))

    def _abort(self, request: Request) -> None:
        self._send_aborts(self._pool.withdraw(request))

    def _send_aborts(self, aborts: list[tuple[Worker, list[tuple[int, int]]]]) -> None:
        for worker, keys in aborts:
            self._send(worker.endpoint, messages.Abort(keys))

    def _tick(self) -> None:
        now = time.monotonic()
        self._log_errors(self._follow_discovery, now)
        for worker in self._pool.silent_workers(now, self._config.heartbeat_timeout_s):
            self._log_errors(self._lose, worker.endpoint, worker.silence(now))
        self._log_errors(self._pool.fail_waiting_without_worker, now)
        if self._wants_metrics.has_passed:
            for worker in self._pool.workers.values():
                worker.engine_metrics = None
        for endpoint, worker_socket in list(self._sockets.items()):
            # A worker that is down would get all of them at once, with pauses of days before.
            if worker_socket.is_connected:
                self._log_errors(self._send_hello, endpoint)
        self._log_errors(self._peer_weights.tick)
        self._note_heartbeats()

    def _follow_discovery(self, now: float) -> None:
        """Adds and removes workers as the look-ups say, and connects where no socket is open."""
        found = self._discovery.endpoints
        # Sorted, because routing policies choose the first of several equal workers: all front
        # ends must have the same order.
        for endpoint in sorted(found - self._pool.workers.keys(), key=natural_order):
            self._pool.add_worker(endpoint, now)
        for worker in list(self._pool.workers.values()):
            # A look-up may omit an address for a moment: a worker that answers stays.
            if worker.endpoint not in found and worker.heartbeat is None:
                self._disconnect(worker.endpoint)
                self._retries.pop(worker.endpoint, None)
                self._pool.remove_worker(worker.endpoint)
            elif worker.endpoint not in self._sockets:
                self._connect(worker.endpoint)

    def _lose(self, endpoint: str, reason: str, *, blames_jobs: bool = True) -> None:
        """Marks a worker lost and connects a new socket.

        Whatever the old process still sends, and whatever is queued for it, is dropped.
        """
        try:
            self._pool.mark_worker_lost(endpoint, reason, blames_jobs=blames_jobs)
        finally:
            # A worker without a connection would never be greeted again.
            self._disconnect(endpoint)
            self._connect(endpoint)

    def _leave_alone(self, endpoint: str, reason: str) -> None:
        """Drops the connection to a worker that cannot be used as it is, until `_retry_later` ends."""
        if self._pool.workers[endpoint].heartbeat is not None:
            self._pool.mark_worker_lost(endpoint, reason)
        self._disconnect(endpoint)
        self._retry_later(endpoint, reason)

    def _connect(self, endpoint: str) -> None:
        retry = self._retries.get(endpoint)
        if retry is not None and not retry.not_before.has_passed:
            return
        try:
            self._sockets[endpoint] = WorkerSocket(
                self._context, endpoint, self._config.curve_key_file, self._on_change
            )
        except (OSError, zmq.ZMQError, TitopoolError) as error:
            self._retry_later(endpoint, f"it cannot be connected: {error}")

    def _retry_later(self, endpoint: str, reason: str) -> None:
        last = self._retries.get(endpoint)
        if last is None or last.reason != reason:
            logger.warning("the worker at %s: %s", endpoint, reason)
        pause_s = min(2 * last.pause_s, LONGEST_RETRY_S) if last else FIRST_RETRY_S
        self._retries[endpoint] = Retry(Deadline.after(pause_s), pause_s, reason)

    def _send_hello(self, endpoint: str) -> None:
        pool = self._pool.view.snapshot(time.monotonic())
        wants_metrics = not self._wants_metrics.has_passed
        self._send(endpoint, messages.Hello(pool, self._totals(), wants_metrics))

    def _disconnect(self, endpoint: str) -> None:
        worker_socket = self._sockets.pop(endpoint, None)
        if worker_socket is not None:
            self._changed.discard(worker_socket)
            worker_socket.close()

    def _note_heartbeats(self) -> None:
        if self._pool.view.facts is not None:
            self._has_facts.set()
        workers = self._pool.workers.values()
        have_all = bool(workers) and all(worker.heartbeat for worker in workers)
        if have_all or self._first_heartbeats.has_passed:
            self._has_heartbeats.set()


def server_stopping() -> NoReadyWorker:
    """The error of requests that are open when the process ends."""
    return NoReadyWorker("the server is stopping and did not finish the request; send it again")
