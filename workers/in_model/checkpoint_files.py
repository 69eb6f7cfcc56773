"""The safetensors files of a checkpoint: which files there are, and the tensors in their headers.

Runs in: vLLM's processes that hold the model, and each worker.
"""

import asyncio
import json
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from titopool.errors import Conflict
from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import num_bytes_of

DTYPES = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8",
    "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool",
}  # fmt: skip
# A checkpoint is in one file, or in shards and their index.
# Of a LoRA adapter in PEFT's form.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 2**20
# Safetensors files that hold no weights in transformers' names.
SKIPPED = ("consolidated", "adapter", "training")


class Refused(Exception):
    """The tensors do not fit the model, or a file is broken; the message names the tensor or the file, and the fault."""


def read_header(file: Path) -> list[tuple[TensorInfo, int]]:
    """The tensors of a safetensors file, each with the offset in the file at which its bytes end.

    Raises:
        Refused: it is not a safetensors file, or it is shorter than its header says.
    """
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"expected a header of at most {MAX_HEADER_BYTES} bytes")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        tensors = [
            (
                TensorInfo(name, DTYPES[entry["dtype"]], entry["shape"]),
                8 + length + entry["data_offsets"][1],
            )
            for name, entry in header.items()
        ]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise Refused(f"{file.name}: expected a safetensors file, got {error!r}") from None
    end = max((end for _, end in tensors), default=0)
    if file.stat().st_size < end:
        raise Refused(f"{file.name}: expected {end} bytes, got {file.stat().st_size}")
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint in `folder`: those that its index names, or all.

    Raises:
        Refused: the index is broken, or names files of other folders; or there is a checkpoint in
            one file besides, which transformers would load instead.
    """
    files, single = indexed_files(folder), folder / SINGLE
    if single.is_file() and single not in files:
        raise Refused(
            f"expected one checkpoint in {folder}, got two: {SINGLE}, which transformers loads, and "
            f"the shards that {INDEX} names, which vLLM loads; remove the older one, or save each "
            "version in a folder of its own"
        )
    return files


def indexed_files(folder: Path) -> list[Path]:
    """As `weight_files`, and as vLLM's own loading: the index has the last word."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(
                f"{index.name}: expected an index of safetensors files, got {error!r}"
            ) from None
        if odd := [name for name in names if Path(str(name)).name != name]:
            raise Refused(f"{index.name}: expected names of files in its folder, got {odd[0]!r}")
        return sorted(folder / name for name in names)
    return sorted(
        file for file in folder.glob("*.safetensors") if not file.stem.startswith(SKIPPED)
    )


def folder_tensors(
    folder: Path, files_of: Callable[[Path], list[Path]] = weight_files
) -> list[TensorInfo]:
    """The tensors of a checkpoint in `folder`, whose files are `files_of(folder)`.

    Raises:
        Refused: there are no tensors, or a file is broken.
    """
    tensors = [tensor for file in files_of(folder) for tensor, _ in read_header(file)]
    if not any(num_bytes_of(tensor) for tensor in tensors):
        raise Refused(f"expected safetensors files with weights in {folder}, got none")
    return tensors


def values_of(folder: Path, names: Sequence[str]) -> list[Any]:
    """Tensors of a checkpoint in `folder`, in the host's memory, in the order of `names`."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            own = set(opened.keys())
            found |= {name: opened.get_tensor(name) for name in names if name in own}
    return [found[name] for name in names]


def digest_of_files(folder: str, *, is_adapter: bool = False) -> str:
    """Digest of the names, sizes and modification times of the files that a folder is loaded from.

    Those are a checkpoint's, or an adapter's. Other files may still come: trainers write the state
    of an optimizer, or an average of the weights, after the weights. Empty if they cannot be read.
    """
    path = Path(folder)
    try:
        if is_adapter:
            found = [path / name for name in ADAPTER_FILES if (path / name).is_file()]
        else:
            found = [*indexed_files(path), *path.glob(INDEX)]
        files = sorted((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in found)
    except (OSError, Refused):
        return ""
    return blake2b(msgspec.json.encode(files), digest_size=16).hexdigest()


async def check_files(folder: str, expected: str = "", *, is_adapter: bool = False) -> str:
    """The digest of a folder's files, which is `expected` unless that is empty.

    Raises:
        Conflict: it is another one, or the folder cannot be read.
    """
    found = await asyncio.to_thread(digest_of_files, folder, is_adapter=is_adapter)
    if not found:
        raise Conflict(f"{folder}: expected a folder that can be read, got none; try again")
    if found != (expected or found):
        raise Conflict(
            f"{folder}: expected the files that were there when the load began, got others by name, "
            "size or time of change: somebody writes there, or workers see different folders at this "
            "path; save each version in a folder of its own, and load it when it is complete"
        )
    return found
