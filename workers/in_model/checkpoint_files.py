"""The safetensors files of a checkpoint: which files there are, and the tensors in their headers.

Runs in: vLLM's processes that hold the model.
"""

import json
import struct
from pathlib import Path

from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import num_bytes_of

DTYPES = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8",
    "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool",
}  # fmt: skip
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
        Refused: the index is broken, or names files of other folders.
    """
    index = folder / "model.safetensors.index.json"
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


def folder_tensors(folder: Path) -> list[TensorInfo]:
    """The tensors of a checkpoint in `folder`.

    Raises:
        Refused: there are no tensors, or a file is broken.
    """
    tensors = [tensor for file in weight_files(folder) for tensor, _ in read_header(file)]
    if not any(num_bytes_of(tensor) for tensor in tensors):
        raise Refused(f"expected safetensors files with weights in {folder}, got none")
    return tensors
