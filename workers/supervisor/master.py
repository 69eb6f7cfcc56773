"""What a pool's process and gunicorn's master, its parent, agree on: options, run_dir, the end."""

import argparse
import os
import shutil
import signal
from pathlib import Path

from titopool.settings.logs import show
from titopool.wire.run_dir import FAILURE


def parser_of(prog: str) -> argparse.ArgumentParser:
    """The options that the master passes."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--url")
    parser.add_argument("--requires-key", action="store_true")
    parser.add_argument("--remove-run-dir", action="store_true")
    return parser


def remove_orphaned_run_dir(options: argparse.Namespace, run_dir: str) -> None:
    """Removes the folder if the master was killed, and so cannot remove it."""
    if options.remove_run_dir and os.getppid() != options.parent_pid:
        shutil.rmtree(run_dir, ignore_errors=True)


def end_master(options: argparse.Namespace, run_dir: str, cause: str) -> None:
    """Shows the cause and stops the master, which reads the file then and exits with an error."""
    show(f"\ntitopool: {cause}\n")
    try:
        Path(run_dir, FAILURE).write_text(cause)
    except OSError as error:
        # The master sees then that this process has ended by itself, which is an error too.
        show(f"titopool: the cause is not in run_dir: {error}\n")
    if os.getppid() == options.parent_pid:
        os.kill(options.parent_pid, signal.SIGTERM)
