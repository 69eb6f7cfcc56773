"""The tensors that a trainer sends: first the names, shapes and dtypes of all, then one at a time.

Parameters that are sharded over the trainer's processes are gathered when their turn comes: DTensor
(FSDP2) by `full_tensor()`, DeepSpeed's ZeRO-3 by `deepspeed.zero.GatheredParameters`. Gathering is a
collective. So the trainer's other processes call `join_update` with the same tensors, and an update
that fails still gathers the rest. Adapters of PEFT are merged when their turn comes
(`titopool/client/weights/adapters.py`).

Runs in: trainers.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from titopool.client.weights.adapters import Merged, is_zero3, parameters_of
from titopool.client.weights.server_calls import WeightsError
from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import DTYPE_BYTES

Pairs = Iterator[tuple[str, Any]]
# The server's name of each tensor, by the trainer's.
Names = Mapping[str, str] | Callable[[str], str]


class Source:
    """One update's tensors, in order."""

    def __init__(
        self,
        tensors: Any,
        metadata: Iterable[tuple[str, Any, Any]] | None = None,
        names: Names | None = None,
    ):
        """Reads names, shapes and dtypes.

        Args:
            tensors: see `WeightsClient.update`.
            metadata: (name, dtype, shape) of each tensor, so that `tensors` is iterated once only.
            names: see `WeightsClient`.

        Raises:
            WeightsError: not tensors of known dtypes with names, or iterating raised.
        """
        if metadata is None:
            tensors = _repeatable(tensors)
            self.infos = [_info(name, tensor) for name, tensor in _pairs_of(tensors, names)]
        else:
            self.infos = _given(metadata, names)
        self._pairs = _pairs_of(tensors, names)
        self._can_gather = True
        # Whether the last tensor's values stay after `next_tensor`. ZeRO-3 frees them.
        self.outlives = True

    @contextmanager
    def next_tensor(self, info: TensorInfo) -> Iterator[Any]:
        """The whole values of the next tensor, which must be `info`; valid within the context only.

        Raises:
            WeightsError: another tensor came, or none, or gathering failed.
        """
        name, tensor = next(self._pairs, ("", None))
        expected = f"expected {_shown(info)}"
        if tensor is None:
            raise WeightsError(f"tensors: {expected}, got no more; {SAME_AGAIN}")
        found = _info(name, tensor)
        if found != info:
            raise WeightsError(f"tensors: {expected}, got {_shown(found)}; {SAME_AGAIN}")
        self._can_gather, self.outlives = False, not is_zero3(tensor)
        with gathered(name, tensor) as whole:
            self._can_gather = True
            if list(whole.shape) != info.shape:
                raise WeightsError(
                    f"tensors: {expected}, got shape {list(whole.shape)} after gathering; all of the "
                    "trainer's processes must gather the same tensors in the same order"
                )
            yield whole

    def check_end(self) -> None:
        """Raises WeightsError if there are more tensors than announced."""
        name, tensor = next(self._pairs, ("", None))
        if tensor is not None:
            raise WeightsError(
                f"tensors: expected the end after {len(self.infos)} tensors, got {name}; {SAME_AGAIN}"
            )

    def gather_rest(self) -> None:
        """Gathers what was not sent, so that the trainer's other processes do not wait for this one.

        Does nothing after a gathering that failed.
        """
        with contextlib.suppress(Exception):
            while self._can_gather and (pair := next(self._pairs, None)) is not None:
                with gathered(*pair):
                    pass


SAME_AGAIN = "pass tensors that are the same each time they are iterated, and as in `metadata`"


def join_update(tensors: Any, metadata: Iterable[tuple[str, Any, Any]] | None = None) -> None:
    """Takes part in gathering sharded tensors while another process sends them.

    For the processes of a trainer other than the one with the `WeightsClient`: each calls it with
    its own arguments of the same kind, for each call of `WeightsClient.update`.

    Raises:
        WeightsError: as for that client's tensors, or gathering failed.
    """
    source = Source(tensors, metadata)
    for info in source.infos:
        with source.next_tensor(info):
            pass


