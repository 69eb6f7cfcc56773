"""Logging, configured in the entry points only."""

import logging


def configure_logging(level: str) -> None:
    """Shows our own lines from `level` up, and warnings of the libraries."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for package in ("app", "titopool", "workers"):
        logging.getLogger(package).setLevel(level.upper())
