"""`titopool top`: the workers and the requests in flight of a running server, live."""

import os
import sys
import threading

import click

from titopool.commands.help import Command, Option, Seconds, url_option
from titopool.errors import TitopoolError
from titopool.secret_files import read_secret_file
from titopool.settings.config import variable_of
from titopool.top.snapshot import Poller, Server
from titopool.top.view import SORTS, Abort, Quit, View

# Columns where the output is no terminal.
WIDTH = 180
# Ages go on between two snapshots; a resized terminal is drawn again.
DRAW_S = 0.5


@click.command(
    "top", cls=Command,
    examples=[
        "titopool top",
        "titopool top --url http://host-a:8000 --filter step-7",
        'titopool top --once --sort "tokens out"',
    ],
)  # fmt: skip
@url_option
@click.option(
    "--api-key-file", cls=Option, section="Server", type=click.Path(), metavar="FILE",
    help="File with the key, instead of the environment. An administrator's key sees the ids of all "
    "requests.",
)  # fmt: skip
@click.option(
    "--interval-s", cls=Option, section="Table", type=Seconds(), default=1.0, show_default=True,
    metavar="SECONDS", help="Between two looks.",
)  # fmt: skip
@click.option(
    "--sort", cls=Option, section="Table", type=click.Choice(list(SORTS)), default="age",
    show_default=True, help="Of requests.",
)  # fmt: skip
@click.option(
    "--filter", "part", cls=Option, section="Table", default="", metavar="TEXT",
    help="Text that a request's row must have.",
)  # fmt: skip
@click.option(
    "--once", cls=Option, section="Output", is_flag=True,
    help="Print one table, also to a pipe, and end.",
)  # fmt: skip
def top(
    url: str, api_key_file: str | None, interval_s: float, sort: str, part: str, once: bool
) -> int:
    """Show the workers and the requests in flight of a running server, live.

    Keys move, sort and filter; `a` aborts a request, `q` ends.
    """
    server = Server(url, key_of(api_key_file))
    view = View()
    view.sort, view.filter = sort, part
    if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        show_once(server, view)
    else:
        show_live(server, view, interval_s)
    return 0


def key_of(path: str | None) -> str:
    """The key in a file, else that of the environment; other users can see command lines.

    Raises:
        ConfigError: the file cannot be read, or other users can read it.
    """
    if path is not None:
        return read_secret_file(path, "--api-key-file").decode(errors="replace").strip()
    names = (variable_of("admin_key"), variable_of("api_key"))
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def show_once(server: Server, view: View) -> None:
    """Prints one table.

    Raises:
        TitopoolError: the server does not answer, or refuses the key.
    """
    from rich.console import Console

    from titopool.top.tables import once

    view.update(server.snapshot(None))
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    Console(width=width, highlight=False).print(once(view, server.url))


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
