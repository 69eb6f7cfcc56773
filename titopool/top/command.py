"""`titopool top`: the workers and the requests in flight of a running server, live."""

import argparse
import os
import sys
import threading
from collections.abc import Sequence

from titopool.errors import ConfigError, TitopoolError
from titopool.secret_files import read_secret_file
from titopool.settings.config import ServerConfig, variable_of
from titopool.top.snapshot import Poller, Server
from titopool.top.view import SORTS, Abort, Quit, View

# Columns where the output is no terminal.
WIDTH = 180
# Ages go on between two snapshots; a resized terminal is drawn again.
DRAW_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Shows the table until `q`, or once; returns the exit code."""
    options = parser().parse_args(argv)
    try:
        server = Server(options.url, key_of(options.api_key_file))
    except ConfigError as error:
        print(f"titopool: {error}", file=sys.stderr)
        return 2
    view = View()
    view.sort, view.filter = options.sort, options.filter
    if options.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return show_once(server, view)
    show_live(server, view, options.interval_s)
    return 0


def parser() -> argparse.ArgumentParser:
    defaults = ServerConfig()
    made = argparse.ArgumentParser(prog="titopool top", description=__doc__)
    made.add_argument(
        "--url", default=f"http://{defaults.host}:{defaults.port}", help="default: %(default)s"
    )
    made.add_argument(
        "--api-key-file", metavar="FILE",
        help=f"file with the key; default: {variable_of('admin_key')} or {variable_of('api_key')} of "
        "the environment. An administrator's key sees the ids of all requests",
    )  # fmt: skip
    made.add_argument(
        "--interval-s", type=seconds, default=1.0, help="between two looks (default: %(default)g)"
    )
    made.add_argument("--sort", choices=SORTS, default="age", help="of requests (default: age)")
    made.add_argument("--filter", default="", help="text that a request's row must have")
    made.add_argument(
        "--once", action="store_true", help="print one table, also to a pipe, and end"
    )
    return made


def seconds(text: str) -> float:
    """A time of 0.1 s or more."""
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 3600 seconds, got {text}")
    return value


def key_of(path: str | None) -> str:
    """The key in a file, else that of the environment; other users can see command lines.

    Raises:
        ConfigError: the file cannot be read, or other users can read it.
    """
    if path is not None:
        return read_secret_file(path, "--api-key-file").decode(errors="replace").strip()
    names = (variable_of("admin_key"), variable_of("api_key"))
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def show_once(server: Server, view: View) -> int:
    """Prints one table."""
    from rich.console import Console

    from titopool.top.tables import once

    try:
        view.update(server.snapshot(None))
    except TitopoolError as error:
        print(f"titopool: {error}", file=sys.stderr)
        return 1
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    Console(width=width, highlight=False).print(once(view, server.url))
    return 0


def show_live(server: Server, view: View, interval_s: float) -> None:
    """Shows the table until the user ends it."""
    from rich.console import Console
    from rich.live import Live

    from titopool.top.keys import keyboard
    from titopool.top.tables import screen

    console = Console(highlight=False)
    with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        poller = Poller(server, interval_s, keys.wake)
        poller.start()
        while True:
            view.update(poller.latest)
            live.update(screen(view, server.url, console.size.height), refresh=True)
            for key in keys.read(DRAW_S):
                action = view.on_key(key)
                if isinstance(action, Quit):
                    return
                if isinstance(action, Abort):
                    abort(server, view, action.request_id, poller)


def abort(server: Server, view: View, request_id: str, poller: Poller) -> None:
    """Aborts a request in a thread, and says in the footer what came of it."""
    view.message = f"aborting {request_id} …"

    def run() -> None:
        try:
            server.abort(request_id)
            view.message = f"aborted {request_id}"
        except TitopoolError as error:
            view.message = f"not aborted: {error}"
        poller.refresh()

    threading.Thread(target=run, daemon=True).start()
