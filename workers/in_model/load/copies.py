"""New weights by copies into a model's memory, which are learned at the first update and proved.

Runs in: vLLM's processes that hold the model. vLLM's reload (`model_loader/reload`) creates every
layer again and loads each tensor of a checkpoint by itself: 15 s for a mixture of experts of 30B
parameters. Where a layer keeps its weights as a checkpoint has them, or in another order, loading
only copies parts of tensors into parts of parameters. `learn` records these copies. It trusts no
list of layers: it applies the copies to other values, lets vLLM reload the same values, and
compares all memory of the model bit by bit. Later updates repeat the copies.
"""

import bisect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from titopool.wire.weight_plan import checksum
from workers.in_model.proof.coverage import ModelTensors, storage_of, watching
from workers.in_model.proof.dry_runs import Form

logger = logging.getLogger(__name__)

# By the names under which they were sent.
Tensors = Mapping[str, Any]
# Objects that hold a layer's memory besides its module, such as attention's `impl`, are this deep.
MAX_DEPTH = 3


class Copy(NamedTuple):
    """A copy of a part of a tensor into a part of the model's memory."""

    target: Any
    name: str
    # Of the part within the tensor, in elements.
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _forms_in(tensors: Tensors) -> list[Form]:
    return [
        Form(name, str(one.dtype).removeprefix("torch."), tuple(one.shape))
        for name, one in tensors.items()
    ]


class CopyPlan:
    """The proved copies of all forms of tensors seen so far. Received tensors are contiguous."""

    def __init__(self) -> None:
        self._by_form: dict[Form, list[Copy]] = {}
        # Forms of tensors whose loading is more than copies.
        self._refused = set[Form]()

    def fits(self, forms: Iterable[Form]) -> bool:
        """Whether the plan has copies of each of the tensors."""
        return self._by_form.keys() >= set(forms)

    def fits_tensors(self, tensors: Tensors) -> bool:
        """As `fits`, for tensors that have come."""
        return self.fits(_forms_in(tensors))

    def may_learn(self, tensors: Tensors) -> bool:
        """Whether none of the tensors was refused before in this form."""
        return self._refused.isdisjoint(_forms_in(tensors))

    def add(self, copies: Iterable[Copy], tensors: Tensors) -> None:
        """Adds proved copies of `tensors`."""
        forms = {form.name: form for form in _forms_in(tensors)}
        added: dict[Form, list[Copy]] = {}
        for copy in copies:
            added.setdefault(forms[copy.name], []).append(copy)
        self._by_form |= added

    def refuse(self, tensors: Tensors) -> None:
        """Notes that loading these tensors together is more than copies."""
        self._refused |= set(_forms_in(tensors))

    def run(self, tensors: Tensors) -> None:
        """Copies `tensors`, of which each form was learned."""
        copies = [copy for form in _forms_in(tensors) for copy in self._by_form[form]]
        run_copies(copies, tensors)


def run_copies(copies: list[Copy], tensors: Tensors) -> None:
    """Makes the copies of `tensors`."""
    import torch

    sources = []
    for copy in copies:
        tensor = tensors[copy.name]
        offset = tensor.storage_offset() + copy.offset
        sources.append(tensor.as_strided(copy.size, copy.stride, offset))
    if copies:
        torch._foreach_copy_([copy.target for copy in copies], sources)


def learn(
    plan: CopyPlan,
    model: Any,
    tensors: Tensors,
    *,
    load: Callable[[], None],
    reload: Callable[[], object],
    scope: Callable[[str], bool] = lambda path: True,
) -> None:
    """Loads `tensors` by vLLM's reload, and adds their copies to `plan` if they are proved.

    The proof negates all values for a while: a part of the model that keeps an older value differs
    then, also if the update brings the values that the model has already.

    Args:
        load: loads `tensors` by the model's loaders into the memory that it has.
        reload: loads `tensors` by vLLM's layerwise reload.
        scope: whether the memory of the module at a path is compared.

    Raises:
        Exception: `reload` failed; the model has old and new weights.
    """
    copies = _record(tensors, load)
    if copies is not None:
        copies = _merged(copies)
        with _negated(tensors):
            run_copies(copies, tensors)
            by_copies = digests(model, scope)
            reload()
            by_reload = digests(model, scope)
        memory = ModelTensors(model)
        differing = [name for name, one in by_reload.items() if by_copies.get(name) != one]
        is_proved = not differing and by_copies.keys() == by_reload.keys()
        if is_proved and all(memory.of(copy.target) is not None for copy in copies):
            plan.add(copies, tensors)
            plan.run(tensors)
            return
        logger.warning(
            "updates of %d tensors go through vLLM's reload: copies would leave %s as it was",
            len(tensors), ", ".join(differing[:3]) or "memory that vLLM has replaced",
        )  # fmt: skip
    plan.refuse(tensors)
    reload()


