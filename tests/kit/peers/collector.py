"""A collector of traces that is not titopool's: oteltap, in a process and an environment of its own."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from harness.servers import REPOSITORY, free_port, wait_until

FOLDER = REPOSITORY / ".venv" / "clients" / "oteltap"


class ReceivedSpan(NamedTuple):
    """A span as the collector has decoded it; times in Unix ns."""

    trace: str
    id: str
    parent: str
    name: str
    begin: int
    end: int
    attributes: dict[str, Any]


class Collector:
    """The running collector and what it has received."""

    def __init__(self, port: int, log: Path):
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def text(self) -> str:
        """Everything that it received, as JSON."""
        return self._log.read_text(errors="replace")

    def spans(self, trace: str = "") -> list[ReceivedSpan]:
        """The spans of a trace, or all, first to last begun."""
        # The last line may be incomplete.
        lines = self.text.split("\n")[:-1]
        found = [_span(json.loads(line)) for line in lines if line.startswith("{")]
        return sorted(
            (one for one in found if not trace or one.trace == trace), key=lambda one: one.begin
        )

    def wait_for(self, trace: str, names: set[str], within_s: float = 10) -> list[ReceivedSpan]:
        """The spans of a trace once all `names` are there."""

        def missing() -> set[str]:
            return names - {one.name for one in self.spans(trace)}

        wait_until(lambda: not missing(), within_s, lambda: f"{missing()} of {self.text[-3000:]}")
        return self.spans(trace)


def _span(fields: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        fields["traceId"], fields["spanId"], fields["parentSpanId"], fields["name"],
        int(fields["startTimeUnixNano"]), int(fields["endTimeUnixNano"]),
        {one["key"]: _value(one["value"]) for one in fields["attributes"]},
    )  # fmt: skip


def _value(value: dict[str, Any]) -> Any:
    ((kind, found),) = value.items()
    if kind == "arrayValue":
        return [_value(one) for one in found.get("values", ())]
    return int(found) if kind == "intValue" else found


@contextmanager
def running_collector(log: Path) -> Iterator[Collector]:
    """A collector that listens."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "oteltap", "--port", str(port)],
            stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(FOLDER)},
        )  # fmt: skip
    try:
        wait_until(lambda: _is_listening(port), 20, lambda: log.read_text())
        yield Collector(port, log)
    finally:
        process.kill()
        process.wait()


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        time.sleep(0.05)
        return probe.connect_ex(("127.0.0.1", port)) == 0
