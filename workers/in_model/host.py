"""What a worker asks of each of vLLM's processes for weight updates.

Runs in: vLLM's processes that hold the model, on the model's thread, between two steps.
`workers/engine/weights.py` calls the public methods of `Host` by name.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from titopool.wire.commands import TensorInfo
from titopool.wire.pool_state import CacheMode
from titopool.wire.weight_plan import checksum, plan_chunks
from workers.in_model.checkpoint_files import Refused
from workers.in_model.load.loader import Loader
from workers.in_model.peers.exchange import Exchange
from workers.in_model.proof.catalogue import shorten
from workers.in_model.proof.coverage import HalfLoaded
from workers.in_model.proof.proof import TENSORS, Proof
from workers.in_model.receiving.arrivals import Arrivals, CannotLeave
from workers.in_model.receiving.group import GroupArgs
from workers.in_model.served_model import ServedModel

logger = logging.getLogger(__name__)

Answer = list[Any]


class Host:
    """The weights of one process's model, and the update that is about to change them."""

    def __init__(self, model: ServedModel):
        self._model = model
        self._proof = Proof(model)
        self._loader = Loader(model, self._proof)
        self._arrivals = arrivals = Arrivals(model)
        self._exchange = exchange = Exchange(model)
        # What is asked of one part alone.
        self.device, self.digests = model.uuid, model.digests
        self.status, self.receive, self.set_aside = (
            arrivals.status, arrivals.receive, arrivals.set_aside
        )  # fmt: skip
        self.offer, self.compare = exchange.offer, exchange.compare
        # The folder that `apply` loads; None: what has come from the group.
        self._folder: Path | None = None
        # Number of tensors that `load` has loaded; None: none yet.
        self._num_loaded: int | None = None

    def join(self, args: dict[str, Any]) -> None:
        """Begins to join the group; `args` are `GroupArgs` with the rank of the worker's first process."""
        given = msgspec.convert(args, GroupArgs)
        self._arrivals.join(msgspec.structs.replace(given, rank=given.rank + self._model.rank))

    def begin(
        self,
        tensors: bytes,
        is_partial: bool,
        chunk_bytes: int,
        setting: str,
        not_in_place: str,
        cache: CacheMode,
    ) -> dict[str, Any]:
        """Checks names, shapes and dtypes, and plans where the tensors will wait.

        Args:
            tensors: MessagePack of a list of `TensorInfo`, here and below: vLLM takes 5 ms to
                send as many lists as a model has tensors.
            not_in_place, cache: see `StagingRoom.choose`, here and below.

        Returns:
            How the tensors fit, and the `staging`. If that needs generation to stand, or a layer is
            split, `receive` begins to receive; else this process receives already.
        """
        infos, report = self._checked(tensors, is_partial)
        if not report["split_layers"]:
            report["staging"] = self._plan(infos, chunk_bytes, setting, not_in_place, cache, 0)
        return report

    def check(self, tensors: bytes, is_partial: bool) -> dict[str, Any]:
        """Checks names, shapes and dtypes, and remembers how they fit; receives nothing."""
        return self._checked(tensors, is_partial)[1]

    def _checked(self, tensors: bytes, is_partial: bool) -> tuple[list[TensorInfo], dict[str, Any]]:
        infos = self._proof.check(tensors, is_partial=is_partial)
        fit, self._folder = self._proof.fit, None
        report = {
            "missing": fit.missing,
            "ignored": fit.ignored,
            "kept": fit.kept,
            "split_layers": shorten(fit.split_layers),
        }
        return infos, report

    def take(
        self, tensors: bytes, chunk_bytes: int, setting: str, not_in_place: str, cache: CacheMode
    ) -> dict[str, Any]:
        """As `begin`, tensor by tensor, where more may follow."""
        infos = TENSORS.decode(tensors)
        for info in infos:
            self._proof.catalogue.check(info)
        whole = self._proof.catalogue.num_bytes
        return {"staging": self._plan(infos, chunk_bytes, setting, not_in_place, cache, whole)}

    def _plan(
        self,
        infos: list[TensorInfo],
        chunk_bytes: int,
        setting: str,
        not_in_place: str,
        cache: CacheMode,
        whole_bytes: int,
    ) -> str:
        heads = self._proof.catalogue.tied_heads([one.name for one in infos])
        for head in heads if not not_in_place else ():
            not_in_place = f"{head}, which must equal the embedding and may be left out,"
        chunks, extra = plan_chunks(infos, chunk_bytes), self._loader.extra_bytes(infos)
        return self._arrivals.plan(chunks, setting, extra, not_in_place, cache, whole_bytes).name

    def load(self) -> None:
        """Loads the tensors of an update in place as they come; does nothing for other stagings.

        After an error the model has old and new weights: the process must end.
        """
        staging = self._arrivals.in_place
        if staging is not None:
            self._exchange.end_offer()
            chunks = staging.chunks(self._arrivals.receiver.timeout_s)
            self._num_loaded = self._loader.load_in_place(staging.infos, chunks)

    def compare_heads(self) -> None:
        """Refuses staged tensors of which a head that is tied has not the embedding's values."""
        self._proof.compare_heads(self._arrivals.staged)

    def checksum(self) -> str:
        """The checksum of all staged tensors, in the order in which they were announced."""
        return checksum(list(self._arrivals.staged.values()))

    def check_folder(self, folder: str) -> dict[str, Any]:
        """Checks a folder's tensors, which `apply` then loads."""
        tensors = self._proof.check_folder(Path(folder))
        self._folder = Path(folder)
        return {"ignored": self._proof.fit.ignored, "num_tensors": len(tensors)}

    def apply(self, forgets_proofs: bool = False) -> dict[str, Any]:
        """Loads the staged tensors, or the folder's, into the model, unless these are there already.

        Args:
            forgets_proofs: the next update is proved to reach all of the model, too.

        After an error the model has old and new weights: the process must end.
        """
        self._exchange.end_offer()
        if self._num_loaded is not None:
            num_loaded = self._num_loaded
        elif self._folder is not None:
            num_loaded = self._loader.load_folder(self._folder)
        else:
            num_loaded = self._loader.load(self._arrivals.staged)
        self._model.renew_derived()
        if forgets_proofs:
            # Now, as the next update's begin asks how much memory loading takes.
            self._loader.forget_copies()
            self._proof.demand()
        self._forget()
        return {"loaded": num_loaded}

    def drop(self, leaves: bool) -> None:
        """Drops the update; with `leaves` also leaves the group."""
        self._forget()
        if leaves:
            self._arrivals.leave()

    def _forget(self) -> None:
        self._folder = self._num_loaded = None
        self._proof.forget()
        self._exchange.end_fetch()
        self._arrivals.drop()

    def fetch(self, timeout_s: float) -> dict[str, Any]:
        """As `Exchange.fetch`."""
        result = self._exchange.fetch(timeout_s)
        self._model.renew_derived()
        return result


def answer_of(name: str, call: Callable[[], Any]) -> Answer:
    """The result of the method `name`, or its error: `["ok", …]`, `["refused", text]`,
    `["error", text]` or `["broken", text]`.

    It raises nothing: if one of several processes raised, vLLM would return the other processes'
    answers as the result of the next call.
    """
    try:
        return ["ok", call()]
    except Refused as error:
        return ["refused", str(error)]
    except CannotLeave as error:
        return ["broken", str(error)]
    except HalfLoaded as error:
        return ["error", str(error)]
    except Exception as error:
        logger.warning("%s failed", name, exc_info=True)
        return ["error", f"{type(error).__name__}: {error}"]
