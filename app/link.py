"""The one thread of a front-end process that touches ZeroMQ.

Runs in: each gunicorn process, one thread. Owns: a DEALER for each worker, and the pool.
Talks to: `workers/server.py`. Other threads: only through `submit`, `cancel` and `workers`,
which append to a queue and wake the thread, or read what it published.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from app.discovery import Discovery
from app.placement import POLICIES
from app.pool import Pool
from app.request import Request
from titopool import messages
from titopool.config import ServerConfig
from titopool.errors import NoReadyWorker, QueueFull, TitopoolError
from titopool.messages import Heartbeat, Results, Stopping, WorkerFacts
from titopool.sockets import connect_dealer

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
        self._calls: deque[Callable[[], None]] = deque()
        self._views: tuple[WorkerView, ...] = ()
        self._facts: WorkerFacts | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self._is_closing = False
        # Set when every worker has been heard of, or has had the time to say something.
        self._has_met = threading.Event()
        self._meet_until = float("inf")

    # ---- any thread ------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread in this process, once."""
        with self._lock:
            if self._thread is None and not self._is_closing:
                self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
                self._discovery.start()
                self._meet_until = time.monotonic() + MEETING_S
                self._thread = threading.Thread(target=self._run, name="link", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends every open request and the thread."""
        with self._lock:
            # Its descriptor stays open: a handler may be about to wake the thread.
            self._is_closing = True
            thread = self._thread
        if thread is not None:
            self._wake()
            thread.join(timeout=5)
            self._discovery.close()

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
    def needs_prefixes(self) -> bool:
        """Whether jobs should bring the digests of their prompts."""
        has_choice = self._config.placement == "prefix" and len(self._views) > 1
        return has_choice and self.facts.num_cache_tokens > 0

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
        self._call(lambda: self._pool.submit(request))
        if self._is_closing:
            # The thread may have taken its last call already.
            request.fail(stopping())

    def cancel(self, request: Request, error: TitopoolError) -> None:
        """Ends the request with `error`, if it is open, and stops its jobs."""
        if request.fail(error):
            self._call(lambda: self._abort(request))

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # ---- the link thread -------------------------------------------------------------

    def _run(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        next_tick = 0.0
        while not self._is_closing:
            timeout_s = max(0.0, next_tick - time.monotonic())
            try:
                self._turn(timeout_s)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + self._config.heartbeat_interval_s
                    self._tick()
            except Exception:
                # One bad message must not take the others' answers with it.
                logger.exception("the link thread goes on after an error")
        self._shut_down()

    def _turn(self, timeout_s: float) -> None:
        """Waits for something to do and does it."""
        ready = dict(self._poller.poll(int(timeout_s * 1000) + 1))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        while self._calls:
            self._calls.popleft()()
        for endpoint, socket in list(self._sockets.items()):
            if socket in ready:
                self._receive(endpoint, socket)
        for endpoint, monitor in list(self._monitors.items()):
            if monitor in ready:
                self._read_monitor(endpoint, monitor)
        for request in self._pool.take_failed():
            self._abort(request)
        self._send_assignments()

    def _receive(self, endpoint: str, socket: zmq.Socket[bytes]) -> None:
        while self._sockets.get(endpoint) is socket:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = messages.decode_from_worker(frame)
            except msgspec.MsgspecError as error:
                logger.error("dropped a message of %s that is none of ours: %s", endpoint, error)
                continue
            self._handle(endpoint, message)

    def _handle(self, endpoint: str, message: messages.FromWorker) -> None:
        match message:
            case Results(results=results):
                self._pool.on_results(endpoint, results)
            case Heartbeat():
                self._pool.on_heartbeat(endpoint, message, time.monotonic())
                self._facts = self._pool.workers[endpoint].facts or self._facts
                self._publish()
            case Stopping(failure=failure):
                self._lose(endpoint, failure or "it was stopped", has_died=bool(failure))

    def _read_monitor(self, endpoint: str, monitor: zmq.Socket[bytes]) -> None:
        event = recv_monitor_message(monitor, zmq.NOBLOCK)
        # The other end of a local socket is closed by nothing but the end of its process; a
        # connection between hosts that breaks takes the worker's replies with it.
        if event["event"] == zmq.EVENT_DISCONNECTED:
            self._lose(endpoint, "its connection is closed")

    def _send_assignments(self) -> None:
        for worker, jobs in self._pool.assign():
            assert worker.heartbeat is not None
            message = messages.Generate(worker.heartbeat.incarnation, jobs)
            self._send(worker.endpoint, message)

    def _send(self, endpoint: str, message: messages.ToWorker) -> None:
        self._sockets[endpoint].send(messages.encode(message), zmq.NOBLOCK)

    def _abort(self, request: Request) -> None:
        for worker, keys in self._pool.drop_done(request):
            self._send(worker.endpoint, messages.Abort(keys))

    def _tick(self) -> None:
        now = time.monotonic()
        self._follow_discovery(now)
        for worker in self._pool.silent_workers(now, self._config.heartbeat_timeout_s):
            self._lose(worker.endpoint, f"silent for {now - worker.last_seen:.0f} s")
        self._pool.fail_if_abandoned(now)
        for endpoint in self._sockets:
            self._send(endpoint, messages.Hello())
        self._publish()

    def _follow_discovery(self, now: float) -> None:
        found = self._discovery.endpoints
        # By the sockets: one that could not be made is tried again.
        for endpoint in found - self._sockets.keys():
            self._pool.add_worker(endpoint, now)
            self._connect(endpoint)
        for endpoint in self._pool.workers.keys() - found:
            self._disconnect(endpoint)
            self._pool.remove_worker(endpoint)

    def _lose(self, endpoint: str, reason: str, *, has_died: bool = True) -> None:
        """A process that may come back is met on a new socket: what it still sends on the old
        one, and what was queued for it there, is gone."""
        self._pool.lose_worker(endpoint, reason, has_died=has_died)
        self._disconnect(endpoint)
        self._connect(endpoint)
        self._publish()

    def _connect(self, endpoint: str) -> None:
        socket = connect_dealer(self._context, endpoint, self._config.curve_key_file)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        self._sockets[endpoint], self._monitors[endpoint] = socket, monitor
        self._send(endpoint, messages.Hello())

    def _disconnect(self, endpoint: str) -> None:
        socket, monitor = self._sockets.pop(endpoint), self._monitors.pop(endpoint)
        self._poller.unregister(socket)
        self._poller.unregister(monitor)
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)

    def _publish(self) -> None:
        now = time.monotonic()
        self._views = tuple(
            WorkerView(worker.endpoint, worker.heartbeat, now - worker.last_seen)
            for worker in self._pool.workers.values()
        )
        has_met_all = bool(self._views) and all(view.heartbeat for view in self._views)
        if has_met_all or now > self._meet_until:
            self._has_met.set()

    def _shut_down(self) -> None:
        error = stopping()
        while self._calls:
            self._calls.popleft()()
        for request in self._pool.open_requests():
            request.fail(error)
        for endpoint in list(self._sockets):
            self._disconnect(endpoint)
        self._context.term()


def stopping() -> NoReadyWorker:
    """What a request gets that is open when the process ends."""
    return NoReadyWorker("the server is stopping; the request was not answered in time")
