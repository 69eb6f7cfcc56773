"""Logging, configured in the entry points only."""

import contextlib
import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str, own_handler: logging.Handler | None = None) -> None:
    """Shows our own lines from `level` up, and warnings of the libraries.

    Our own go to `own_handler`, if there is one, and the libraries' to standard error.
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
    """Writes a line to standard error; a full disk behind it, or a closed pipe, stops nothing."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
