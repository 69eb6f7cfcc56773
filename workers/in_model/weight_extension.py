"""The methods for weight updates that titopool adds to vLLM's worker.

Runs in: vLLM's processes that hold the model, on the model's thread, between two steps. They are mixed
in by `workers/in_model/extension.py`. Every method returns `["ok", …]`, `["refused", text]`,
`["error", text]` or `["broken", text]` and raises nothing: if one of several processes raised, vLLM
would return the other processes' answers as the result of the next call.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import checksum
from workers.in_model.catalogue import Catalogue, Fit, catalogue_of, shorten
from workers.in_model.checkpoint_files import Refused, folder_tensors, weight_files
from workers.in_model.conversion import Conversions
from workers.in_model.copies import CopyPlan, keeps_checkpoints_layout, learn
from workers.in_model.coverage import Coverage, HalfLoaded, renew_sinks
from workers.in_model.dry_runs import DryRuns
from workers.in_model.group import GroupArgs
from workers.in_model.receiver import Receiver
from workers.in_model.reload import reload

logger = logging.getLogger(__name__)

Answer = list[Any]
# How long a receiver may take to leave its group.
LEAVE_TIMEOUT_S = 10.0
TENSORS = msgspec.msgpack.Decoder(list[TensorInfo])


class CannotLeave(Exception):
    """A receiver's thread does not end: only a new process can join a group."""


def answer(method: Callable[..., Any]) -> Callable[..., Answer]:
    """Converts the result or the exception of `method` to an answer."""

    @functools.wraps(method)
    def call(*args: Any) -> Answer:
        try:
            return ["ok", method(*args)]
        except Refused as error:
            return ["refused", str(error)]
        except CannotLeave as error:
            return ["broken", str(error)]
        except HalfLoaded as error:
            return ["error", str(error)]
        except Exception as error:
            logger.warning("%s failed", method.__name__, exc_info=True)
            return ["error", f"{type(error).__name__}: {error}"]

    return call


