"""The command `titopool`.

`titopool serve [MODEL] …` is gunicorn with settings from the command line; `titopool doctor` reports
what the server needs of this machine (`workers/doctor.py`); `titopool scale N` changes the number of
workers of a running server (`titopool/scale_command.py`); `titopool top` shows its workers and
requests (`titopool/top/`); `titopool mismatch MODEL` compares its log-probabilities with a trainer's (`titopool/mismatch/command.py`).
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from titopool import __version__
from titopool.errors import ConfigError
from titopool.launch import child_environment
from titopool.settings.config import ENV_PREFIX
from titopool.settings.sources import from_command_line, ignored_variables, usage


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; `serve` and `doctor` replace this process by their own."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        show(__version__)
        return 0
    if words[:1] == ["doctor"]:
        execute("workers.doctor", *words[1:], environ=os.environ)
    if words[:1] == ["scale"]:
        # Imports the client.
        from titopool import scale_command

        return scale_command.main(words[1:])
    if words[:1] == ["top"]:
        from titopool.top import command as top

        return top.main(words[1:])
    if words[:1] == ["mismatch"]:
        # Imports the client.
        from titopool.mismatch import command

        return command.main(words[1:])
    if words[:1] != ["serve"] or "--help" in words or "-h" in words:
        show(
            f"{usage()}\n\ntitopool doctor: versions, GPUs, ports and what this machine lacks; with "
            "--endpoints or --url\nwhich hosts cannot connect\n"
            "titopool scale N: how many workers a running server has (--help)\n"
            "titopool top: the workers and requests in flight of a running server, live (--help)\n"
            "titopool mismatch MODEL: how far a trainer's log-probabilities are from its (--help)"
        )
        return 0 if "--help" in words or "-h" in words else 2
    try:
        config = from_command_line(words[1:])
    except ConfigError as error:
        print(f"titopool: {error}", file=sys.stderr)
        return 2
    ignored = ignored_variables()
    others = {
        key: value
        for key, value in os.environ.items()
        # gunicorn's master warns of the ignored ones.
        if key in ignored or not key.startswith(ENV_PREFIX)
    }
    execute(
        "titopool.launch", "-c", "python:app.gunicorn_hooks", "app:create_app()",
        environ=others | config.to_environment(),
    )  # fmt: skip


def execute(module: str, *arguments: str, environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by Python that runs `module`."""
    command = [sys.executable, "-m", module, *arguments]
    os.execve(sys.executable, command, child_environment(environ))


def show(text: str) -> None:
    """Prints `text`; SIGPIPE ends the process silently if the reader has closed the pipe."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
