"""The front end's application, with name resolution and a resources route for the harness."""

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flask import Flask

import app
import app.pool.discovery
from app.call.service import Service

# Resolves to the list of addresses in the file of `CHAOS_HOSTS`.
NAME = "pool.test"


def look_up(host: str, port: str, **options: Any) -> list[Any]:
    """`socket.getaddrinfo` with the harness's addresses for `NAME`."""
    if host != NAME:
        return socket.getaddrinfo(host, port, **options)
    addresses = json.loads(Path(os.environ["CHAOS_HOSTS"]).read_text())
    if not addresses:
        raise OSError("staged: the name is unknown")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, int(port))) for one in addresses]


def create_app() -> Flask:
    application = app.create_app()
    app.pool.discovery.socket = SimpleNamespace(  # type: ignore[attr-defined]
        getaddrinfo=look_up, SOCK_STREAM=socket.SOCK_STREAM
    )
    app.pool.discovery.LOOK_UP_EVERY_S = 0.2
    service: Service = application.extensions["titopool"]

    @application.get("/chaos/held/")
    def resources_in_use() -> dict[str, Any]:
        pool = service.link._pool
        return {
            "pid": os.getpid(),
            "held": {
                "places": service._num_open,
                "jobs": pool.num_open_jobs,
                "waiting": len(pool.waiting),
                "memory": service.budget.taken,
                "commands": service.link.commands.num_pending,
                "failed": len(pool._failed),
                "of_workers": {
                    endpoint: [len(one.jobs), one.num_sequences, one.num_tokens]
                    for endpoint, one in pool.workers.items()
                    if one.jobs or one.num_sequences or one.num_tokens
                },
            },
            "num_files": len(os.listdir("/proc/self/fd")),
        }

    return application
