"""Calls of a trainer that updates weights, to stub engines."""

from typing import Any

import requests

from harness.servers import Server

TENSORS = {"names": ["w"], "dtypes": ["torch.float32"], "shapes": [[2, 2]]}


def init_body(port: int, session: str = "one", world_size: int = 3) -> dict[str, Any]:
    return {
        "session": session, "backend": "gloo", "host": "127.0.0.1", "port": port,
        "world_size": world_size,
    }  # fmt: skip


def begin(server: Server, session: str = "one", **fields: Any) -> requests.Response:
    return server.post("/weights/begin", {"session": session, **TENSORS, **fields})
