"""The command `titopool`: `titopool serve [MODEL] …` is gunicorn with settings from the command line."""

import os
import signal
import sys
from collections.abc import Sequence

from titopool import __version__
from titopool.errors import ConfigError
from titopool.launch import child_environment
from titopool.settings.config import ENV_PREFIX
from titopool.settings.sources import from_command_line, ignored_variables, usage


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; replaces this process by gunicorn's master."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        show(__version__)
        return 0
    if words[:1] != ["serve"] or "--help" in words or "-h" in words:
        show(usage())
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
        # What is ignored is left for gunicorn's master to tell.
        if key in ignored or not key.startswith(ENV_PREFIX)
    }
    command = [sys.executable, "-m", "titopool.launch"]
    os.execve(
        sys.executable,
        [*command, "-c", "python:app.gunicorn_hooks", "app:create_app()"],
        child_environment(others | config.to_environment()),
    )


def show(text: str) -> None:
    """Prints `text`; ends without a word, as other commands do, if the reader has gone."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
