"""Logging: text or JSON, with the id of the request that a line is about.

Only entry points of processes configure it.
"""

import contextlib
import logging
import re
import sys
from contextvars import ContextVar
from typing import Any

# Control characters, line and paragraph separators, what turns the direction of text, and halves of
# surrogate pairs, which no encoding writes.
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_FORMATS = ("text", "json")

# The id of the request that this greenlet or task works for; "": none. Greenlets and tasks have
# contexts of their own.
current_request: ContextVar[str] = ContextVar("current_request", default="")

_shown_by: logging.Formatter | None = None


def escaped(text: str) -> str:
    """`text` as one line that moves no terminal's cursor: what is not visible as Python writes it."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class TextFormatter(logging.Formatter):
    """Adds the request's id to a line that does not name it.

    Clients choose paths, names and texts of errors, so none of them can begin a line or send a
    terminal an escape sequence.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        text, name = super().formatMessage(record), getattr(record, "request_id", "")
        return escaped(text if not name or name in text else f"{text} (request {name})")

    def formatException(self, ei: Any) -> str:
        """The traceback's lines, indented, because an exception's message may have several lines."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """As `formatException`."""
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {escaped(line)}" for line in text.split("\n"))


def note_request(record: logging.LogRecord) -> bool:
    """A filter of handlers that gives `record` the id of the current request.

    A record that was logged with `extra={"request_id": …}` keeps that.
    """
    if not hasattr(record, "request_id"):
        record.request_id = current_request.get()
    return True


def formatter_of(
    log_format: str, worker: str = "", text: str = FORMAT, date: str | None = None
) -> logging.Formatter:
    """What formats lines: as `text` and `date` say, or each as a JSON object.

    Args:
        worker: the worker's name, for JSON; "": another process.
    """
    if log_format == "text":
        return TextFormatter(text, date)
    from pythonjsonlogger.json import JsonFormatter

    # ASCII, because file names may hold what UTF-8 cannot encode.
    return JsonFormatter(
        ["levelname", "name", "message", "request_id", "process"],
        rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
        static_fields={"worker": worker},
        timestamp="time",
    )


def use_format(handler: logging.Handler, formatter: logging.Formatter) -> None:
    """Lets `handler` write lines by `formatter`, with the ids of their requests."""
    handler.setFormatter(formatter)
    handler.addFilter(note_request)


def configure_logging(
    level: str,
    own_handler: logging.Handler | None = None,
    *,
    log_format: str = "text",
    worker: str = "",
) -> None:
    """Shows this server's lines from `level` up, and warnings of libraries.

    Args:
        own_handler: gets the lines of this server. All other lines go to standard error.
        worker: as in `formatter_of`.
    """
    formatter = formatter_of(log_format, worker)
    show_as(log_format, worker)
    of_libraries = logging.StreamHandler()
    use_format(of_libraries, formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[of_libraries])
    for package in ("app", "titopool", "workers"):
        logger = logging.getLogger(package)
        logger.setLevel(level.upper())
        if own_handler is not None:
            use_format(own_handler, formatter)
            logger.addHandler(own_handler)
            logger.propagate = False


def show_as(log_format: str, worker: str = "") -> None:
    """Sets the form of what `show` writes."""
    global _shown_by
    _shown_by = None if log_format == "text" else formatter_of(log_format, worker)


def show(text: str) -> None:
    """Writes a line to standard error; ignores a full disk and a closed pipe."""
    if _shown_by is not None:
        text = line_of(text.strip(), _shown_by)
    show_line(text)


def show_line(text: str) -> None:
    """As `show`, for a line that has its form."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def line_of(
    text: str, formatter: logging.Formatter, *, name: str = "titopool", level: int = logging.INFO
) -> str:
    """`text` as a line of the log."""
    record = logging.LogRecord(name, level, "", 0, text, None, None)
    note_request(record)
    return formatter.format(record)
