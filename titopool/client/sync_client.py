"""The client that blocks: `AsyncClient` in a thread of its own, so that both do the same.

Runs in: trainers and agents, also within a running event loop (notebooks). Threads may share it.
"""

import asyncio
import atexit
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from titopool.client.agent_sessions import Session
from titopool.client.async_client import AsyncClient

if TYPE_CHECKING:
    from titopool.client.weights_client import WeightsClient

P = ParamSpec("P")
R = TypeVar("R")
JOIN_TIMEOUT_S = 10.0


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate["Client", P], R]:
    @functools.wraps(method)
    def call(self: "Client", /, *args: P.args, **options: P.kwargs) -> R:
        return self._run(lambda client: method(client, *args, **options))

    # So that it can be pickled, and an error names the call that was made.
    call.__module__, call.__qualname__ = __name__, f"Client.{method.__name__}"
    return call


class Client:
    """One server's client, with the calls of `AsyncClient`.

    A call that is interrupted (Ctrl-C) stops its generation.
    """

    _thread: "_LoopThread | None" = None

    def __init__(
        self, base_url: str, *, api_key: str = "", admin_key: str = "", timeout_s: float = 600.0
    ):
        """Connects to nothing yet.

        Args:
            admin_key: for pauses, weights and aborts of all requests; "": `api_key`.
            timeout_s: of each call, with its retries.

        Raises:
            InvalidRequest: `base_url` is no URL, or `timeout_s` is not positive.
        """
        self._client = AsyncClient(
            base_url, api_key=api_key, admin_key=admin_key, timeout_s=timeout_s
        )
        self._is_stopped = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also in another process, has the settings and keys, and connections of its own."""
        return {**vars(self), "_thread": None}

    def __del__(self) -> None:
        if self._thread is not None:
            self._thread.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections; the next call opens new ones."""
        with _lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def stop(self) -> None:
        """Closes for good: calls of other threads, also later ones, raise asyncio's CancelledError."""
        self._is_stopped = True
        self.close()

    # ---- generation ------------------------------------------------------------------

    generate = _blocking(AsyncClient.generate)
    chat = _blocking(AsyncClient.chat)
    score = _blocking(AsyncClient.score)

    # ---- agents ----------------------------------------------------------------------

    def session(self, metadata: Mapping[str, Any] | None = None) -> Session:
        """A new session for an agent, whose turns the server remembers as token ids.

            with client.session() as session:
                run_agent(session.base_url, session.api_key)
                samples = session.samples()

        The end of the block ends the session.

        Args:
            metadata: what `Session.read` gives back; JSON of at most 64 KiB.

        Raises:
            InvalidRequest: the metadata is too long, or the server has no run_dir.
            QueueFull: the server has too many sessions, or their file is full.
            TitopoolError: as `generate`.
        """
        return Session(self._run, self._run(lambda client: client.session(metadata)))

    # ---- text and ids ----------------------------------------------------------------

    render = _blocking(AsyncClient.render)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)

    # ---- control ---------------------------------------------------------------------

    @property
    def num_aborts(self) -> int:
        """How often `abort` ended all requests. Rollouts that it ended do not go on."""
        return self._client.num_aborts

    abort = _blocking(AsyncClient.abort)
    pause = _blocking(AsyncClient.pause)
    resume = _blocking(AsyncClient.resume)
    scale = _blocking(AsyncClient.scale)
    drain = _blocking(AsyncClient.drain)
    info = _blocking(AsyncClient.info)
    wait_until_ready = _blocking(AsyncClient.wait_until_ready)

    # ---- weights ---------------------------------------------------------------------

    def weights(
        self,
        *,
        device: Any = None,
        host: str | None = None,
        names: Mapping[str, str] | Callable[[str], str] | None = None,
        timeout_s: float = 300.0,
        chunk_bytes: int | None = None,
    ) -> "WeightsClient":
        """The sender of new weights, as a context manager; needs torch.

            with client.weights(device="cuda:0") as weights:
                weights.update(model, policy="keep")

        At the end of the block a pause that it made ends, and its group is closed. An update that
        did not end leaves the old weights in service.

        The arguments are those of `WeightsClient` (`titopool/client/weights_client.py`).

        Raises:
            WeightsError: as `WeightsClient`.
        """
        return self._client.weights(
            device=device, host=host, names=names, timeout_s=timeout_s, chunk_bytes=chunk_bytes
        ).sender

    # ---- the thread ------------------------------------------------------------------

    def _run(self, call: Callable[[AsyncClient], Coroutine[Any, Any, R]]) -> R:
        with _lock:
            if self._is_stopped:
                raise asyncio.CancelledError("the client was stopped")
            if self._thread is None or not self._thread.is_alive:
                # The first call, or the first one after a fork: threads stay behind.
                self._thread = _LoopThread()
            future = self._thread.submit(call(self._client))
        return _result_of(future)


class _LoopThread:
    """An event loop in a thread, which does not keep the process alive."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="titopool-client", daemon=True)
        self._thread.start()
        _threads.add(self)

    def _run(self) -> None:
        # At its end, the runner cancels the calls and closes the sessions.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._end.wait())
        _threads.discard(self)

    @property
    def is_alive(self) -> bool:
        """Whether calls can run: false in a process that was forked later."""
        return self._thread.is_alive()

    def submit(self, coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        """Starts a call."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def end(self) -> None:
        """Lets the thread cancel all calls, close all connections and end; does not wait."""
        # The loop may be closed meanwhile.
        with contextlib.suppress(RuntimeError):
            if self.is_alive:
                self._loop.call_soon_threadsafe(self._end.set)

    def join(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """As `end`, and waits for it."""
        self.end()
        self._thread.join(timeout_s)


# Of all clients, so that no child is forked while a thread holds it.
_lock = threading.RLock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
# Those that run.
_threads: set[_LoopThread] = set()


_is_exiting = threading.Event()


@atexit.register
def _join_all() -> None:
    _is_exiting.set()
    end, running = time.monotonic() + JOIN_TIMEOUT_S, list(_threads)
    for one in running:
        one.end()
    for one in running:
        one.join(max(0.0, end - time.monotonic()))


def _result_of(future: Future[R]) -> R:
    """The result of a call, which has a timeout of its own."""
    try:
        return future.result()
    except CancelledError:
        if _is_exiting.is_set():
            # A daemon thread, which ends with the process and without a traceback.
            raise SystemExit from None
        # No Exception: what goes on after an error must not go on here.
        raise asyncio.CancelledError("the client was closed") from None
    except BaseException:
        # Ctrl-C: closes the connection, so that the server stops the request.
        future.cancel()
        raise
