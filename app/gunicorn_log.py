"""gunicorn's own log lines, in the form of the server's.

Runs in: gunicorn's master and each front end.
"""

from typing import Any

from gunicorn.glogging import Logger

from titopool.settings.logs import formatter_of, use_format
from titopool.settings.sources import from_environment


class Log(Logger):  # type: ignore[misc]
    """gunicorn's logger; with log_format text its lines stay as they are, but for a request's id."""

    def setup(self, cfg: Any) -> None:
        """Prepares the handlers, as gunicorn does at its start and at a reload."""
        super().setup(cfg)
        formatter = formatter_of(
            from_environment().log_format, text=self.error_fmt, date=self.datefmt
        )
        for handler in self.error_log.handlers:
            use_format(handler, formatter)