def _record(tensors: Tensors, load: Callable[[], None]) -> list[Copy] | None:
    """The copies that `load` makes; None if it does more than copy, or fails."""
    recorder = _CopyRecorder(tensors)
    try:
        with watching(recorder.handle, all_operations=True):
            load()
    except Exception as error:
        # A layer may have replaced its parameters by some without loaders.
        logger.warning("updates go through vLLM's reload: %s: %s", type(error).__name__, error)
        return None
    without = set(tensors) - {copy.name for copy in recorder.copies}
    if recorder.is_plain and not without:
        return recorder.copies
    logger.warning(
        "updates of %d tensors go through vLLM's reload: loading is more than copies%s",
        len(tensors), f" of {min(without)}" if without else "",
    )  # fmt: skip
    return None


@contextmanager
def _negated(tensors: Tensors) -> Iterator[None]:
    """Within the block, the floats have the other sign, exactly."""
    floats = [one for one in tensors.values() if one.is_floating_point()]
    for tensor in floats:
        tensor.neg_()
    try:
        yield
    finally:
        for tensor in floats:
            tensor.neg_()


def _merged(copies: list[Copy]) -> list[Copy]:
    """The same copies with neighbours joined, e.g. those of a layer's experts."""
    plain = [
        one for one in copies
        if one.target.is_contiguous() and _is_contiguous(one.size, one.stride)
    ]  # fmt: skip
    plain.sort(key=lambda one: (storage_of(one.target), one.target.storage_offset()))
    kept = {id(one) for one in plain}
    merged: list[Copy] = []
    for copy in plain:
        if merged and (joined := _joined(merged[-1], copy)) is not None:
            merged[-1] = joined
        else:
            merged.append(copy)
    return merged + [one for one in copies if id(one) not in kept]


