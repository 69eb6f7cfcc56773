"""What `titopool top` asks the server: /ready, /metrics, /requests, and aborts."""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

from titopool.answers.operators import OpenRequest, OpenRequests, Ready, ReadyWorker
from titopool.commands.connection import read_answer, unreachable
from titopool.errors import TitopoolError

TIMEOUT_S = 5.0
MAX_REQUESTS = 1000
_METRIC = re.compile(r'^titopool_worker_(\w+)\{worker="((?:[^"\\]|\\.)*)"\} (\S+)$', re.M)
_WAITING = re.compile(r"^titopool_waiting_prompts (\S+)$", re.M)


@dataclass(frozen=True)
class WorkerRow:
    """A worker now; rates are over the time between two snapshots, None at the first."""

    name: str
    phase: str
    version: int | None
    num_running: int
    num_slots: int
    silent_s: float
    reason: str = ""
    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    # Of the prompt tokens of the same time; since the worker's start at the first snapshot.
    cache_hits: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """The server at one moment. `error` says why it does not answer; the rest is then as before."""

    workers: list[WorkerRow] = field(default_factory=list)
    requests: list[OpenRequest] = field(default_factory=list)
    num_requests: int = 0
    num_waiting: int = 0
    # Front ends that answered, and that did not.
    num_front_ends: int = 0
    num_missing: int = 0
    # Counters by (name, worker), for rates.
    counters: dict[tuple[str, str], float] = field(default_factory=dict)
    at_s: float = 0.0
    error: str = ""


class Server:
    """The server's HTTP interface."""

    def __init__(self, url: str, key: str):
        """`key`: "" for none."""
        self.url = url.rstrip("/")
        self._key = key

    def snapshot(self, last: Snapshot | None) -> Snapshot:
        """The server now; `last` gives the rates.

        Raises:
            TitopoolError: it does not answer, or refuses the key.
        """
        ready = read_answer(self._call("/ready", accepted=(503,)), Ready, self.url)
        metrics = self._call("/metrics")
        listed = read_answer(self._call(f"/requests?limit={MAX_REQUESTS}"), OpenRequests, self.url)
        now_s = time.monotonic()
        counters = {
            (name, worker): float(value) for name, worker, value in _METRIC.findall(metrics)
        }
        waiting = _WAITING.search(metrics)
        return Snapshot(
            [_worker_row(one, counters, last, now_s) for one in ready.workers],
            listed.requests, listed.num_requests, int(float(waiting[1])) if waiting else 0,
            listed.num_front_ends, listed.num_missing, counters, now_s,
        )  # fmt: skip

    def abort(self, request_id: str) -> None:
        """Ends a request with the tokens that it has.

        Raises:
            TitopoolError: the server does not answer, or refuses the key.
        """
        body = json.dumps({"request_ids": [request_id]}).encode()
        self._call("/inference/v1/abort_requests", body)

    def _call(self, path: str, body: bytes | None = None, accepted: tuple[int, ...] = ()) -> str:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        asked = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
                text: str = answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if error.code not in accepted:
                raise TitopoolError(f"{path}: {error.code}: {_message_of(text)}") from None
        except (OSError, ValueError) as error:
            raise unreachable(self.url, error) from None
        return text


def _message_of(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


def _worker_row(
    shown: ReadyWorker,
    counters: dict[tuple[str, str], float],
    last: Snapshot | None,
    now_s: float,
) -> WorkerRow:
    name = shown.worker or shown.endpoint or "?"

    def count(what: str) -> float:
        return counters.get((what, name), 0.0)

    def grown(what: str) -> float:
        """Since the last snapshot; a restarted worker counts from 0."""
        before = last.counters.get((what, name), 0.0) if last else 0.0
        return count(what) - (before if before <= count(what) else 0.0)

    passed_s = now_s - last.at_s if last and last.at_s else None
    prompts = grown("prompt_tokens_total")
    return WorkerRow(
        name, shown.phase, shown.weight_version, int(count("sequences")),
        int(count("slots")), shown.silent_s, shown.reason or "",
        grown("completion_tokens_total") / passed_s if passed_s else None,
        prompts / passed_s if passed_s else None,
        grown("cached_tokens_total") / prompts if prompts else None,
    )  # fmt: skip


class Poller(threading.Thread):
    """Takes a snapshot again and again, so that a server that hangs does not hold up the keyboard."""

    def __init__(self, server: Server, interval_s: float, on_change: Callable[[], None]):
        """`on_change` is called, in this thread, after each snapshot."""
        super().__init__(daemon=True)
        self.latest = Snapshot(error="no answer yet")
        self._server, self._interval_s, self._on_change = server, interval_s, on_change
        self._wake = threading.Event()

    def refresh(self) -> None:
        """Takes the next snapshot now."""
        self._wake.set()

    def run(self) -> None:
        """Runs until the process ends."""
        while True:
            self._wake.clear()
            last = self.latest
            try:
                self.latest = self._server.snapshot(last if not last.error else None)
            except (TitopoolError, ValueError, KeyError, TypeError) as error:
                text = str(error) or type(error).__name__
                self.latest = Snapshot(
                    last.workers, last.requests, last.num_requests, last.num_waiting,
                    last.num_front_ends, last.num_missing, last.counters, last.at_s, text,
                )  # fmt: skip
            self._on_change()
            self._wake.wait(self._interval_s)