@contextmanager
def gathered(name: str, tensor: Any) -> Iterator[Any]:
    """The values of a tensor; those of all shards if it is sharded. Valid within the context only.

    Raises:
        WeightsError: gathering or merging failed.
    """
    with contextlib.ExitStack() as stack:

        def gather(part: Any) -> Any:
            if is_zero3(part):
                zero = importlib.import_module("deepspeed").zero
                stack.enter_context(zero.GatheredParameters([part]))
                return part.data
            whole = part.detach()
            return whole.full_tensor() if hasattr(whole, "full_tensor") else whole

        is_merged = isinstance(tensor, Merged)
        try:
            whole = tensor.whole(gather) if is_merged else gather(tensor)
        except Exception as error:
            raise WeightsError(
                f"{name}: expected to gather its shards{' and merge its adapters' * is_merged}, got {type(error).__name__}: {error}; every "
                "process of the trainer must call join_update with the same tensors"
            ) from error
        yield whole


def _repeatable(tensors: Any) -> Any:
    """`tensors`; of an iterator, which can be iterated only once, a list of its items."""
    try:
        return list(tensors) if isinstance(tensors, Iterator) else tensors
    except Exception as error:
        raise _failed(error) from error


def _pairs_of(tensors: Any, names: Names | None) -> Pairs:
    """One pass over `tensors`, with the names that the server knows.

    Raises:
        WeightsError: iterating raised, or an item is not a pair of a name and a tensor.
    """
    try:
        for item in _begun(tensors):
            _check_pair(item)
            yield _name_of(item[0], names), item[1]
    except WeightsError:
        raise
    except Exception as error:
        raise _failed(error) from error


def _begun(tensors: Any) -> Iterator[Any]:
    # Before `callable`: a module is callable too.
    if hasattr(tensors, "named_parameters"):
        return parameters_of(tensors)
    if isinstance(tensors, Mapping):
        return iter(tensors.items())
    return iter(tensors() if callable(tensors) else tensors)


def _name_of(name: str, names: Names | None) -> str:
    if names is None:
        return name
    found = names.get(name, name) if isinstance(names, Mapping) else names(name)
    if not isinstance(found, str):
        raise WeightsError(f"names: expected a text for {name}, got {found!r}")
    return found


def _check_pair(item: Any) -> None:
    import torch

    parts = item if isinstance(item, tuple) else (item,)
    is_pair = len(parts) == 2 and isinstance(parts[0], str)
    if not is_pair or not isinstance(parts[1], torch.Tensor | Merged):
        kinds = ", ".join(type(one).__name__ for one in parts) or "an empty tuple"
        raise WeightsError(
            f"tensors: expected pairs of a name and a tensor, got {kinds}; pass a module, a state "
            "dict or model.named_parameters"
        )


def _failed(error: Exception) -> WeightsError:
    return WeightsError(
        "tensors: expected an iterable of names and tensors, or a function that returns one, got "
        f"{type(error).__name__}: {error}"
    )


def _info(name: str, tensor: Any) -> TensorInfo:
    if isinstance(tensor, Merged):
        tensor = tensor.base
    shape = tensor.ds_shape if is_zero3(tensor) else tensor.shape
    if tensor.is_meta:
        raise WeightsError(
            f"{name}: expected values, got a tensor on the meta device; load it first"
        )
    return _of_known_dtype(TensorInfo(name, _dtype_name(tensor.dtype), list(shape)))


def _given(metadata: Iterable[tuple[str, Any, Any]], names: Names | None) -> list[TensorInfo]:
    """The tensors of `WeightsClient.update`'s `metadata`."""
    try:
        found = [
            TensorInfo(
                _name_of(str(name), names), _dtype_name(dtype), [int(size) for size in shape]
            )
            for name, dtype, shape in metadata
        ]
    except Exception as error:
        raise WeightsError(
            "metadata: expected (name, dtype, shape) of each tensor, got "
            f"{type(error).__name__}: {error}"
        ) from error
    return [_of_known_dtype(info) for info in found]


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _of_known_dtype(info: TensorInfo) -> TensorInfo:
    if info.dtype not in DTYPE_BYTES:
        raise WeightsError(
            f"{info.name}: expected a dtype of {', '.join(DTYPE_BYTES)}, got {info.dtype}; convert it"
        )
    return info


def _shown(info: TensorInfo) -> str:
    return f"{info.name} of dtype {info.dtype} and shape {info.shape}"
