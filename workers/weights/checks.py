"""What parts of a weight update must fulfil on the worker's side, or the update ends."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from titopool.errors import DeadlinePassed, InvalidRequest, TitopoolError, WeightUpdateFailed
from workers.weights.liveness import answers


def checked_folder(folder: str, root: str, field: str = "path") -> str:
    """The real path of `folder`, the value of `field`, which must lie below `root`.

    Raises:
        InvalidRequest: it does not, or there is no root.
    """
    if not root:
        raise InvalidRequest(
            f"{field}: weights from a folder are refused, as the server has no weights_root; set it "
            "to the folder that yours are below",
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
    """Whether a folder and all that is in it lie below `top`."""
    try:
        # A link to a file elsewhere would be read like the others.
        return (
            path.is_relative_to(top)
            and path.is_dir()
            and all(file.resolve().is_relative_to(top) for file in path.iterdir())
        )
    except (OSError, RuntimeError):
        # A name that is too long for the file system, links in a circle, or no right to look.
        return False


def refuse_own_device(uuid: str, mine: list[str]) -> None:
    """Raises InvalidRequest if the trainer's GPU is one of a worker's."""
    if uuid and uuid in mine:
        raise InvalidRequest(
            f"client_device_uuid: expected a GPU that no worker uses, got {uuid}; NCCL cannot send "
            "from a GPU to itself: give trainer and server different ones",
            param="client_device_uuid",
        )


async def refuse_what_is_out_of_reach(host: str, port: int) -> None:
    """Raises InvalidRequest if the trainer, which listens before it asks, is not to be reached."""
    if not await answers(host, port):
        raise InvalidRequest(
            f"host, port: expected where a worker reaches the trainer, got {host}:{port}, where "
            "nothing answers it; tell an address of the trainer's machine that is known where the "
            "workers run (WeightsClient's host) and let their connections through",
            param="host",
        )


def refuse_keeping(policy: str) -> None:
    """Raises InvalidRequest for `keep` where the engine would lose what requests have."""
    if policy == "keep":
        raise InvalidRequest(
            "policy: expected drain or abort, as this version of vLLM loses the images of requests "
            "that it keeps",
            param="policy",
        )


def refuse_split_layers(missing: str) -> None:
    """Raises InvalidRequest if a layer would come in part only: vLLM fills the rest with anything."""
    if missing:
        raise InvalidRequest(
            "names: expected every layer whole (weight and bias; q, k and v; gate and up; all "
            f"experts); send these too: {missing}",
            param="names",
        )


class EndsOnError:
    """A part of an update that must go well within the deadline, or the update ends."""

    def __init__(
        self,
        end: Callable[[str], Awaitable[None]],
        what: str,
        timeout_s: float,
        but_for: type[TitopoolError] | None = None,
    ):
        """`end` ends the update for a reason, of which `what` is the beginning; not for errors of
        the type `but_for`."""
        self._but_for = but_for
        self._end = end
        self._what = what
        self._timeout_s = timeout_s
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            text = f"{self._what}: not within {self._timeout_s:g} s (weight_update_timeout_s)"
            await self._end(text)
            raise DeadlinePassed(text) from None
        if error is None or isinstance(error, asyncio.CancelledError):
            return
        if self._but_for is not None and isinstance(error, self._but_for):
            return
        detail = error.message if isinstance(error, TitopoolError) else repr(error)
        await self._end(f"{self._what}: {detail}")
        if not isinstance(error, TitopoolError):
            raise WeightUpdateFailed(f"{self._what}: {detail}") from error
