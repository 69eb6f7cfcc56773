"""The command `titopool`; `titopool/commands/` has its parts.

Exit codes: 0; 1 after a failure; 2 for words, settings or files that are not accepted; 130 after
Ctrl-C. `titopool status` has 3 for a server that cannot be reached. `serve` and `doctor` replace this
process by their own.
"""

import os
import signal
import sys
from collections.abc import Sequence

# Set by the scripts of `titopool completion`.
COMPLETION = "_TITOPOOL_COMPLETE"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # A process that calls this keeps its search path and its signals.
    if argv is None:
        _leave_working_folder()
        if not words or {"-h", "--help", "--version"} & set(words):
            _end_at_closed_pipes()
    if words[:1] == ["--version"]:
        # Without click, whose import takes longer than all of this.
        from titopool import __version__

        print(__version__, flush=True)
        return 0
    return run(words)


def run(words: list[str]) -> int:
    """Runs click's group; prints an error as one line."""
    import click

    from titopool.commands.group import NoSuchName, titopool
    from titopool.errors import ConfigError, TitopoolError

    if not words and COMPLETION not in os.environ:
        print(titopool.get_help(click.Context(titopool, info_name="titopool")), flush=True)
        return EXIT_USAGE
    try:
        code = titopool.main(words, prog_name="titopool", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "titopool"
        # click may propose values on lines of their own.
        text = " ".join(error.format_message().split())
        print(f"{where}{' ' if isinstance(error, NoSuchName) else ': '}{text}", file=sys.stderr)
        return EXIT_USAGE
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_FAILED)
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except TitopoolError as error:
        return _fail(str(error), EXIT_FAILED)
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED


def _leave_working_folder() -> None:
    """An empty entry of PYTHONPATH means the working folder, before the standard library's modules."""
    library = os.path.dirname(os.__file__)
    end = sys.path.index(library) if library in sys.path else 0
    sys.path[:end] = [folder for folder in sys.path[:end] if folder not in ("", os.getcwd())]


def _fail(text: str, code: int) -> int:
    print(f"titopool: {text}", file=sys.stderr)
    return code


def _end_at_closed_pipes() -> None:
    """SIGPIPE ends the process silently if the reader has closed the pipe."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