def _is_contiguous(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def _joined(first: Copy, second: Copy) -> Copy | None:
    """One copy in place of two neighbours; None if they are none."""
    num_first, num_second = first.target.numel(), second.target.numel()
    is_neighbour = (
        first.name == second.name
        and first.target.dtype == second.target.dtype
        and storage_of(first.target) == storage_of(second.target)
        and first.target.storage_offset() + num_first == second.target.storage_offset()
        and first.offset + num_first == second.offset
    )
    if not is_neighbour:
        return None
    size = (num_first + num_second,)
    target = first.target.as_strided(size, (1,), first.target.storage_offset())
    return Copy(target, first.name, size, (1,), first.offset)


class _Part(NamedTuple):
    """A part of a tensor that was sent; strides and offset in elements."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _CopyRecorder:
    """Records the copies that loaders make, as long as they change nothing else.

    transformers' conversions clone parts of fused parameters; a copy out of such a clone counts as
    one out of the parameter.
    """

    def __init__(self, tensors: Tensors):
        from torch.ops import aten

        self.copies: list[Copy] = []
        self.is_plain = True
        self._copy, self._clone = aten.copy_.default, aten.clone.default
        self._padding = (aten.fill_.Scalar, aten.zero_.default)
        # Begin and end of known memory in bytes, and what it holds; sorted by the begin.
        self._known = sorted(
            (*_range_of(one), _Part(name, tuple(one.size()), tuple(one.stride()), 0))
            for name, one in tensors.items()
        )

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carries out an operation."""
        if func is self._clone:
            cloned = func(*args, **kwargs)
            self._forget(*_range_of(cloned))
            part = self._part_of(args[0])
            if part is not None and cloned.is_contiguous():
                bisect.insort(self._known, (*_range_of(cloned), part))
            return cloned
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        if func is self._copy:
            self._add(args[0], args[1])
        elif func not in self._padding or args[0].numel() == 1:
            # Padding is always the same; a parameter of one number may be filled with a tensor's.
            self.is_plain = False
        return func(*args, **kwargs)

    def _add(self, target: Any, source: Any) -> None:
        part = self._part_of(source)
        # copy_ broadcasts; a source that is not known is computed from a tensor.
        if part is None or target.shape != source.shape:
            self.is_plain = False
        else:
            self.copies.append(Copy(target, *part))

    def _part_of(self, tensor: Any) -> _Part | None:
        """The part of a sent tensor that `tensor` holds; None: none, or not as one part."""
        position = bisect.bisect_right(self._known, tensor.data_ptr(), key=lambda one: one[0]) - 1
        if position < 0 or tensor.data_ptr() >= self._known[position][1]:
            return None
        begin, _, whole = self._known[position]
        offset = (tensor.data_ptr() - begin) // tensor.element_size()
        return _within(whole, tuple(tensor.size()), tuple(tensor.stride()), offset)

    def _forget(self, begin: int, end: int) -> None:
        """Memory is used again: what it held is gone."""
        self._known = [one for one in self._known if one[1] <= begin or end <= one[0]]


def _range_of(tensor: Any) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def _within(
    whole: _Part, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> _Part | None:
    """A view of contiguous memory that holds `whole`, as a part of the same tensor."""
    # Strides of the memory, by dimension of `whole`.
    own: list[int] = []
    step = 1
    for length in reversed(whole.size):
        own.insert(0, step)
        step *= length
    if tuple(own) == whole.stride:
        return _Part(whole.name, size, stride, whole.offset + offset)
    begin = whole.offset
    for step, length, own_stride in zip(own, whole.size, whole.stride, strict=True):
        begin += offset // step % length * own_stride
    by_step = {
        step: one
        for step, one, length in zip(own, whole.stride, whole.size, strict=True)
        if length > 1
    }
    strides = []
    for length, one in zip(size, stride, strict=True):
        if length > 1 and one not in by_step:
            return None
        strides.append(by_step.get(one, 1))
    return _Part(whole.name, size, tuple(strides), begin)


def digests(model: Any, scope: Callable[[str], bool]) -> dict[str, str]:
    """A checksum of each tensor that the model's modules hold (`held_tensors`)."""
    return {name: checksum([tensor]) for name, tensor in held_tensors(model, scope).items()}


def held_tensors(model: Any, scope: Callable[[str], bool]) -> dict[str, Any]:
    """Every tensor that the model's modules hold, by the path of attributes.

    Includes buffers and what layers derive from weights and keep as attributes, of themselves or of
    objects such as attention's `impl`. The KV cache, which is no weight, is left out.
    """
    found: dict[str, Any] = {}
    seen = set[int]()
    for path, module in model.named_modules():
        if scope(path):
            members = {**vars(module), **module._parameters, **module._buffers}
            for name, value in members.items():
                if name not in ("_parameters", "_buffers", "_modules"):
                    _collect(f"{path}.{name}", value, MAX_DEPTH, found, seen)
    return found


def within_layers(parameters: Iterable[str]) -> Callable[[str], bool]:
    """Whether a module lies in the decoder layer of one of the parameters, or holds it."""
    tops = set()
    for name in parameters:
        found = re.match(r"(?:.*\.)?layers\.\d+\.", name)
        tops.add(found[0] if found else name.rpartition(".")[0] + ".")
    return lambda path: any(f"{path}.".startswith(top) for top in tops)


def _collect(name: str, value: Any, depth: int, found: dict[str, Any], seen: set[int]) -> None:
    import torch

    if "kv_cache" in name.rpartition(".")[2] or id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if not value.is_meta and storage_of(value):
            found[name] = value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(f"{name}.{index}", item, depth - 1, found, seen)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(f"{name}.{key}", item, depth - 1, found, seen)
    elif not isinstance(value, torch.nn.Module) and type(value).__module__.startswith("vllm."):
        for key, item in getattr(value, "__dict__", {}).items():
            _collect(f"{name}.{key}", item, depth - 1, found, seen)
