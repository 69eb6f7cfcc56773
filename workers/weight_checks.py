"""What parts of a weight update must fulfil on the worker's side, or the update ends."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from titopool.errors import DeadlinePassed, InvalidRequest, TitopoolError, WeightUpdateFailed


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
    path = Path(os.path.realpath(folder))
    if not path.is_relative_to(os.path.realpath(root)) or not path.is_dir():
        raise InvalidRequest(
            f"{field}: expected a folder below weights_root ({root}), got {folder!r}", param=field
        )
    return str(path)


def refuse_own_device(uuid: str, mine: list[str]) -> None:
    """Raises InvalidRequest if the trainer's GPU is one of a worker's."""
    if uuid and uuid in mine:
        raise InvalidRequest(
            f"client_device_uuid: expected a GPU that no worker uses, got {uuid}; NCCL cannot send "
            "from a GPU to itself: give trainer and server different ones",
            param="client_device_uuid",
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

    def __init__(self, end: Callable[[str], Awaitable[None]], what: str, timeout_s: float):
        """`end` ends the update for a reason, of which `what` is the beginning."""
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
        detail = error.message if isinstance(error, TitopoolError) else repr(error)
        await self._end(f"{self._what}: {detail}")
        if not isinstance(error, TitopoolError):
            raise WeightUpdateFailed(f"{self._what}: {detail}") from error
