"""`titopool scale N`: how many workers a running server has.

For a server that starts its own workers (on this host, or on a Ray cluster).
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from titopool.commands.connection import keys
from titopool.commands.help import Command, Option, url_option
from titopool.errors import TitopoolError
from titopool.settings.config import ServerConfig

if TYPE_CHECKING:
    from titopool.client.results import WorkerStatus
    from titopool.client.sync_client import Client

POLL_S = 0.2


@click.command("scale", cls=Command, examples=["titopool scale 4", "titopool scale 8 --no-wait"])
@click.argument("num_workers", type=click.IntRange(min=1), metavar="N")
@url_option
@click.option(
    "--timeout-s", cls=Option, section="Waiting", type=float, metavar="SECONDS",
    default=ServerConfig().worker_start_timeout_s, show_default=True,
    help="For all workers to be ready, and for others to have left.",
)  # fmt: skip
@click.option("--no-wait", cls=Option, section="Waiting", is_flag=True, help="Return at once.")
def scale(num_workers: int, url: str, timeout_s: float, no_wait: bool) -> None:
    """Change a running server to N workers.

    Shows each worker's phase until exactly N are ready. A worker that leaves finishes its jobs.
    """
    from titopool.client.sync_client import Client

    api_key, admin_key = keys()
    with Client(url, api_key=api_key, admin_key=admin_key, timeout_s=timeout_s) as client:
        began = time.monotonic()
        client.scale(num_workers)
        if not no_wait:
            wait(client, num_workers, began, timeout_s)


def wait(client: "Client", num_workers: int, began: float, timeout_s: float) -> None:
    """Shows each change until exactly `num_workers` workers are there and ready.

    Raises:
        TitopoolError: they are not within `timeout_s`.
    """
    shown: dict[str, str] = {}

    def show(workers: "Sequence[WorkerStatus]") -> None:
        phases = {one.worker or "?": one.phase for one in workers}
        passed_s = time.monotonic() - began
        for name in sorted(phases.keys() | shown.keys()):
            if phases.get(name) != shown.get(name):
                print(f"{passed_s:6.1f} s  worker {name}: {phases.get(name, 'left')}", flush=True)
        shown.clear()
        shown.update(phases)

    while True:
        left_s = timeout_s - (time.monotonic() - began)
        workers = client.wait_until_ready(max(left_s, POLL_S), show)
        show(workers)
        if [one.phase for one in workers] == ["ready"] * num_workers:
            return
        if left_s <= 0:
            raise TitopoolError(
                f"expected {num_workers} ready workers within {timeout_s:g} s, got "
                f"{', '.join(map(str, workers))}; see the server's log"
            )
        time.sleep(POLL_S)
