"""How endpoints are written, and files by which the processes of one server agree on its workers.

In `run_dir`: the endpoints of the workers and how each last ended, which their supervisor writes,
and the number of workers that a client wants, which a front end writes. All are replaced whole, so
no process reads half of one. A list of endpoints may also be a file of an operator's or of a cluster's scheduler.
"""

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

ENDPOINTS_FILE = "endpoints"
ENDS_FILE = "worker-ends"
WANTED_FILE = "num-workers"
FILE_SCHEME = "file:"
# Of a private `run_dir`; the file says that a server made the folder, and its lock who lives in it.
RUN_DIR_PREFIX = "titopool-"
OWNERS_FILE = "owners"
# Their locks last as long as this process.
_held: list[int] = []


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


def write_endpoints(run_dir: str, endpoints: Sequence[str]) -> None:
    """Replaces the file of endpoints.

    Raises:
        OSError: it cannot be written.
    """
    _replace(Path(run_dir) / ENDPOINTS_FILE, "".join(f"{one}\n" for one in endpoints))


class EndpointsFile:
    """The file of endpoints, kept up to date by one process; a full disk only delays a change."""

    def __init__(self, run_dir: str):
        self._run_dir = run_dir
        # The content; None: not known.
        self._written: list[str] | None = None
        self._is_late = False

    def keep(self, endpoints: Sequence[str]) -> None:
        """Writes `endpoints` if they have changed; a write that fails is repeated by the next call."""
        if self._written == list(endpoints):
            return
        try:
            write_endpoints(self._run_dir, endpoints)
        except OSError as error:
            if not self._is_late:
                logger.error(
                    "front ends learn of workers that join or leave when there is space in run_dir: "
                    "%s", error,
                )  # fmt: skip
            self._is_late = True
            return
        self._written = list(endpoints)
        if self._is_late:
            logger.info("the file of endpoints is written again")
        self._is_late = False


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
    """Asks the supervisor for so many workers.

    Raises:
        OSError: the file cannot be written.
    """
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
    try:
        draft.write_text(text)
        os.replace(draft, path)
    except OSError:
        # A half draft would take what little space there is.
        with suppress(OSError):
            draft.unlink()
        raise


# ---- a private run_dir ---------------------------------------------------------------


def make_run_dir() -> str:
    """A new private folder, of which this process is an owner.

    Folders that servers of this user have left behind, and that no process owns, are removed.
    """
    parent = tempfile.gettempdir()
    for path in Path(parent).glob(f"{RUN_DIR_PREFIX}*"):
        # A folder that cannot be looked at stays.
        with suppress(OSError):
            _remove_if_orphaned(path)
    run_dir = tempfile.mkdtemp(prefix=RUN_DIR_PREFIX, dir=parent)
    draft = Path(run_dir, f"{OWNERS_FILE}.new")
    # Not every file system has locks; without the file the folder is never taken for an orphan.
    with suppress(OSError):
        descriptor = os.open(draft, os.O_RDONLY | os.O_CREAT, 0o600)
        # Locked before it has its name: nobody sees it without an owner.
        _held.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        draft.rename(Path(run_dir, OWNERS_FILE))
    return run_dir


def own_run_dir(run_dir: str) -> None:
    """Makes this process an owner, until it ends, of a folder that `make_run_dir` made."""
    with suppress(OSError):
        descriptor = os.open(Path(run_dir, OWNERS_FILE), os.O_RDONLY | os.O_NOFOLLOW)
        _held.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _remove_if_orphaned(path: Path) -> None:
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        return
    descriptor = os.open(path / OWNERS_FILE, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        # Fails while an owner lives, and while another start removes the folder.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), (path / OWNERS_FILE).lstat()):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
