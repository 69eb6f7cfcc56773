"""`titopool scale N`: how many workers a running server has.

Adds or removes workers of a server that starts its own (on this host, or on a Ray cluster), shows what
they are doing, and prints how long it took.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from titopool.client.results import WorkerStatus
from titopool.client.sync_client import Client
from titopool.errors import TitopoolError
from titopool.settings.config import ServerConfig, variable_of

POLL_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Scales a server; returns the exit code."""
    defaults = ServerConfig()
    parser = argparse.ArgumentParser(prog="titopool scale", description=__doc__)
    parser.add_argument("num_workers", type=int, metavar="N")
    parser.add_argument(
        "--url", default=f"http://{defaults.host}:{defaults.port}", help="default: %(default)s"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=defaults.worker_start_timeout_s,
        help="for all workers to be ready, and for others to have left (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--no-wait", action="store_true", help="return at once")
    options = parser.parse_args(argv)
    # As the server reads them; other users can see command lines.
    key = os.environ.get(variable_of("api_key"), "")
    admin_key = os.environ.get(variable_of("admin_key"), "")
    try:
        with Client(
            options.url, api_key=key, admin_key=admin_key, timeout_s=options.timeout_s
        ) as client:
            began = time.monotonic()
            client.scale(options.num_workers)
            if not options.no_wait:
                wait(client, options.num_workers, began, options.timeout_s)
    except TitopoolError as error:
        print(f"titopool: {error}", file=sys.stderr)
        return 1
    return 0


def wait(client: Client, num_workers: int, began: float, timeout_s: float) -> None:
    """Shows each change until exactly `num_workers` workers are there and ready.

    Raises:
        TitopoolError: they are not within `timeout_s`.
    """
    shown: dict[str, str] = {}

    def show(workers: Sequence[WorkerStatus]) -> None:
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
