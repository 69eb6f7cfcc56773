"""Which tensors a model takes, by the names of its checkpoint, and what of them is one layer.

Runs in: vLLM's process that holds the model. What can be known before anything changes is refused
here: a name that does not exist, a shape that does not fit, a tensor that is missing, a layer of
which only a part would come.
"""

import difflib
import functools
import json
import re
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import DTYPE_BYTES, num_bytes_of
from workers.in_model.conversion import Conversion, Conversions

SAFETENSORS_DTYPES = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8",
    "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool",
}  # fmt: skip
# One of these may come where the checkpoint has another.
FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})
# In checkpoints now and then; vLLM skips them.
NEVER_LOADED = (
    "rotary_emb.inv_freq", "rotary_emb.original_inv_freq", "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)  # fmt: skip
# Of layers that predict further tokens; vLLM loads them for speculative decoding only.
FURTHER_TOKENS = re.compile(r"^((?:model\.)?(?:mtp|mtp_layers))\.")
LAYER = re.compile(r"^((?:.*\.)?layers)\.\d+(?=\.)")
# Buffers, so named_parameters() has none of them; vLLM leaves what it has when none comes.
NEVER_TRAINED = ("e_score_correction_bias",)
EXPERTS = re.compile(r"^(.*\.experts)\.\d+\.")


class Refused(Exception):
    """The tensors do not fit the model; the message says which, and how."""


@dataclass
class Fit:
    """How a list of tensors fits the model."""

    # For each tensor that is one of vLLM's fused parameters: the names and rows of its parts.
    splits: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    # Buffers that did not come; the model keeps those that it has.
    kept: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    # Tensors without which a layer that others belong to is not whole.
    split_layers: list[str] = field(default_factory=list)
    # For each parameter that a checkpoint has otherwise.
    conversions: dict[str, Conversion] = field(default_factory=dict)


def read_header(file: Path) -> list[tuple[TensorInfo, int]]:
    """The tensors of a safetensors file, each with where its bytes end in the file.

    Raises:
        Refused: it is no such file, or shorter than its header says.
    """
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > 100 * 2**20:
                raise ValueError("its header is too long")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        tensors = [
            (
                TensorInfo(name, SAFETENSORS_DTYPES[entry["dtype"]], entry["shape"]),
                8 + length + entry["data_offsets"][1],
            )
            for name, entry in header.items()
        ]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise Refused(f"{file.name} is no safetensors file: {error!r}") from None
    end = max((end for _, end in tensors), default=0)
    if file.stat().st_size < end:
        raise Refused(f"{file.name} should have {end} bytes and has {file.stat().st_size}")
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint in `folder`: those that its index names, or all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(f"{index.name} is no index of safetensors files: {error!r}") from None
        if odd := [name for name in names if Path(str(name)).name != name]:
            raise Refused(f"{index.name}: expected files of its own folder, got {odd[0]!r}")
        return sorted(folder / name for name in names)
    skipped = ("consolidated", "adapter", "training")
    return sorted(
        file for file in folder.glob("*.safetensors") if not file.stem.startswith(skipped)
    )


class Catalogue:
    """The tensors of one model."""

    def __init__(
        self,
        tensors: Iterable[TensorInfo],
        *,
        rename: Any = None,
        packed: Mapping[str, Sequence[str]] | None = None,
        is_tied: bool = False,
        conversions: Conversions | None = None,
        blocks: Collection[str] = (),
        modules: Collection[str] = (),
    ):
        """`rename` maps a checkpoint's name to the model's own (None: dropped); `packed` has
        vLLM's fused layers with the names of their parts; `is_tied`: the head is the embedding;
        `conversions`: of the parameters of transformers' module, which may come instead; `blocks`:
        vLLM's modules all of whose weights are one layer; `modules`: the paths of all."""
        self.conversions = conversions
        self._blocks = frozenset(blocks)
        self._modules = frozenset(modules)
        self._rename = rename or (lambda name: name)
        self._packed = {name: list(parts) for name, parts in (packed or {}).items()}
        self._is_tied = is_tied
        self._tensors: dict[str, TensorInfo] = {}
        # Of the checkpoint's tensors, those that vLLM leaves out.
        self._left_out: set[str] = set()
        for tensor in tensors:
            key = self._rename(tensor.name)
            if self._is_ignored(tensor.name) or self._is_of_further_tokens(key):
                self._left_out.add(tensor.name)
            else:
                self._tensors[key] = tensor
        self._layers = defaultdict(list)
        for key in self._tensors:
            self._layers[self._layer_of(key)].append(key)

    def _is_ignored(self, name: str) -> bool:
        is_head = name.startswith("lm_head.") or name.endswith(".lm_head.weight")
        return (
            (self._is_tied and is_head)
            or any(part in name for part in NEVER_LOADED)
            or self._rename(name) is None
        )

    def _is_of_further_tokens(self, key: str) -> bool:
        if found := FURTHER_TOKENS.match(key):
            return found[1] not in self._modules
        # A layer beyond those that the model has of this kind.
        found = LAYER.match(key)
        return found is not None and found[1] in self._modules and found[0] not in self._modules

    @property
    def tensors(self) -> list[TensorInfo]:
        """All that the model takes, as a checkpoint has them."""
        return list(self._tensors.values())

    @functools.cached_property
    def largest_layer_bytes(self) -> int:
        """Bytes of the layer that has most, as it lies in a checkpoint."""
        sizes = (
            sum(num_bytes_of(self._tensors[key]) for key in keys) for keys in self._layers.values()
        )
        return max(sizes, default=0)

    def _layer_of(self, key: str) -> str:
        """What vLLM holds in one module: q, k and v, or all experts; weight and bias."""
        parts = key.split(".")
        for length in range(1, len(parts) if self._blocks else 0):
            if (block := ".".join(parts[:length])) in self._blocks:
                return block
        if found := EXPERTS.match(key):
            return found[1]
        path, _, _ = key.rpartition(".")
        above, _, last = path.rpartition(".")
        for fused, parts in self._packed.items():
            if last in parts:
                return f"{above}.{fused}"
        return path

    def fit(self, tensors: Sequence[TensorInfo], *, is_partial: bool) -> Fit:
        """How `tensors` fit; what is missing is no error yet if `is_partial`.

        Raises:
            Refused: as `check`; or something is missing.
        """
        fit = Fit()
        seen = self._place(tensors, fit)
        absent = [key for key in self._tensors if key not in seen]
        fit.kept = [self._tensors[key].name for key in absent if key.endswith(NEVER_TRAINED)]
        rest = {key for key in absent if not key.endswith(NEVER_TRAINED)}
        fit.missing = [info.name for key, info in self._tensors.items() if key in rest]
        if fit.missing and not is_partial:
            raise Refused(
                f"expected all {len(self._tensors)} tensors of the model, {len(fit.missing)} are "
                f"missing: {shorten(fit.missing)}; send them too, or declare the update partial"
            )
        for layer in {self._layer_of(key) for key in seen}:
            fit.split_layers.extend(
                self._tensors[key].name for key in self._layers[layer] if key in rest
            )
        return fit

    def check(self, tensor: TensorInfo) -> None:
        """Checks one tensor, whatever comes besides.

        Raises:
            Refused: an unknown or repeated name, another shape or dtype.
        """
        self._place([tensor], Fit())

    def _place(self, tensors: Sequence[TensorInfo], fit: Fit) -> set[str]:
        """The places of `tensors`; `fit` is told which are ignored, split or converted."""
        names, places = set[str](), list[str]()
        for tensor in tensors:
            if tensor.name in names:
                raise Refused(f"{tensor.name}: expected each name once, got it twice")
            names.add(tensor.name)
            if tensor.dtype not in DTYPE_BYTES:
                raise Refused(
                    f"{tensor.name}: expected one of the dtypes {', '.join(DTYPE_BYTES)}, "
                    f"got {tensor.dtype!r}"
                )
            if not self._tensors:
                # Nothing is known of this model: loading tells.
                continue
            if tensor.name in self._left_out or self._is_ignored(tensor.name):
                fit.ignored.append(tensor.name)
                continue
            places += self._places_of(tensor, fit)
        places += self._converted(fit)
        seen = set(places)
        if len(seen) < len(places):
            twice = next(key for key in seen if places.count(key) > 1)
            raise Refused(
                f"{self._tensors[twice].name}: expected it once, got it twice: by itself and within "
                "a fused tensor"
            )
        return seen

    def _places_of(self, tensor: TensorInfo, fit: Fit) -> list[str]:
        key = self._rename(tensor.name)
        known = self._tensors.get(key)
        if self._is_converted(tensor, known, fit):
            return []
        if known is not None:
            self._check(tensor, known.shape, known.dtype)
            return [key]
        path, _, leaf = key.rpartition(".")
        above, _, last = path.rpartition(".")
        parts = [f"{above}.{part}.{leaf}" for part in self._packed.get(last, ())]
        if not parts or any(part not in self._tensors for part in parts):
            raise self._unknown(tensor.name)
        infos = [self._tensors[part] for part in parts]
        rows = sum(info.shape[0] for info in infos)
        self._check(tensor, [rows, *infos[0].shape[1:]], infos[0].dtype)
        fit.splits[tensor.name] = [(info.name, info.shape[0]) for info in infos]
        return parts

    def _is_converted(self, tensor: TensorInfo, known: TensorInfo | None, fit: Fit) -> bool:
        """Whether `tensor` is a module's parameter that a checkpoint, with `known`, has otherwise."""
        conversion = self.conversions.of(tensor.name) if self.conversions else None
        if conversion is None:
            return False
        (own,) = (one for one in conversion.parameters if one.name == tensor.name)
        if known is not None and (conversion.renames or tensor.shape != own.shape):
            # It comes as a checkpoint has it, or vLLM knows this name as well.
            return False
        for made in conversion.tensors:
            place = self._tensors.get(self._rename(made.name))
            if place is None or place.shape != made.shape:
                return False
            self._check(tensor, own.shape, place.dtype)
        fit.conversions[tensor.name] = conversion
        return True

    def _converted(self, fit: Fit) -> list[str]:
        """The places of what is converted; tells of parameters that others cannot be without."""
        places = []
        for conversion in dict.fromkeys(fit.conversions.values()):
            names = [one.name for one in conversion.parameters]
            if absent := [name for name in names if name not in fit.conversions]:
                fit.split_layers.extend(absent)
            else:
                places += [self._rename(made.name) for made in conversion.tensors]
        return places

    def _check(self, tensor: TensorInfo, shape: list[int], dtype: str) -> None:
        if tensor.shape != shape:
            raise Refused(f"{tensor.name}: expected shape {shape}, got {tensor.shape}")
        if tensor.dtype != dtype and not {tensor.dtype, dtype} <= FLOATS:
            raise Refused(f"{tensor.name}: expected dtype {dtype}, got {tensor.dtype}")

    def _unknown(self, name: str) -> Refused:
        known = [info.name for info in self._tensors.values()]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return Refused(f"{name}: the model has no such tensor{hint}")


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """The first of `names`, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def catalogue_of(model: Any, model_config: Any) -> Catalogue:
    """The catalogue of vLLM's `model`: from its checkpoint's headers, else from its config."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = None
    if mapper is not None:
        import dataclasses

        # Where vLLM fuses layers while it renames, that part is left out: parts have names here.
        plain = dataclasses.replace(mapper, orig_to_new_stacked={})
        rename = plain._map_name
    # vLLM makes the head by the language model's own setting.
    is_tied = bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
    conversions = Conversions(model_config.hf_config)
    return Catalogue(
        _from_files(model_config) or conversions.checkpoint(),
        rename=rename,
        packed=getattr(model, "packed_modules_mapping", None),
        is_tied=is_tied,
        conversions=conversions,
        blocks=_blocks_of_experts(model),
        modules=[path for path, _ in model.named_modules()],
    )


def _blocks_of_experts(model: Any) -> set[str]:
    """The modules that have experts: by what names these come, differs from model to model."""
    blocks = set()
    for path, module in model.named_modules():
        if any(name.startswith(("w13_", "w2_")) for name in module._parameters):
            blocks.add(path.removesuffix(".routed_experts").rpartition(".")[0])
    return blocks


def _from_files(model_config: Any) -> list[TensorInfo]:
    folder = Path(model_config.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            found = snapshot_download(
                model_config.model,
                revision=model_config.revision,
                local_files_only=True,
                allow_patterns=["*.safetensors", "*.json"],
            )
        except Exception:
            return []
        folder = Path(found)
    try:
        return [tensor for file in weight_files(folder) for tensor, _ in read_header(file)]
    except (Refused, OSError, ValueError):
        return []


def folder_tensors(folder: Path) -> list[TensorInfo]:
    """What a folder of safetensors holds.

    Raises:
        Refused: it holds none, or a file is broken.
    """
    files = weight_files(folder)
    if not files:
        raise Refused(f"expected safetensors files in {folder}, found none")
    tensors = [tensor for file in files for tensor, _ in read_header(file)]
    if not any(num_bytes_of(tensor) for tensor in tensors):
        raise Refused(f"the safetensors files in {folder} are empty")
    return tensors
