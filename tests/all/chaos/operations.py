"""Trainers' operations, call by call, and the round trips at which a fault can hit a worker."""

import asyncio
import contextlib
import socket
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.all.chaos.clients import Versions
from tests.all.chaos.cluster import NUM_WORKERS, Cluster

LEASE_S = 3.0
TENSORS = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2, 2]]}
LIST = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 2]]}
# Statuses of errors that calls may get during faults.
REFUSALS = {400, 404, 409, 500, 503, 504}
# Of vLLM's routes: TRL's client repeats a call after 429, 500, 502 and 503.
STOCK_REFUSALS = {400, 409, 504}


class Refused(Exception):
    """A call was refused, which is allowed during faults."""


@dataclass
class Trainer:
    """Calls the server as a trainer does."""

    cluster: Cluster
    versions: Versions
    # Responses that a server must never give.
    wrong: list[str]

    async def call(
        self, path: str, body: dict[str, Any], refusals: set[int] = REFUSALS
    ) -> dict[str, Any]:
        status, answer = await self.cluster.request(path, body)
        if status == 200:
            return answer
        if status not in refusals or answer["error"]["code"] == "internal_error":
            self.wrong.append(f"{path}: {status} {answer}")
        raise Refused(f"{path}: {answer['error']['message']}")

    async def folder_update(self) -> None:
        version = self.versions.begin()
        path = str(self.cluster.root / ("one" if version % 2 else "two"))
        body = {"path": path, "policy": "keep", "version": version}
        self._commit(await self.call("/update_weights", body), version)

    async def group_update(self) -> None:
        version, session = self.versions.begin(), uuid.uuid4().hex
        with listening() as port:
            await self.call("/weights/init", {
                "session": session, "backend": "gloo", "host": "127.0.0.1", "port": port,
                "world_size": NUM_WORKERS + 1,
            })  # fmt: skip
            begun = await self.call(
                "/weights/begin", {"session": session, "version": version, **TENSORS}
            )
            commit = {"update": begun["update"], "policy": "keep"}
            try:
                self._commit(await self.call("/weights/commit", commit), version)
            except Refused:
                with contextlib.suppress(Refused):
                    await self.call("/weights/abort", {"update": begun["update"]})
                raise
            await self.call("/weights/close", {"session": session})

    def _commit(self, answer: dict[str, Any], version: int) -> None:
        if answer["version"] != version:
            self.wrong.append(f"commit of version {version}: {answer}")
        self.versions.committed(version)

    async def trl_update(self) -> None:
        # TRL names no version: it is the pool's version plus one. To the stub each tensor is a whole
        # model, so a job between the two tensors ends an update with the first.
        self.versions.begin()
        self.versions.begin()
        with listening() as port:
            await self.call(
                "/init_communicator",
                {"host": "0.0.0.0", "port": port, "world_size": NUM_WORKERS + 1},
            )
        for name in ("a", "b"):
            await self.call("/update_named_param", {"name": name, "dtype": "float32", "shape": [1]})
        await self.call("/reset_prefix_cache", {})
        await self.call("/close_communicator", {})

    async def stock_update(self) -> None:
        # vLLM's routes name no version: it is the pool's version plus one.
        self.versions.begin()
        with listening() as port:
            await self._send_list(port)
            finished = await self._stock_call("finish_weight_update", {"weight_version": "step"})
            # The call may have ended the update of another trainer, without tensors.
            if "version" in finished:
                self.versions.committed(finished["version"])
            await self._stock_call("shutdown_weight_transfer_engine")

    async def vanish(self) -> None:
        """A trainer of vLLM's routes that ends before it has finished its update."""
        with listening() as port:
            await self._send_list(port)

    async def _send_list(self, port: int) -> None:
        await self._stock_call("init_weight_transfer_engine", {"init_info": {
            "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1,
            "world_size": NUM_WORKERS + 1, "backend": "gloo",
        }})  # fmt: skip
        await self._stock_call("start_weight_update")
        await self._stock_call("update_weights", {"update_info": LIST})

    async def _stock_call(self, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await self.call(f"/{name}", body or {}, STOCK_REFUSALS)

    async def pause(self) -> None:
        await self.call("/pause", {"mode": "keep", "lease_s": LEASE_S})
        await self.call("/pause", {"mode": "keep", "lease_s": LEASE_S})
        await self.cluster.request("/is_paused")
        await self.call("/resume", {})

    async def adapter(self) -> None:
        load = {"lora_name": "style", "lora_path": str(self.cluster.root / "one")}
        await self.call("/v1/load_lora_adapter", load)
        await self.call("/generate/", {"prompts": [[1, 2]] * 6, "lora_name": "style"})
        await self.call("/v1/load_lora_adapter", load)
        await self.call("/v1/unload_lora_adapter", {"lora_name": "style"})

    async def generate(self) -> None:
        """The clients generate continuously; the fault hits one of their jobs."""
        await asyncio.sleep(0.5)


@contextmanager
def listening() -> Iterator[int]:
    """Listens on a trainer's port; yields its number."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


Operation = Callable[[Trainer], Awaitable[None]]
# Round trips between front end and worker, by operation.
ROUND_TRIPS: dict[str, tuple[Operation, tuple[str, ...]]] = {
    "folder update": (
        Trainer.folder_update,
        (
            "BeginFolder", "PrepareUpdate", "AwaitStep(prepare)", "ApplyUpdate",
            "AwaitStep(apply)",
        ),
    ),
    "group update": (
        Trainer.group_update,
        (
            "JoinGroup", "AwaitStep(join)", "AnnounceTensors", "PrepareUpdate", "AwaitStep(prepare)",
            "ApplyUpdate", "AwaitStep(apply)", "LeaveGroup",
        ),
    ),
    "TRL's update": (
        Trainer.trl_update, ("JoinGroup", "AnnounceTensors", "EndTensors", "AwaitStep(finish)"),
    ),
    "vLLM's update": (
        Trainer.stock_update,
        (
            "JoinGroup", "AwaitStep(join)", "AnnounceTensors(start)",
            "AnnounceTensors(list)", "AwaitStep(receive)",
            "EndTensors", "PrepareUpdate", "AwaitStep(prepare)", "ApplyUpdate", "AwaitStep(apply)",
            "LeaveGroup",
        ),
    ),
    "trainer vanishes": (
        Trainer.vanish, ("JoinGroup", "AnnounceTensors(start)",
            "AnnounceTensors(list)", "AwaitStep(receive)"),
    ),
    "pause": (Trainer.pause, ("Pause", "Resume")),
    "adapter": (Trainer.adapter, ("LoadAdapter", "SwitchAdapter", "UnloadAdapter")),
    "generation": (Trainer.generate, ("Generate",)),
    "stream": (Trainer.generate, ("Chunk",)),
}  # fmt: skip
