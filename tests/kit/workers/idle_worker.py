"""A worker's server in this process, which nobody calls, with an engine that completes jobs at once."""

from types import SimpleNamespace
from typing import Any

from titopool.settings.config import ServerConfig
from titopool.wire.messages import Job
from workers.engine.base import Generated
from workers.engine.versions import Versions
from workers.serving.server import WorkerServer


class Engine:
    """Completes every job at once."""

    has_died = False
    has_decode_graphs = False

    def __init__(self) -> None:
        self.versions = Versions()
        self.adapters: Any = SimpleNamespace(versions={}, latest_versions={})

    async def run(self, job: Job, on_chunk: object, slots: object) -> Generated:
        return Generated([])


def make_server(config: ServerConfig) -> WorkerServer:
    return WorkerServer(
        Engine(),  # type: ignore[arg-type]
        endpoint="ipc://none", worker_id="0", config=config, report=print,
    )  # fmt: skip
