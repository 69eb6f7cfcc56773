"""How endpoints are written, and files by which the processes of one server agree on its workers.

In `run_dir`: the endpoints of the workers and how each last ended, which their supervisor writes,
and the number of workers that a client wants, which a front end writes. All are replaced whole, so
no process reads half of one. A list of endpoints may also be a file of an operator's or of a cluster's scheduler.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

ENDPOINTS_FILE = "endpoints"
ENDS_FILE = "worker-ends"
WANTED_FILE = "num-workers"
FILE_SCHEME = "file:"


class WorkerEnd(msgspec.Struct, frozen=True):
    """How and when a process of a worker ended; `ended_at` is in Unix seconds."""

    reason: str
    ended_at: float


_decode_ends = msgspec.json.Decoder(dict[str, WorkerEnd]).decode


def is_endpoint(text: str) -> bool:
    """Whether `text` is `tcp://host:port` or `ipc://path`."""
    scheme, _, rest = text.partition("://")
    port = rest.rpartition(":")[2]
    is_tcp = scheme == "tcp" and port.isdigit() and 0 < int(port) < 65_536
    return is_tcp or bool(scheme == "ipc" and rest)


def endpoints_file(run_dir: str) -> str:
    """The setting `endpoints` of front ends whose workers a supervisor starts."""
    return FILE_SCHEME + os.path.join(run_dir, ENDPOINTS_FILE)


def write_endpoints(run_dir: str, endpoints: Iterable[str]) -> None:
    _replace(Path(run_dir) / ENDPOINTS_FILE, "".join(f"{one}\n" for one in endpoints))


def read_endpoints(path: str) -> list[str]:
    """The lines of a file of endpoints, without comments and blank lines.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read.
    """
    lines = (line.partition("#")[0].strip() for line in Path(path).read_text().splitlines())
    return [line for line in lines if line]


def write_ends(run_dir: str, ends: dict[str, WorkerEnd]) -> None:
    """Replaces the last end of each worker, by the worker's name."""
    _replace(Path(run_dir) / ENDS_FILE, msgspec.json.encode(ends).decode())


def read_ends(run_dir: str) -> dict[str, WorkerEnd]:
    """The last end of each worker whose supervisor shares `run_dir`; {} if there is none."""
    if not run_dir:
        return {}
    try:
        return _decode_ends((Path(run_dir) / ENDS_FILE).read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}


def write_wanted(run_dir: str, num_workers: int) -> None:
    """Asks the supervisor for so many workers."""
    _replace(Path(run_dir) / WANTED_FILE, str(num_workers))


def take_wanted(run_dir: str) -> int | None:
    """The number of workers that a client has asked for since the last call; None: no change."""
    path = Path(run_dir) / WANTED_FILE
    try:
        text = path.read_text()
        path.unlink()
    except OSError:
        return None
    return int(text)


def _replace(path: Path, text: str) -> None:
    # Two front ends may write at once.
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)
