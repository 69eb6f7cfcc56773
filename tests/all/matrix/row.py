"""A part of one row of the matrix, in a process of its own.

    python -m tests.all.matrix.row ROW PART [LOG [COLUMN …]]

Prints a line of JSON for each column of the part, or for the named ones: what it found, or `exact`.
The server's log is written to LOG.
"""

import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.servers import running_server
from tests.all.matrix import adapters, images, text
from tests.all.matrix.image_families import IMAGE_FAMILIES, make_image_family
from tests.kit.models.model_families import make_family
from tests.kit.workers.there_and_back import there_and_back
from titopool.settings.gpus import visible_gpus

OPTIONS: tuple[str, ...] = ("--dtype", "float32", "--max-num-seqs", "16", "--num-workers", "1")
if visible_gpus():
    # Several rows may share a GPU, so none measures what is free beside the others.
    OPTIONS += (
        "--gpu-memory-utilization", "0.15", "--kv-cache-memory-bytes", str(2**30), "--enforce-eager",
    )  # fmt: skip
    # Triton's default multiplies float32 as TF32, which is 0.001 to 0.006 off in log-probabilities.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
# One kernel for all cores is what two ranks on few cores wait for.
TWO_RANKS = ("--tensor-parallel-size", "2", "--heartbeat-timeout-s", "400")
Columns = dict[str, Callable[[Any], None]]


def main() -> None:
    row, part, *rest = sys.argv[1:]
    for column in [one for one in COLUMNS[part] if rest[1:] and one not in rest[1:]]:
        del COLUMNS[part][column]
    with tempfile.TemporaryDirectory() as name:
        log = Path(rest[0]) if rest else Path(name, "log")
        PARTS[part](row, Path(name), log)


def serve_text(row: str, root: Path, log: Path) -> None:
    own, other = two(make_family, row, root)
    with_server(row, text.COLUMNS, lambda server: text.Row(server, own, other), own, log)


def serve_images(row: str, root: Path, log: Path) -> None:
    (own, image), (other, _) = two(make_image_family, row, root)
    make = lambda server: images.Row(server, own, other, image)  # noqa: E731
    with_server(row, images.COLUMNS, make, own, log)


def serve_two_ranks(row: str, root: Path, log: Path) -> None:
    own, other = two(make_family, row, root)
    make = lambda server: text.Row(server, own, other)  # noqa: E731
    with_server(row, text.TWO_RANKS, make, own, log, *TWO_RANKS)


def serve_adapters(row: str, root: Path, log: Path) -> None:
    own, _ = two(make_family, row, root)
    make = lambda server: adapters.Row(server, own, root)  # noqa: E731
    with_server(row, adapters.COLUMNS, make, own, log, *adapters.OPTIONS)


def update(row: str, root: Path, log: Path) -> None:
    own, other = two(make_family, row, root)
    check(row, "updates bit by bit", lambda: there_and_back(row, own, other))


PARTS = {
    "text": serve_text, "images": serve_images, "updates": update, "adapters": serve_adapters,
    "tensor-parallel": serve_two_ranks,
}  # fmt: skip


def parts_of(row: str) -> list[str]:
    return ["images"] if row in IMAGE_FAMILIES else [one for one in PARTS if one != "images"]


COLUMNS: dict[str, Columns] = {
    "text": text.COLUMNS, "images": images.COLUMNS, "adapters": adapters.COLUMNS,
    "updates": {"updates bit by bit": lambda _: None}, "tensor-parallel": text.TWO_RANKS,
}  # fmt: skip


def two(make: Callable[[str, Path, int], Any], row: str, root: Path) -> list[Any]:
    """A model and one with other weights, in folders of `root`."""
    return [make(row, root / name, seed) for seed, name in enumerate(("own", "other"))]


def with_server(
    row: str, columns: Columns, make: Callable[[Any], Any], own: str, log: Path, *options: str
) -> None:
    """Serves the model in `own`, and tries each column."""
    words = (
        own, *OPTIONS, "--max-model-len", "512", "--num-front-ends", "1", "--weights-root",
        str(Path(own).parent), *options,
    )  # fmt: skip
    try:
        with running_server(*words, log=log) as server:
            made = make(server)
            for column, do in columns.items():
                check(row, column, lambda do=do: do(made))  # type: ignore[misc]
    except AssertionError:
        traceback.print_exc()
        for column in columns:
            show(row, column, f"no start: {cause_in(log)}")


def cause_in(log: Path) -> str:
    """The last error that a server's log names."""
    named = re.findall(r"\b\w*Error: .+", log.read_text()) if log.exists() else []
    return named[-1][:300] if named else "no error in its log"


def check(row: str, column: str, do: Callable[[], None]) -> None:
    try:
        do()
        show(row, column, "exact")
    except Exception as error:
        traceback.print_exc()
        show(row, column, f"{type(error).__name__}: {error}"[:400])


def show(row: str, column: str, result: str) -> None:
    print(json.dumps({"row": row, "column": column, "result": result}), flush=True)


if __name__ == "__main__":
    main()
