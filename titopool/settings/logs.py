"""Logging. Only entry points of processes configure it."""

import contextlib
import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str, own_handler: logging.Handler | None = None) -> None:
    """Shows this server's lines from `level` up, and warnings of libraries.

    Args:
        own_handler: gets the lines of this server. All other lines go to standard error.
    """
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    for package in ("app", "titopool", "workers"):
        logger = logging.getLogger(package)
        logger.setLevel(level.upper())
        if own_handler is not None:
            own_handler.setFormatter(logging.Formatter(FORMAT))
            logger.addHandler(own_handler)
            logger.propagate = False


def show(text: str) -> None:
    """Writes a line to standard error; ignores a full disk and a closed pipe."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