class WeightExtension:
    """Methods that `workers/engine/weights.py` calls through `collective_rpc`."""

    _titopool_receiver: Receiver | None = None
    # Receivers of sessions that have ended.
    _titopool_closed: Sequence[Receiver] = ()
    _titopool_catalogue: Catalogue | None = None
    _titopool_dry_runs: DryRuns | None = None
    _titopool_fit: Fit | None = None
    # What the current update's tensors write; None: unknown.
    _titopool_coverage: Coverage | None = None
    _titopool_folder: Path | None = None
    _titopool_plan: CopyPlan | None = None
    _titopool_is_plain: bool | None = None
    # The last list of tensors, whether it was partial, how it fits and what it writes.
    _titopool_checked: tuple[bytes, bool, Fit, Coverage | None] | None = None
    # Attributes of vLLM's worker.
    get_model: Any
    device: Any
    rank: int
    vllm_config: Any
    model_config: Any
    model_runner: Any

    @answer
    def titopool_weights_device(self) -> str:
        """The UUID of this process's GPU; "" on a CPU."""
        import torch

        if self.device.type != "cuda":
            return ""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    @answer
    def titopool_weights_join(self, args: dict[str, Any]) -> None:
        """Begins to join the group; `args` are `GroupArgs` with the rank of the worker's first process."""
        self._titopool_leave()
        if any(not one.has_ended(LEAVE_TIMEOUT_S) for one in self._titopool_closed):
            raise CannotLeave(
                f"a former group did not end within {LEAVE_TIMEOUT_S:g} s: NCCL waits for a process "
                "that has ended"
            )
        self._titopool_closed = ()
        given = msgspec.convert(args, GroupArgs)
        backend = given.backend
        if backend == "auto":
            backend = "nccl" if self.device.type == "cuda" else "gloo"
        own = msgspec.structs.replace(given, backend=backend, rank=given.rank + self.rank)
        try:
            self._titopool_receiver = Receiver(own, self.device)
        except OSError as error:
            raise Refused(f"cannot listen at {own.host}:{own.port}: {error}") from None

    @answer
    def titopool_weights_status(self) -> dict[str, Any] | None:
        """`Receiver.status`; None: no receiver."""
        receiver = self._titopool_receiver
        return None if receiver is None else receiver.status()

    @answer
    def titopool_weights_begin(
        self, tensors: bytes, is_partial: bool, bucket_bytes: int
    ) -> dict[str, Any]:
        """Checks names, shapes and dtypes; starts to receive, unless a layer is split.

        Args:
            tensors: MessagePack of a list of `TensorInfo`, here and below: vLLM takes 5 ms to
                send as many lists as a model has tensors.
        """
        infos, report = self._titopool_check(tensors, is_partial)
        if not report["split_layers"]:
            assert self._titopool_receiver is not None
            self._titopool_receiver.announce(infos, bucket_bytes, self._titopool_extra_bytes())
        return report

    @answer
    def titopool_weights_check(self, tensors: bytes, is_partial: bool) -> dict[str, Any]:
        """Checks names, shapes and dtypes, and remembers how they fit; receives nothing."""
        return self._titopool_check(tensors, is_partial)[1]

    @answer
    def titopool_weights_take(self, tensors: bytes, chunk_bytes: int = 0) -> None:
        """Checks tensors one by one and starts to receive them, where more may follow.

        Args:
            chunk_bytes: 0: each tensor has a broadcast of its own.
        """
        assert self._titopool_receiver is not None
        infos = TENSORS.decode(tensors)
        for info in infos:
            self._titopool_known().check(info)
        self._titopool_receiver.announce(infos, chunk_bytes or 1, self._titopool_extra_bytes())

    @answer
    def titopool_weights_digests(self) -> dict[str, str]:
        """vLLM's own digests of the parameters; the model must not change meanwhile."""
        compute = getattr(self, "compute_weight_checksums", None)
        if compute is None:
            raise Refused(
                "weight_checker: expected vLLM 0.31 or later, which has digests of parameters, got "
                "an earlier one; ask for the checksum of a commit"
            )
        return dict(compute())

    def _titopool_check(
        self, tensors: bytes, is_partial: bool
    ) -> tuple[list[TensorInfo], dict[str, Any]]:
        infos = TENSORS.decode(tensors)
        checked = self._titopool_checked
        if checked is None or checked[:2] != (tensors, is_partial):
            # A trainer sends the same list again and again.
            fit = self._titopool_known().fit(infos, is_partial=is_partial)
            coverage = None
            if not fit.split_layers:
                is_reload = not self._titopool_has_plain_layers()
                coverage = self._titopool_dry_run(
                    infos, fit, is_partial=is_partial, is_reload=is_reload
                )
            self._titopool_checked = checked = (tensors, is_partial, fit, coverage)
        *_, fit, self._titopool_coverage = checked
        self._titopool_fit, self._titopool_folder = fit, None
        report = {
            "missing": fit.missing,
            "ignored": fit.ignored,
            "kept": fit.kept,
            "split_layers": shorten(fit.split_layers),
        }
        return infos, report

    @answer
    def titopool_weights_check_folder(self, folder: str) -> dict[str, Any]:
        """Checks a folder's tensors, which `titopool_weights_apply` then loads."""
        tensors = folder_tensors(Path(folder))
        fit = self._titopool_known().fit(tensors, is_partial=False)
        self._titopool_coverage = self._titopool_dry_run(
            tensors, fit, is_partial=False, is_reload=True
        )
        self._titopool_fit, self._titopool_folder = fit, Path(folder)
        return {"ignored": fit.ignored, "num_tensors": len(tensors)}

    @answer
    def titopool_weights_checksum(self) -> str:
        """The checksum of all staged tensors, in the order in which they were announced."""
        assert self._titopool_receiver is not None
        return checksum(list(self._titopool_receiver.staged.values()))

    @answer
    def titopool_weights_apply(self) -> dict[str, Any]:
        """Loads the staged tensors, or the folder's, into the model.

        After an error the model has old and new weights: the process must end.
        """
        fit = self._titopool_fit
        assert fit is not None
        loaded: list[str] = []
        conversions = self._titopool_known().conversions
        tensors = _as_in_checkpoint(self._titopool_source(), fit, conversions, loaded)
        if self._titopool_folder is None and self._titopool_has_plain_layers():
            self._titopool_copy(dict(tensors))
        else:
            self._titopool_plan = None
            self._titopool_reload(tensors)
        self._titopool_forget()
        return {"loaded": len(loaded)}

    @answer
    def titopool_weights_drop(self, leaves: bool) -> None:
        """Drops the update; with `leaves` also leaves the group."""
        self._titopool_forget()
        if leaves:
            self._titopool_leave()

    def _titopool_source(self) -> Iterator[tuple[str, Any]]:
        if self._titopool_folder is None:
            assert self._titopool_receiver is not None
            yield from self._titopool_receiver.staged.items()
            return
        from safetensors import safe_open

        for file in weight_files(self._titopool_folder):
            with safe_open(file, framework="pt", device=str(self.device)) as opened:
                yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118

    def _titopool_has_plain_layers(self) -> bool:
        if self._titopool_is_plain is None:
            quantization = self.model_config.quantization
            self._titopool_is_plain = keeps_checkpoints_layout(self.get_model(), quantization)
        return self._titopool_is_plain

    def _titopool_extra_bytes(self) -> int:
        """GPU memory that a reload needs in addition: for a new layer and its converted tensors."""
        if self.device.type != "cuda" or self._titopool_has_plain_layers():
            return 0
        return 2 * self._titopool_known().largest_layer_bytes

    @contextmanager
    def _titopool_in_model(self) -> Iterator[None]:
        import torch
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            yield

    def _titopool_dry_run(
        self, tensors: Sequence[TensorInfo], fit: Fit, *, is_partial: bool, is_reload: bool
    ) -> Coverage | None:
        if self._titopool_dry_runs is None:
            self._titopool_dry_runs = DryRuns(
                self.get_model(),
                self._titopool_known(),
                is_quantized=self.model_config.quantization is not None,
            )
        with self._titopool_in_model():
            return self._titopool_dry_runs.check(
                tensors, fit, is_partial=is_partial, is_reload=is_reload
            )

    def _titopool_copy(self, tensors: dict[str, Any]) -> None:
        plan = self._titopool_plan
        with self._titopool_in_model():
            if plan is not None and plan.fits(tensors):
                plan.run(tensors)
            else:
                self._titopool_plan = learn(self.get_model(), tensors, self._titopool_coverage)
        _after_load(self)

    def _titopool_reload(self, tensors: Iterator[tuple[str, Any]]) -> None:
        with self._titopool_in_model():
            reload(
                self.get_model(), self.model_config, tensors, self._titopool_coverage,
                on_cpu=self.device.type == "cpu",
            )  # fmt: skip
        _after_load(self)

    def _titopool_known(self) -> Catalogue:
        if self._titopool_catalogue is None:
            self._titopool_catalogue = catalogue_of(self.get_model(), self.model_config)
        return self._titopool_catalogue

    def _titopool_forget(self) -> None:
        self._titopool_fit = self._titopool_coverage = self._titopool_folder = None
        if self._titopool_receiver is not None:
            self._titopool_receiver.drop()

    def _titopool_leave(self) -> None:
        receiver, self._titopool_receiver = self._titopool_receiver, None
        if receiver is not None:
            receiver.close()
            self._titopool_closed = [*self._titopool_closed, receiver]


def _as_in_checkpoint(
    tensors: Iterator[tuple[str, Any]],
    fit: Fit,
    conversions: Conversions | None,
    loaded: list[str],
) -> Iterator[tuple[str, Any]]:
    """`tensors` in the checkpoint's form, without the ignored ones; appends their names to `loaded`."""
    ignored = set(fit.ignored)
    # Parameters until the others of their conversion have come.
    waiting: dict[str, Any] = {}
    for name, tensor in tensors:
        if name in ignored:
            continue
        loaded.append(name)
        if conversion := fit.conversions.get(name):
            waiting[name] = tensor
            names = [one.name for one in conversion.parameters]
            if conversions is not None and all(one in waiting for one in names):
                yield from conversions.convert({one: waiting.pop(one) for one in names}).items()
            continue
        begin = 0
        for part, num_rows in fit.splits.get(name, ()):
            yield part, tensor[begin : begin + num_rows]
            begin += num_rows
        if name not in fit.splits:
            yield name, tensor


def _after_load(worker: Any) -> None:
    """Renews what vLLM derives from weights; waits until the GPU is done."""
    import torch

    renew_sinks(worker.get_model())
    reset = getattr(worker.model_runner, "reset_lora_state", None)
    if reset is not None:
        reset()
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)
