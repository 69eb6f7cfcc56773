"""The methods for weight updates that titopool adds to vLLM's worker.

Runs in: vLLM's processes that hold the model, on the model's thread, between two steps. They are mixed
in by `workers/in_model/extension.py`. Every method returns `["ok", …]`, `["refused", text]`,
`["error", text]` or `["broken", text]` and raises nothing: if one of several processes raised, vLLM
would return the other processes' answers as the result of the next call.
"""

import functools
import itertools
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import Chunk, checksum, plan_chunks
from workers.in_model.catalogue import Catalogue, Fit, catalogue_of, has_rows_of, shorten
from workers.in_model.checkpoint_files import Refused, folder_tensors, values_of, weight_files
from workers.in_model.conversion import Conversions
from workers.in_model.copies import CopyPlan, forms_of, learn, within_layers
from workers.in_model.coverage import Coverage, HalfLoaded, renew_sinks
from workers.in_model.dry_runs import DryRuns
from workers.in_model.peers.fetch import Fetch
from workers.in_model.peers.model_bytes import ModelBytes, opaque_weights
from workers.in_model.peers.offer import Offer
from workers.in_model.receiving.group import GroupArgs
from workers.in_model.receiving.receiver import Receiver
from workers.in_model.receiving.staging import InKvCache, InPlace, Staging, StagingRoom
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
    _titopool_room: StagingRoom | None = None
    # Of the current update.
    _titopool_stagings: Sequence[Staging] = ()
    # What `titopool_weights_receive` begins to receive.
    _titopool_planned: tuple[list[Chunk], Staging] | None = None
    # Number of tensors that `titopool_weights_load` has loaded; None: none yet.
    _titopool_num_loaded: int | None = None
    # The last list of tensors, whether it was partial, how it fits and what it writes.
    _titopool_checked: tuple[bytes, bool, Fit, Coverage | None] | None = None
    # This model's bytes for other workers, and another worker's for this model.
    _titopool_offer: Offer | None = None
    _titopool_fetch: Fetch | None = None
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
        for closed in self._titopool_closed:
            _check_has_ended(closed)
        self._titopool_closed = ()
        given = msgspec.convert(args, GroupArgs)
        backend = given.backend
        if backend == "auto":
            backend = "nccl" if self.device.type == "cuda" else "gloo"
        if given.nccl_id and backend != "nccl":
            raise Refused(
                "nccl_id: expected a worker with a GPU, got one without, which uses gloo; pass the "
                "host and port of the trainer's store"
            )
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
        self,
        tensors: bytes,
        is_partial: bool,
        chunk_bytes: int,
        setting: str,
        not_in_place: str,
    ) -> dict[str, Any]:
        """Checks names, shapes and dtypes, and plans where the tensors will wait.

        Args:
            tensors: MessagePack of a list of `TensorInfo`, here and below: vLLM takes 5 ms to
                send as many lists as a model has tensors.
            not_in_place: see `StagingRoom.choose`, here and below.

        Returns:
            How the tensors fit, and the `staging`. If that needs generation to stand, or a layer is
            split, `titopool_weights_receive` begins to receive; else this process receives already.
        """
        infos, report = self._titopool_check(tensors, is_partial)
        if not report["split_layers"]:
            report["staging"] = self._titopool_plan_to_receive(
                infos, chunk_bytes, setting, not_in_place
            )
        return report

    @answer
    def titopool_weights_receive(self) -> None:
        """Receives what was planned; generation stands until the caches are empty."""
        import torch

        if self._titopool_planned is not None:
            assert self._titopool_receiver is not None
            if self.device.type == "cuda":
                # The last step's kernels may still read the cache.
                torch.cuda.synchronize(self.device)
            self._titopool_receiver.announce(*self._titopool_planned)
            self._titopool_planned = None

    @answer
    def titopool_weights_load(self) -> None:
        """Loads the tensors of an update in place as they come; does nothing for other stagings.

        After an error the model has old and new weights: the process must end.
        """
        receiver, fit = self._titopool_receiver, self._titopool_fit
        in_place = [one for one in self._titopool_stagings if isinstance(one, InPlace)]
        if not in_place:
            return
        assert receiver is not None
        assert fit is not None
        self._titopool_end_offer()
        (staging,) = in_place
        chunks, loaded = staging.chunks(receiver.timeout_s), list[str]()
        plan, ignored = self._titopool_copies(), set(fit.ignored)
        if plan.fits(forms_of(one for one in staging.infos if one.name not in ignored)):
            with self._titopool_in_model():
                for chunk in chunks:
                    wanted = {name: one for name, one in chunk.items() if name not in ignored}
                    plan.run(wanted)
                    loaded += wanted
        else:
            tensors = itertools.chain.from_iterable(chunk.items() for chunk in chunks)
            self._titopool_reload(self._titopool_as_in_checkpoint(tensors, fit, loaded))
        self._titopool_num_loaded = len(loaded)

    @answer
    def titopool_weights_check(self, tensors: bytes, is_partial: bool) -> dict[str, Any]:
        """Checks names, shapes and dtypes, and remembers how they fit; receives nothing."""
        return self._titopool_check(tensors, is_partial)[1]

    @answer
    def titopool_weights_take(
        self, tensors: bytes, chunk_bytes: int, setting: str, not_in_place: str
    ) -> dict[str, Any]:
        """As `titopool_weights_begin`, tensor by tensor, where more may follow."""
        infos = TENSORS.decode(tensors)
        for info in infos:
            self._titopool_known().check(info)
        staging = self._titopool_plan_to_receive(infos, chunk_bytes, setting, not_in_place)
        return {"staging": staging}

    @answer
    def titopool_weights_set_aside(self) -> bool:
        """Moves received tensors out of the KV cache, so that generation can go on before the rest
        comes; returns whether there was room."""
        receiver, room = self._titopool_receiver, self._titopool_room
        assert receiver is not None
        assert room is not None
        if not room.fits_beside(sum(tensor.nbytes for tensor in receiver.staged.values())):
            return False
        receiver.staged = {name: tensor.clone() for name, tensor in receiver.staged.items()}
        self._titopool_release()
        return True

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

    def _titopool_plan_to_receive(
        self, infos: list[TensorInfo], chunk_bytes: int, setting: str, not_in_place: str
    ) -> str:
        assert self._titopool_receiver is not None
        chunks = plan_chunks(infos, chunk_bytes)
        if self._titopool_room is None:
            self._titopool_room = StagingRoom(setting, self.device, self._titopool_kv_caches())
        extra = self._titopool_extra_bytes(infos)
        heads = self._titopool_known().tied_heads([one.name for one in infos])
        for head in heads if not not_in_place else ():
            not_in_place = f"{head}, which must equal the embedding and may be left out,"
        staging = self._titopool_room.choose(chunks, extra, not_in_place)
        self._titopool_stagings = [*self._titopool_stagings, staging]
        if isinstance(staging, InKvCache | InPlace):
            self._titopool_planned = (chunks, staging)
        else:
            self._titopool_receiver.announce(chunks, staging)
        return staging.name

    def _titopool_kv_caches(self) -> Any:
        """vLLM's KV caches, which no other process reads or writes: options for that are refused."""
        return getattr(self.model_runner, "kv_caches", None) or None

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
                coverage = self._titopool_dry_run(infos, fit, is_partial=is_partial)
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
        self._titopool_coverage = self._titopool_dry_run(tensors, fit, is_partial=False)
        names = [one.name for one in tensors]
        self._titopool_known().check_heads(names, lambda some: values_of(Path(folder), some))
        self._titopool_fit, self._titopool_folder = fit, Path(folder)
        return {"ignored": fit.ignored, "num_tensors": len(tensors)}

    @answer
    def titopool_weights_compare_heads(self) -> None:
        """Refuses staged tensors of which a head that is tied has not the embedding's values."""
        assert self._titopool_receiver is not None
        staged, model = self._titopool_receiver.staged, self.get_model()
        self._titopool_known().check_heads(
            staged,
            lambda some: [staged[one] for one in some],
            lambda embedding, head: has_rows_of(model, embedding, head),
        )

    @answer
    def titopool_weights_checksum(self) -> str:
        """The checksum of all staged tensors, in the order in which they were announced."""
        assert self._titopool_receiver is not None
        return checksum(list(self._titopool_receiver.staged.values()))

    @answer
    def titopool_weights_apply(self, forgets_proofs: bool = False) -> dict[str, Any]:
        """Loads the staged tensors, or the folder's, into the model, unless these are there already.

        Args:
            forgets_proofs: the next update is proved to reach all of the model, too.

        After an error the model has old and new weights: the process must end.
        """
        fit = self._titopool_fit
        assert fit is not None
        self._titopool_end_offer()
        if self._titopool_num_loaded is not None:
            num_loaded = self._titopool_num_loaded
        elif self._titopool_folder is None:
            ignored = set(fit.ignored)
            assert self._titopool_receiver is not None
            staged = self._titopool_receiver.staged
            wanted = {name: one for name, one in staged.items() if name not in ignored}
            num_loaded = len(wanted)
            self._titopool_load(wanted, fit)
        else:
            loaded: list[str] = []
            source = _tensors_in_folder(self._titopool_folder, self.device)
            self._titopool_reload(self._titopool_as_in_checkpoint(source, fit, loaded))
            num_loaded = len(loaded)
        _after_load(self)
        if forgets_proofs:
            # Now, as the next update's begin asks how much memory loading takes.
            self._titopool_plan = None
            if self._titopool_coverage is not None:
                self._titopool_coverage.is_confirmed = False
        self._titopool_forget()
        return {"loaded": num_loaded}

    @answer
    def titopool_weights_drop(self, leaves: bool) -> None:
        """Drops the update; with `leaves` also leaves the group."""
        self._titopool_forget()
        if leaves:
            self._titopool_leave()

    @answer
    def titopool_weights_offer(self, address: str, port: int, idle_s: float) -> dict[str, Any]:
        """Gives this process's part of the model to other workers, until it changes.

        Args:
            address, port: where to listen; the processes have ports in a row, 0 is any free one.
            idle_s: ends after this time without a reader.

        Returns:
            What a reader needs; `host` tells whether all processes are on one host.
        """
        if self.vllm_config.parallel_config.enable_eplb:
            raise Refused("vLLM moves its experts between processes (--enable-eplb)")
        if opaque := opaque_weights(self.get_model(), on_cpu=self.device.type == "cpu"):
            raise Refused(
                f"vLLM has packed {len(opaque)} of its layers into memory that cannot be copied, as it "
                f"does on a CPU; the first is {opaque[0]}"
            )
        offer = self._titopool_offer
        if offer is None or not offer.renew():
            self._titopool_end_offer()
            own_port = port + self.rank if port else 0
            try:
                self._titopool_offer = offer = Offer(
                    ModelBytes(self.get_model()), self.device,
                    address=address, port=own_port, idle_s=idle_s,
                )  # fmt: skip
            except OSError as error:
                raise Refused(str(error)) from None
        return {"port": offer.port, "key": offer.key, "host": socket.gethostname()}

    @answer
    def titopool_weights_compare(self, peers: list[tuple[str, str]], timeout_s: float) -> None:
        """Connects to another worker's process of the same rank, and compares the models.

        Args:
            peers: (address, key) of each rank.
        """
        if opaque := opaque_weights(self.get_model(), on_cpu=self.device.type == "cpu"):
            raise Refused(f"this worker has packed weights, such as {opaque[0]}")
        if len(peers) <= self.rank:
            raise Refused(f"expected a peer of rank {self.rank}, got {len(peers)} peers")
        self._titopool_end_fetch()
        self._titopool_fetch = Fetch(*peers[self.rank])
        self._titopool_fetch.compare(ModelBytes(self.get_model()), timeout_s)

    @answer
    def titopool_weights_fetch(self, timeout_s: float) -> dict[str, Any]:
        """Overwrites the model with the other worker's.

        After an error the model is in an unknown state; another fetch can complete it.
        """
        assert self._titopool_fetch is not None
        self._titopool_end_offer()
        try:
            with self._titopool_in_model():
                result = self._titopool_fetch.fetch(ModelBytes(self.get_model()), timeout_s)
        finally:
            self._titopool_end_fetch()
        _after_load(self)
        return result

    def _titopool_end_offer(self) -> None:
        """Before the model changes: readers learn that it does."""
        offer, self._titopool_offer = self._titopool_offer, None
        if offer is not None:
            offer.end()

    def _titopool_end_fetch(self) -> None:
        fetch, self._titopool_fetch = self._titopool_fetch, None
        if fetch is not None:
            fetch.close()

    def _titopool_load(self, tensors: dict[str, Any], fit: Fit) -> None:
        """Loads staged tensors by learned copies; where there are none, by vLLM's reload."""
        import torch

        plan = self._titopool_copies()
        if plan.fits_tensors(tensors):
            with self._titopool_in_model():
                plan.run(tensors)
            return

        def in_checkpoint() -> Iterator[tuple[str, Any]]:
            return self._titopool_as_in_checkpoint(tensors.items(), fit, [])

        # On a CPU, vLLM packs weights into memory that cannot be compared.
        is_quantized = self.model_config.quantization is not None
        if self.device.type == "cpu" or is_quantized or not plan.may_learn(tensors):
            self._titopool_reload(in_checkpoint())
            return
        touched = self._titopool_coverage and self._titopool_coverage.touched
        with self._titopool_in_model():
            learn(
                plan, self.get_model(), tensors,
                load=lambda: self.get_model().load_weights(in_checkpoint()),
                reload=lambda: self._titopool_reload(in_checkpoint()),
                scope=within_layers(touched) if fit.missing and touched else lambda path: True,
            )  # fmt: skip
        # Learning takes memory for a layer or two. Later updates take none.
        torch.cuda.empty_cache()

    def _titopool_as_in_checkpoint(
        self, tensors: Iterable[tuple[str, Any]], fit: Fit, loaded: list[str]
    ) -> Iterator[tuple[str, Any]]:
        return _as_in_checkpoint(tensors, fit, self._titopool_known().conversions, loaded)

    def _titopool_copies(self) -> CopyPlan:
        if self._titopool_plan is None:
            self._titopool_plan = CopyPlan()
        return self._titopool_plan

    def _titopool_extra_bytes(self, infos: Sequence[TensorInfo]) -> int:
        """GPU memory that a reload needs in addition: for a new layer and its converted tensors."""
        if self.device.type != "cuda" or self._titopool_copies().fits(forms_of(infos)):
            return 0
        return 2 * self._titopool_known().largest_layer_bytes

    @contextmanager
    def _titopool_in_model(self) -> Iterator[None]:
        import torch
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            yield

    def _titopool_dry_run(
        self, tensors: Sequence[TensorInfo], fit: Fit, *, is_partial: bool
    ) -> Coverage | None:
        if self._titopool_dry_runs is None:
            self._titopool_dry_runs = DryRuns(
                self.get_model(),
                self._titopool_known(),
                is_quantized=self.model_config.quantization is not None,
            )
        with self._titopool_in_model():
            return self._titopool_dry_runs.check(
                tensors, fit, is_partial=is_partial, is_reload=True
            )

    def _titopool_reload(self, tensors: Iterator[tuple[str, Any]]) -> None:
        with self._titopool_in_model():
            reload(
                self.get_model(), self.model_config, tensors, self._titopool_coverage,
                on_cpu=self.device.type == "cpu",
            )  # fmt: skip

    def _titopool_known(self) -> Catalogue:
        if self._titopool_catalogue is None:
            self._titopool_catalogue = catalogue_of(self.get_model(), self.model_config)
        return self._titopool_catalogue

    def _titopool_forget(self) -> None:
        self._titopool_fit = self._titopool_coverage = self._titopool_folder = None
        self._titopool_num_loaded = None
        self._titopool_end_fetch()
        receiver = self._titopool_receiver
        if receiver is not None and not receiver.is_idle:
            # Nothing may be written to the KV cache after this.
            receiver.close()
            if any(isinstance(one, InKvCache) for one in self._titopool_stagings):
                _check_has_ended(receiver)
        self._titopool_release()
        if receiver is not None:
            receiver.drop()

    def _titopool_release(self) -> None:
        for staging in self._titopool_stagings:
            staging.release()
        self._titopool_stagings, self._titopool_planned = (), None

    def _titopool_leave(self) -> None:
        receiver, self._titopool_receiver = self._titopool_receiver, None
        if receiver is not None:
            receiver.close()
            self._titopool_closed = [*self._titopool_closed, receiver]


def _check_has_ended(receiver: Receiver) -> None:
    if not receiver.has_ended(LEAVE_TIMEOUT_S):
        raise CannotLeave(
            f"a former group did not end within {LEAVE_TIMEOUT_S:g} s: NCCL waits for a process that "
            "has ended"
        )


def _tensors_in_folder(folder: Path, device: Any) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in weight_files(folder):
        with safe_open(file, framework="pt", device=str(device)) as opened:
            yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118


def _as_in_checkpoint(
    tensors: Iterable[tuple[str, Any]],
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
