"""The names in `run_dir`, how a file in it is replaced, and which processes own the folder.

The processes of one server agree on its workers by these files. Each is replaced whole, so no process
reads half of one. A list of endpoints may also be a file of an operator's or of a cluster's scheduler.
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
from typing import Any, TypeVar

import msgspec

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

# The endpoints of the workers, how each last ended, and why the supervisor gave up: it writes them.
ENDPOINTS, ENDS, FAILURE = "endpoints", "worker-ends", "failure"
# The number of workers that a client wants, which a front end writes.
WANTED = "num-workers"
# The secret of TCP endpoints, where no setting names another file.
CURVE_KEY = "curve-key"
# By a worker's name: its socket, its log, the pool's state for its next process, and how often and why
# the supervisor has started it again.
SOCKET, LOG, STATE, RESTARTS = "worker-{}", "worker-{}.log", "worker-state-{}", "restarts-{}"
# Folders of front ends: answers under keys, what they count, log-probabilities and sessions.
ANSWERS, COUNTS, LOGPROBS, SESSIONS = "idempotency", "counts", "logprobs", "sessions"
# Says that a server made the folder; its lock says who lives in it.
OWNERS = "owners"
RUN_DIR_PREFIX = "titopool-"
FILE_SCHEME = "file:"
# Their locks last as long as this process.
_held: list[int] = []


class WorkerEnd(msgspec.Struct, frozen=True):
    """How and when a process of a worker ended; `ended_at` is in Unix seconds."""

    reason: str
    ended_at: float


def is_endpoint(text: str) -> bool:
    """Whether `text` is `tcp://host:port` or `ipc://path`."""
    scheme, _, rest = text.partition("://")
    port = rest.rpartition(":")[2]
    is_tcp = scheme == "tcp" and port.isdigit() and 0 < int(port) < 65_536
    return is_tcp or bool(scheme == "ipc" and rest)


def endpoints_file(run_dir: str) -> str:
    """The setting `endpoints` of front ends whose workers a supervisor starts."""
    return FILE_SCHEME + os.path.join(run_dir, ENDPOINTS)


def write_endpoints(run_dir: str, endpoints: Sequence[str]) -> None:
    """Replaces the file of endpoints.

    Raises:
        OSError: it cannot be written.
    """
    lines = "".join(f"{endpoint}\n" for endpoint in endpoints)
    replace_file(Path(run_dir, ENDPOINTS), lines.encode())


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


def write_wanted(run_dir: str, num_workers: int) -> None:
    """Asks the supervisor for so many workers.

    Raises:
        OSError: the file cannot be written.
    """
    replace_file(Path(run_dir, WANTED), str(num_workers).encode())


def take_wanted(run_dir: str) -> int | None:
    """The number of workers that a client has asked for since the last call; None: no change."""
    path = Path(run_dir, WANTED)
    try:
        text = path.read_text()
        path.unlink()
    except OSError:
        return None
    return int(text)


def forget_workers(run_dir: str, worker_id: str = "*") -> None:
    """Removes what an earlier server, which began with the initial weights, or one worker has left."""
    for name in (STATE, RESTARTS):
        for path in Path(run_dir).glob(name.format(worker_id)):
            path.unlink(missing_ok=True)


def write_record(run_dir: str, name: str, content: Any, loss: str) -> None:
    """Replaces a file by `content` as JSON; where it cannot (a full disk), a log line tells the `loss`."""
    try:
        replace_file(Path(run_dir, name), msgspec.json.encode(content))
    except OSError as error:
        logger.error("%s: %s", loss, error)


def read_record(run_dir: str, name: str, kind: type[Content], otherwise: Content) -> Content:
    """What `write_record` wrote; `otherwise` without a `run_dir`, or a file that can be read."""
    path = Path(run_dir, name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind) if run_dir else otherwise
    except FileNotFoundError:
        return otherwise
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        logger.error("%s cannot be read: %s", path, error)
        return otherwise


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file whole.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    # Two front ends may write at once.
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
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
    draft = Path(run_dir, f"{OWNERS}.new")
    # Not every file system has locks; without the file the folder is never taken for an orphan.
    with suppress(OSError):
        descriptor = os.open(draft, os.O_RDONLY | os.O_CREAT, 0o600)
        # Locked before it has its name: nobody sees it without an owner.
        _held.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        draft.rename(Path(run_dir, OWNERS))
    return run_dir


def own_run_dir(run_dir: str) -> None:
    """Makes this process an owner, until it ends, of a folder that `make_run_dir` made."""
    with suppress(OSError):
        descriptor = os.open(Path(run_dir, OWNERS), os.O_RDONLY | os.O_NOFOLLOW)
        _held.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _remove_if_orphaned(path: Path) -> None:
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        return
    descriptor = os.open(path / OWNERS, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        # Fails while an owner lives, and while another start removes the folder.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), (path / OWNERS).lstat()):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
