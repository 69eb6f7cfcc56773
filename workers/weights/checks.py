"""Checks of a trainer's calls: its folder, address and GPU, and the layers that it sends."""

import asyncio
import errno
import os
import time
from pathlib import Path

from titopool.errors import InvalidRequest
from workers.in_model.receiving.group import open_port

CONNECT_TIMEOUT_S = 2.0
# A trainer of vLLM's or TRL's begins to listen while its call is under way.
LISTEN_TIMEOUT_S = 5.0
LISTEN_POLL_S = 0.02
# Linux keeps the port of a closed connection for 60 s (TIME_WAIT).
UNUSED_TIMEOUT_S, UNUSED_POLL_S = 65.0, 0.2


def checked_folder(folder: str, root: str, field: str = "path") -> str:
    """Returns the real path of `folder`, which must lie below `root`; `field` is for the error.

    Raises:
        InvalidRequest: `folder`, or a file in it, is not below `root`, or `root` is empty.
    """
    if not root:
        raise InvalidRequest(
            f"{field}: weights from folders are disabled, as the server has no weights_root; set "
            "weights_root to a folder that contains yours",
            param=field,
        )
    if "\0" in folder:
        raise InvalidRequest(f"{field}: expected a path, got one with NUL", param=field)
    path, top = Path(os.path.realpath(folder)), os.path.realpath(root)
    if not _is_folder_below(path, top):
        raise InvalidRequest(
            f"{field}: expected a folder below weights_root ({root}), got {folder!r}", param=field
        )
    return str(path)


def _is_folder_below(path: Path, top: str) -> bool:
    """Whether a folder and all files in it lie below `top`."""
    try:
        # A file in the folder may be a link to a file elsewhere.
        return (
            path.is_relative_to(top)
            and path.is_dir()
            and all(file.resolve().is_relative_to(top) for file in path.iterdir())
        )
    except (OSError, RuntimeError):
        # A name too long for the file system, links in a circle, or no permission.
        return False


def check_trainer_device(uuid: str, worker_uuids: list[str]) -> None:
    """Raises InvalidRequest if the trainer's GPU (its UUID, "" if unknown) is a worker's GPU."""
    if uuid and uuid in worker_uuids:
        raise InvalidRequest(
            f"client_device_uuid: expected a GPU that no worker uses, got {uuid}; NCCL cannot send "
            "from a GPU to itself: run trainer and server on different GPUs",
            param="client_device_uuid",
        )


async def check_trainer_reachable(host: str, port: int) -> None:
    """Waits until a worker can connect to the trainer.

    Raises:
        InvalidRequest: the trainer does not listen within `LISTEN_TIMEOUT_S`.
    """
    deadline = time.monotonic() + LISTEN_TIMEOUT_S
    while not await is_listening(host, port):
        if time.monotonic() > deadline:
            raise InvalidRequest(
                "host, port: expected an address at which workers reach the trainer, got "
                f"{host}:{port}, where nothing answers for {LISTEN_TIMEOUT_S:g} s; pass an address "
                "of the trainer's machine that the workers can resolve (WeightsClient: host), and "
                "allow their connections",
                param="host",
            )
        await asyncio.sleep(LISTEN_POLL_S)


async def is_listening(host: str, port: int) -> bool:
    """Whether `host`, `port` accepts connections: a trainer listens as long as its process runs."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError, ValueError):
        # ValueError: a host name with NUL or with too long a label.
        return False
    writer.close()
    return True


async def wait_for_unused_port(host: str, port: int) -> None:
    """Waits while an outgoing connection holds the port at which a worker is to listen.

    TRL's default port, 51216, is one of those that Linux gives to outgoing connections. Returns after
    `UNUSED_TIMEOUT_S`, if another process listens there, or for an address of another host: then listening fails with the reason.
    """
    deadline = time.monotonic() + UNUSED_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            open_port(host, port).close()
            return
        except (OSError, ValueError) as error:
            is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
            if not is_taken or await is_listening(host, port):
                return
        await asyncio.sleep(UNUSED_POLL_S)


def check_whole_layers(missing: str) -> None:
    """Raises InvalidRequest if an update lacks parts of a layer, the names in `missing`.

    vLLM would leave the rest of the layer uninitialized.
    """
    if missing:
        raise InvalidRequest(
            "names: expected whole layers only (weight and bias; q, k and v; gate and up; all "
            f"experts); send these too: {missing}",
            param="names",
        )
