"""The tensors that a model takes, by its checkpoint's names, and which of them make up one layer.

Runs in: vLLM's processes that hold the model. The catalogue refuses, before anything changes, a name
that does not exist, a shape that does not fit, a missing tensor, and a layer of which only a part
comes.
"""

import difflib
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import DTYPE_BYTES, is_same, num_bytes_of
from workers.in_model.checkpoint_files import Refused, folder_tensors, indexed_files
from workers.in_model.proof.conversion import Conversion, Conversions

# A tensor may come in one of these dtypes where the checkpoint has another of them.
FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})
# Some checkpoints have these tensors; vLLM skips them.
NEVER_LOADED = (
    "rotary_emb.inv_freq", "rotary_emb.original_inv_freq", "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)  # fmt: skip
# Layers for multi-token prediction, which vLLM loads for speculative decoding only.
MULTI_TOKEN = re.compile(r"^((?:model\.)?(?:mtp|mtp_layers))\.")
LAYER = re.compile(r"^((?:.*\.)?layers)\.\d+(?=\.)")
# Buffers, which named_parameters() does not list; vLLM keeps its values when they are not sent.
NEVER_TRAINED = ("e_score_correction_bias",)
EXPERTS = re.compile(r"^(.*\.experts)\.\d+\.")


@dataclass
class Fit:
    """How a list of tensors fits the model."""

    # For each tensor that is one of vLLM's fused parameters: the names and rows of its parts.
    splits: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    # Missing buffers, whose values the model keeps.
    kept: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    # Missing tensors of layers of which other tensors came.
    split_layers: list[str] = field(default_factory=list)
    # For each parameter of transformers' module that a checkpoint stores in another form.
    conversions: dict[str, Conversion] = field(default_factory=dict)


class Catalogue:
    """The tensors of one model.

    Names within are vLLM's names of the checkpoint's tensors (`rename`), before layers are fused.
    """

    def __init__(
        self,
        tensors: Iterable[TensorInfo],
        *,
        rename: Any = None,
        packed: Mapping[str, Sequence[str]] | None = None,
        embedding: str = "",
        conversions: Conversions | None = None,
        blocks: Collection[str] = (),
        modules: Collection[str] = (),
    ):
        """
        Args:
            tensors: the checkpoint's; none: nothing is known, and only the loaders check.
            rename: maps a checkpoint's name to the model's (None: vLLM drops the tensor).
            packed: vLLM's fused layers with the names of their parts.
            embedding: vLLM's name of the embedding's weights, if they are the head's too; "": they
                are not.
            conversions: of the parameters of transformers' module, which may come instead.
            blocks: paths of vLLM's modules all of whose weights are one layer.
            modules: paths of all of vLLM's modules.
        """
        self.conversions = conversions
        self._blocks = frozenset(blocks)
        self._modules = frozenset(modules)
        self._rename = rename or (lambda name: name)
        self._packed = {name: list(parts) for name, parts in (packed or {}).items()}
        self._embedding = embedding
        self._tensors: dict[str, TensorInfo] = {}
        # Names of the checkpoint's tensors that vLLM does not load.
        self._not_loaded: set[str] = set()
        for tensor in tensors:
            key = self._rename(tensor.name)
            if self._is_ignored(tensor.name) or self._is_multi_token(key):
                self._not_loaded.add(tensor.name)
            else:
                self._tensors[key] = tensor
        self._layers = defaultdict(list)
        for key in self._tensors:
            self._layers[self._layer_of(key)].append(key)

    def _is_ignored(self, name: str) -> bool:
        return (
            self._is_tied_head(name)
            or any(part in name for part in NEVER_LOADED)
            or self._rename(name) is None
        )

    def _is_tied_head(self, name: str) -> bool:
        is_head = name.startswith("lm_head.") or name.endswith(".lm_head.weight")
        return bool(self._embedding) and is_head

    def tied_heads(self, names: Collection[str]) -> dict[str, str]:
        """The heads in `names` that the model does not load, each with the embedding that it shares.

        That is "" where `names` have no embedding.
        """
        heads = [one for one in names if self._is_tied_head(one) and one.endswith(".weight")]
        if not heads:
            return {}
        last = ".".join(self._embedding.rsplit(".", 2)[-2:])
        # A checkpoint may lack the prefix that vLLM gives its names.
        found = [one for one in names if f".{one}".endswith(f".{last}")]
        exact = [one for one in names if self._rename(one) == self._embedding]
        return dict.fromkeys(heads, next(iter(exact + found), ""))

    def check_heads(
        self,
        names: Collection[str],
        values_of: Callable[[Sequence[str]], Sequence[Any]],
        is_served: Callable[[str, Any], bool] = lambda embedding, head: False,
    ) -> None:
        """Checks the values of heads that are tied to the embedding.

        Args:
            names: of an update's tensors.
            values_of: the tensors of some of `names`.
            is_served: whether a head has the values of the embedding of this name that the model has
                now. Asked where `names` have no embedding: TRL's client may send the head alone, after
                an update that was complete without it.

        Raises:
            Refused: a head has other values than the embedding.
        """
        for head, embedding in self.tied_heads(names).items():
            if embedding:
                one, other = values_of([head, embedding])
                if is_same(one, other):
                    continue
                what = f"values other than those of {embedding}"
                if one.shape != other.shape:
                    what = (
                        f"the shape {tuple(one.shape)}, where {embedding} has {tuple(other.shape)}"
                    )
                elif one.dtype != other.dtype:
                    what += f" ({one.dtype} beside {other.dtype})"
            elif is_served(self._embedding, *values_of([head])):
                continue
            else:
                what = "no embedding with it, and other values than the served one's"
            raise Refused(
                f"{head}: expected the embedding's values, which are the head's in this model "
                f"(tie_word_embeddings), got {what}; leave the head out, or serve a checkpoint that "
                "has a head of its own (tie_word_embeddings=False)"
            )

    def _is_multi_token(self, key: str) -> bool:
        if found := MULTI_TOKEN.match(key):
            return found[1] not in self._modules
        # Some checkpoints store these layers behind the model's last one.
        found = LAYER.match(key)
        return found is not None and found[1] in self._modules and found[0] not in self._modules

    @property
    def tensors(self) -> list[TensorInfo]:
        """All tensors that the model takes, as a checkpoint has them."""
        return list(self._tensors.values())

    @functools.cached_property
    def num_bytes(self) -> int:
        """Of all tensors in the checkpoint."""
        return sum(map(num_bytes_of, self._tensors.values()))

    @functools.cached_property
    def largest_layer_bytes(self) -> int:
        """Bytes of the largest layer in the checkpoint."""
        sizes = (
            sum(num_bytes_of(self._tensors[key]) for key in keys) for keys in self._layers.values()
        )
        return max(sizes, default=0)

    def _layer_of(self, key: str) -> str:
        """The module of vLLM that holds `key`, with weight and bias: q, k and v, or all experts."""
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
        """How `tensors` fit the model; with `is_partial`, missing tensors are reported only.

        Raises:
            Refused: as `check`; a name comes twice; or a tensor is missing.
        """
        fit, filled = Fit(), list[str]()
        for tensor in tensors:
            filled += self._match(tensor, fit)
        for conversion in dict.fromkeys(fit.conversions.values()):
            names = [one.name for one in conversion.parameters]
            if absent := [name for name in names if name not in fit.conversions]:
                fit.split_layers.extend(absent)
            else:
                filled += [self._rename(made.name) for made in conversion.tensors]
        _refuse_repeated(tensor.name for tensor in tensors)
        _refuse_repeated(self._tensors[key].name for key in filled)
        absent_keys = self._tensors.keys() - set(filled)
        kept = {key for key in absent_keys if key.endswith(NEVER_TRAINED)}
        fit.kept = self._names_of(kept)
        fit.missing = self._names_of(absent_keys - kept)
        if fit.missing and not is_partial:
            raise Refused(
                f"expected all {len(self._tensors)} tensors of the model, {len(fit.missing)} are "
                f"missing: {shorten(fit.missing)}; send them too, or declare the update partial"
            )
        begun = {self._layer_of(key) for key in filled}
        needed = {key for layer in begun for key in self._layers[layer]}
        fit.split_layers += self._names_of(needed & (absent_keys - kept))
        return fit

    def check(self, tensor: TensorInfo) -> None:
        """Checks one tensor by itself.

        Raises:
            Refused: an unknown name, another shape or dtype.
        """
        self._match(tensor, Fit())

    def _names_of(self, keys: Collection[str]) -> list[str]:
        """The checkpoint's names, in its order."""
        return [info.name for key, info in self._tensors.items() if key in keys]

    def _match(self, tensor: TensorInfo, fit: Fit) -> list[str]:
        """The keys of `_tensors` that `tensor` fills; a parameter to be converted fills none yet.

        `fit` records whether the tensor is ignored, split or converted.
        """
        if tensor.dtype not in DTYPE_BYTES:
            raise Refused(
                f"{tensor.name}: expected one of the dtypes {', '.join(DTYPE_BYTES)}, "
                f"got {tensor.dtype!r}"
            )
        if tensor.name in self._not_loaded or self._is_ignored(tensor.name):
            fit.ignored.append(tensor.name)
            return []
        if not self._tensors:
            return []
        key = self._rename(tensor.name)
        known = self._tensors.get(key)
        if conversion := self._conversion_of(tensor, known):
            fit.conversions[tensor.name] = conversion
            return []
        if known is not None:
            _check(tensor, known.shape, known.dtype)
            return [key]
        path, _, leaf = key.rpartition(".")
        above, _, last = path.rpartition(".")
        parts = [f"{above}.{part}.{leaf}" for part in self._packed.get(last, ())]
        if not parts or any(part not in self._tensors for part in parts):
            raise self._unknown(tensor.name)
        infos = [self._tensors[part] for part in parts]
        rows = sum(info.shape[0] for info in infos)
        _check(tensor, [rows, *infos[0].shape[1:]], infos[0].dtype)
        fit.splits[tensor.name] = [(info.name, info.shape[0]) for info in infos]
        return parts

    def _conversion_of(self, tensor: TensorInfo, known: TensorInfo | None) -> Conversion | None:
        """The conversion that `tensor` needs; `known`: the checkpoint's tensor of the same name."""
        conversion = self.conversions.of(tensor.name) if self.conversions else None
        if conversion is None:
            return None
        (own,) = (one for one in conversion.parameters if one.name == tensor.name)
        if known is not None and (conversion.renames or tensor.shape != own.shape):
            # It comes in the checkpoint's form, or vLLM knows this name as well.
            return None
        made = [(one, self._tensors.get(self._rename(one.name))) for one in conversion.tensors]
        for one, stored in made:
            if stored is None or stored.shape != one.shape:
                return None
            _check(tensor, own.shape, stored.dtype)
        return conversion

    def _unknown(self, name: str) -> Refused:
        known = [info.name for info in self._tensors.values()]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return Refused(f"{name}: the model has no such tensor{hint}")


def _check(tensor: TensorInfo, shape: list[int], dtype: str) -> None:
    if tensor.shape != shape:
        raise Refused(f"{tensor.name}: expected shape {shape}, got {tensor.shape}")
    if tensor.dtype != dtype and not {tensor.dtype, dtype} <= FLOATS:
        raise Refused(f"{tensor.name}: expected dtype {dtype}, got {tensor.dtype}")


def _refuse_repeated(names: Iterable[str]) -> None:
    seen = set[str]()
    for name in names:
        if name in seen:
            raise Refused(f"{name}: expected it once, got it twice, by name or in a fused tensor")
        seen.add(name)


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """The first of `names`, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def catalogue_of(model: Any, model_config: Any) -> Catalogue:
    """The catalogue of vLLM's `model`: from its checkpoint's headers, else from its config."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = None
    if mapper is not None:
        import dataclasses

        # Without the renames that fuse layers: parts keep their names here.
        rename = dataclasses.replace(mapper, orig_to_new_stacked={})._map_name
    conversions = Conversions(model_config.hf_config, _towers(model))
    stored = _from_files(model_config)
    conversions.transpose_as(stored)
    return Catalogue(
        stored or conversions.checkpoint(),
        rename=rename,
        packed=getattr(model, "packed_modules_mapping", None),
        embedding=_embedding_of_head(model, model_config),
        conversions=conversions,
        blocks=_blocks_of_experts(model),
        modules=[path for path, _ in model.named_modules()],
    )


def _towers(model: Any) -> list[str]:
    return [
        path
        for path, module in model.named_modules()
        if [name for name, _ in module.named_children()] == ["vision_model"]
    ]


def _embedding_of_head(model: Any, model_config: Any) -> str:
    """The name of the embedding's weights if the head has the same; else "".

    vLLM decides by the outer config, the language model's and the checkpoint, so the model is asked
    first.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))
    heads = [one for name, one in parameters if name.endswith("lm_head.weight")]
    if heads:
        others = [one for one in parameters if not one[0].endswith("lm_head.weight")]
        found = (name for name, one in others if any(one is head for head in heads))
        # With adapters, vLLM's layer has the checkpoint's within.
        return next(found, "").replace(".base_layer.", ".")
    text = model_config.hf_text_config
    if not getattr(text, "tie_word_embeddings", False):
        return ""
    # The model has no head, and computes with its embedding.
    width = getattr(text, "hidden_size", 0)
    embeddings = [
        f"{path}.weight"
        for path, module in model.named_modules()
        if getattr(module, "org_vocab_size", 0) and getattr(module, "embedding_dim", 0) == width
    ]
    first = embeddings[0] if embeddings else "embed_tokens.weight"
    return first.replace(".base_layer.", ".")


def has_rows_of(model: Any, embedding: str, head: Any) -> bool:
    """Whether `head` has the rows of an embedding's weights that this process holds, in its dtype."""
    try:
        layer = model.get_submodule(embedding.removesuffix(".weight"))
    except AttributeError:
        # Another stage of the pipeline has it, and compares.
        return True
    layer = getattr(layer, "base_layer", layer)
    if not hasattr(layer, "weight"):
        return True
    own = layer.shard_indices
    rows = head[own.org_vocab_start_index : own.org_vocab_end_index]
    return is_same(rows, layer.weight.data[: own.num_org_elements], dtype=layer.weight.dtype)


def _blocks_of_experts(model: Any) -> set[str]:
    """The modules with experts; their weights' names differ from model to model."""
    return {
        path.removesuffix(".routed_experts").rpartition(".")[0]
        for path, module in model.named_modules()
        if any(name.startswith(("w13_", "w2_")) for name in module._parameters)
    }


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
        # vLLM has loaded it already, so its choice of files counts.
        return folder_tensors(folder, indexed_files)
    except (Refused, OSError, ValueError):
        return []
