"""Connections to each front end of a server."""

import json
import time
from collections.abc import Mapping
from http.client import HTTPConnection
from typing import Any

import psutil

from harness.servers import STALL_S, Server


def send_json(
    connection: HTTPConnection, path: str, body: Any, headers: Mapping[str, str] | None = None
) -> None:
    """Sends a POST; the caller reads the answer."""
    kind = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), {**kind, **(headers or {})})


def connections_by_front_end(server: Server, num: int) -> list[list[HTTPConnection]]:
    """`num` open connections to each gunicorn process."""
    found: dict[int, list[HTTPConnection]] = {}
    deadline = time.monotonic() + 20 + STALL_S
    while len(found) < 2 or min(map(len, found.values())) < num:
        assert time.monotonic() < deadline, "the connections go to one process"
        connection = HTTPConnection(server.url.removeprefix("http://"), timeout=30)
        connection.request("GET", "/live")
        connection.getresponse().read()
        own = connection.sock.getsockname()
        (pid,) = [
            process.pid
            for process in psutil.Process(server.process.pid).children()
            if any(one.raddr == own for one in process.net_connections("tcp"))
        ]
        found.setdefault(pid, []).append(connection)
    return list(found.values())
