"""`titopool scale N`: how many workers a running server has.

For a server that starts its own workers (on this host, or on a Ray cluster).
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from titopool.answers.weights import Weights
from titopool.commands.connection import Keys, Unreachable, get, keys, ready_of
from titopool.commands.help import Command, Option, Seconds, Whole, url_option
from titopool.errors import TitopoolError
from titopool.settings.config import ServerConfig

if TYPE_CHECKING:
    from titopool.client.results import WorkerStatus
    from titopool.client.sync_client import Client

POLL_S = 0.2
# Without an answer, after which the server counts as gone; a front end that ends is replaced sooner.
GONE_S = 5.0
# For another worker to give its weights: the first attempt begins within two seconds.
STUCK_S = 10.0
# Phases of a worker that lacks the pool's weights and fetches none.
LACKING = ("waiting_for_weights", "stale")
LEAVING = ("draining", "leaving")


@click.command("scale", cls=Command, examples=["titopool scale 4", "titopool scale 8 --no-wait"])
@click.argument("num_workers", type=Whole(min=1), metavar="N")
@url_option
@click.option(
    "--timeout-s", cls=Option, section="Waiting", type=Seconds(), metavar="SECONDS",
    default=ServerConfig().worker_start_timeout_s, show_default=True,
    help="For all workers to be ready, and for others to have left.",
)  # fmt: skip
@click.option("--no-wait", cls=Option, section="Waiting", is_flag=True, help="Return at once.")
def scale(num_workers: int, url: str, timeout_s: float, no_wait: bool) -> None:
    """Change a running server to N workers.

    Shows each worker's phase until exactly N are ready. A worker that leaves finishes its jobs. One
    that joins takes the pool's weights from their folder or from a worker that serves them. On CPUs
    workers cannot give them: after an update over a group it waits for the next update, and this
    command says so and ends with 1.
    """
    from titopool.client.sync_client import Client

    given = keys()
    ready_of(url, given.api_key)
    with Client(
        url, api_key=given.api_key, admin_key=given.admin_key, timeout_s=timeout_s
    ) as client:
        waiting = Waiting(client, url, given, num_workers)
        client.scale(num_workers)
        if not no_wait:
            waiting.run(timeout_s)


class Waiting:
    """Looks at the workers until exactly `num_workers` are there and ready."""

    def __init__(self, client: "Client", url: str, given: Keys, num_workers: int):
        self._client, self._url, self._keys = client, url, given
        self._num_workers = num_workers
        self._began = time.monotonic()
        # What was shown last, by worker.
        self._shown: dict[str, str] = {}
        # Since when no worker could get further by itself.
        self._stuck_at: float | None = None

    def run(self, timeout_s: float) -> None:
        """Shows each change.

        Raises:
            Unreachable: the server is gone.
            TitopoolError: the workers are not ready in time, or those that miss cannot be.
        """
        while True:
            workers = self._look()
            self._show(workers)
            if [one.phase for one in workers] == ["ready"] * self._num_workers:
                return
            self._check_stuck(workers)
            if time.monotonic() - self._began > timeout_s:
                raise TitopoolError(
                    f"expected {self._num_workers} ready workers within {timeout_s:g} s, got "
                    f"{', '.join(map(str, workers)) or 'none'}; see the server's log"
                )
            time.sleep(POLL_S)

    def _look(self) -> "list[WorkerStatus]":
        """The workers, with the reasons of those that lack the pool's weights."""
        from titopool.client.failures import TimedOut

        try:
            workers = list(self._client.wait_until_ready(GONE_S, num_workers=0))
        except TimedOut:
            # It says why if there is no server; else there are no workers.
            ready_of(self._url, self._keys.api_key)
            return []
        if not any(one.phase in LACKING for one in workers):
            return workers
        try:
            answer = get(self._url, "/weights", self._keys.admin_key)
        except Unreachable:
            # It waits for workers that are busy. The next look tells whether the server is gone.
            return workers
        if answer.status in (401, 403):
            raise TitopoolError(
                f"{self._url}: a worker waits for weights, and only the admin key shows why; set "
                "TITOPOOL_ADMIN_KEY"
            )
        found = answer.read(Weights).workers if answer.status == 200 else []
        # A worker that does not answer has no reason here.
        why = {one.worker: one.why_behind or None for one in found}
        return [
            dataclasses.replace(one, reason=why.get(one.worker) or one.reason) for one in workers
        ]

    def _show(self, workers: "Sequence[WorkerStatus]") -> None:
        # One that has not reported yet has no name.
        texts = {one.worker: _text(one) for one in workers if one.worker}
        for name in sorted(texts.keys() | self._shown.keys()):
            text, before = texts.get(name, "left"), self._shown.get(name)
            if text.startswith("unreachable") and before in LEAVING:
                # It has ended, and the pool forgets it soon.
                texts[name] = before
            elif text != before:
                passed_s = time.monotonic() - self._began
                print(f"{passed_s:6.1f} s  worker {name}: {text}", flush=True)
        self._shown = texts

    def _check_stuck(self, workers: "Sequence[WorkerStatus]") -> None:
        missing = [one for one in workers if one.phase != "ready"]
        is_stuck = len(workers) == self._num_workers and all(
            one.phase in LACKING and one.reason for one in missing
        )
        if not is_stuck:
            self._stuck_at = None
        elif self._stuck_at is None:
            self._stuck_at = time.monotonic()
        elif time.monotonic() - self._stuck_at > STUCK_S:
            num_ready = len(workers) - len(missing)
            undo = f"; `titopool scale {num_ready}` takes it back" if num_ready else ""
            raise TitopoolError(
                f"expected {self._num_workers} ready workers, but worker "
                f"{', '.join(str(one.worker) for one in missing)} cannot get the pool's weights: "
                f"{missing[0].reason}. The next complete update brings them (WeightsClient.update, "
                f"or /update_weights from a folder){undo}"
            )


def _text(worker: "WorkerStatus") -> str:
    return f"{worker.phase}: {worker.reason}" if worker.reason else worker.phase
