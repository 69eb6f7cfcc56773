"""A fork server in an interpreter of its own, for owners that cannot be forked.

A fork of a process with greenlets would run them too, and what a helper runs may not be allowed to see the
owner's memory.
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from titopool.helpers.fork_server import ForkServer, Limits, Work, fork_helpers


class SpawnedForkServer(ForkServer):
    """As `ForkServer`, with the memory of a module that calls `serve` only."""

    def __init__(self, title: str, arguments: Sequence[str], environ: Mapping[str, str]):
        """`arguments`: Python's, that run the module."""
        self._arguments, self._environ = arguments, environ
        super().__init__(title, lambda: bytes)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, *self._arguments],
                self._environ,
                # Its standard input is the connection.
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
                setpgroup=0,
            )


def serve(title: str, prepare: Callable[[], Work], limits: Limits) -> NoReturn:
    """In the interpreter that was started: forks helpers until the owner has ended."""
    fork_helpers(socket.socket(fileno=0), os.pidfd_open(os.getppid()), title, prepare, limits)
