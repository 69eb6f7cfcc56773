"""Log-probabilities of answered completions, kept for `POST /mismatch` at whichever front end.

Each front end appends to segments of its own in a folder that all front ends of the server read. A
segment is two files: the arrays, and an index with one entry of 32 bytes for each request. Old
segments are removed by time and by size, those of front ends that have ended too.
"""

import logging
import os
import struct
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np

from app.outputs.token_arrays import sampled_logprobs
from app.pool.request import ChunkOfJob
from app.time_slices import sharing_time
from titopool.settings.config import ServerConfig
from titopool.wire.messages import Completed
from titopool.wire.run_dir import LOGPROBS

logger = logging.getLogger(__name__)

KEEP_S = 600.0
# Of one front end; the oldest goes when the next one begins.
MAX_SEGMENTS = 4
ENTRY = np.dtype([("name", "<u8"), ("end_s", "<f8"), ("offset", "<u8"), ("size", "<u8")])
PACK_ENTRY = struct.Struct("<QdQQ").pack
_DECODER = msgspec.msgpack.Decoder(list[bytes])


class KeptLogprobs:
    """The store of one front end, and its view of the others'."""

    def __init__(self, config: ServerConfig):
        """A store that keeps nothing without a run_dir, or with `kept_logprobs_bytes` of 0."""
        self._folder = Path(config.run_dir or "/nonexistent", LOGPROBS)
        self._segment_bytes = config.kept_logprobs_bytes // MAX_SEGMENTS if config.run_dir else 0
        self._segments: deque[_Segment] = deque()
        self.is_on = self._segment_bytes > 0

    def keep(self, name: str, arrays: Sequence[np.ndarray]) -> None:
        """Keeps log-probabilities, float32 [tokens] for each completion; nothing if there are none.

        Args:
            name: of the request, unique among the requests of 10 minutes; else the last one wins.
        """
        record = msgspec.msgpack.encode([one.tobytes() for one in arrays])
        if not arrays or len(record) > self._segment_bytes:
            return
        try:
            self._segment_for(len(record)).append(_number_of(name), record)
        except OSError:
            logger.exception("log-probabilities of a request could not be kept")
            # A part of a record or of an entry would shift all that follow.
            if self._segments:
                self._segments.pop().remove()

    def _segment_for(self, num_bytes: int) -> "_Segment":
        newest = self._segments[-1] if self._segments else None
        if newest and newest.size + num_bytes <= self._segment_bytes and not newest.is_old():
            return newest
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._sweep()
        while len(self._segments) >= MAX_SEGMENTS:
            self._segments.popleft().remove()
        self._segments.append(_Segment(self._folder))
        return self._segments[-1]

    def _sweep(self) -> None:
        """Removes segments that nobody may ask for any more."""
        for index in self._folder.glob("*.index"):
            try:
                if time.time() - index.stat().st_mtime > KEEP_S:
                    index.unlink()
                    index.with_suffix(".data").unlink(missing_ok=True)
            except FileNotFoundError:
                # Another front end was faster.
                continue
        while self._segments and not self._segments[0].exists():
            self._segments.popleft().close()

    def find(self, name: str) -> list[np.ndarray] | None:
        """The arrays of a request, float32 [tokens] for each completion; None: unknown or too old."""
        number = _number_of(name)
        newest: tuple[float, Path, int, int] | None = None
        for index in self._folder.glob("*.index"):
            try:
                entries = np.fromfile(index, ENTRY)
            except FileNotFoundError:
                continue
            for entry in entries[entries["name"] == number]:
                found = (float(entry["end_s"]), index, int(entry["offset"]), int(entry["size"]))
                newest = found if newest is None or newest[0] < found[0] else newest
        if newest is None or time.time() - newest[0] > KEEP_S:
            return None
        _, index, offset, size = newest
        try:
            with open(index.with_suffix(".data"), "rb") as file:
                file.seek(offset)
                record = file.read(size)
            return [np.frombuffer(one, np.float32) for one in _DECODER.decode(record)]
        except (FileNotFoundError, msgspec.DecodeError):
            # The writer has removed the segment, or could not write all of it.
            return None


class _Segment:
    """Two files that one front end appends to."""

    def __init__(self, folder: Path):
        # Unique over restarts of processes with the same number.
        name = f"{os.getpid()}-{time.monotonic_ns()}"
        self._index = folder / f"{name}.index"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._files = tuple(
            os.open(self._index.with_suffix(end), flags, 0o600) for end in (".data", ".index")
        )
        self._began_s = time.monotonic()
        self.size = 0

    def is_old(self) -> bool:
        return time.monotonic() - self._began_s > KEEP_S / MAX_SEGMENTS

    def exists(self) -> bool:
        return self._index.exists()

    def append(self, number: int, record: bytes) -> None:
        """Writes the record before its entry, so that a reader finds it whole.

        Raises:
            OSError: it could not be written; the segment must not be written to again.
        """
        data, index = self._files
        entry = PACK_ENTRY(number, time.time(), self.size, len(record))
        for file, part in ((data, record), (index, entry)):
            if (num_bytes := os.write(file, part)) != len(part):
                raise OSError(
                    f"expected to write {len(part)} bytes, wrote {num_bytes}; the disk is full"
                )
        self.size += len(record)

    def remove(self) -> None:
        self.close()
        self._index.unlink(missing_ok=True)
        self._index.with_suffix(".data").unlink(missing_ok=True)

    def close(self) -> None:
        for file in self._files:
            os.close(file)


def arrays_of(results: Sequence[Completed]) -> list[np.ndarray]:
    """The sampled tokens' log-probabilities of all completions, in order.

    Empty if one has none, or is not finite.
    """
    completions = [one for result in results for one in result.completions]
    if any(one.logprobs is None for one in completions):
        return []
    arrays = [sampled_logprobs(one) for one in sharing_time(completions)]
    return arrays if all(np.isfinite(one).all() for one in sharing_time(arrays)) else []


class StreamedLogprobs:
    """Gathers those of a stream's completions, 4 bytes for each token."""

    def __init__(self) -> None:
        # Float32, by the indices of job and completion.
        self._values: dict[tuple[int, int], bytearray] = defaultdict(bytearray)
        self._has_all = True

    def add(self, chunks: Iterable[ChunkOfJob]) -> None:
        for job_index, chunk in chunks if self._has_all else ():
            for index, piece in chunk.pieces:
                self._values[job_index, index] += sampled_logprobs(piece).tobytes()
                self._has_all &= piece.logprobs is not None or not piece.token_ids
        if not self._has_all:
            self._values.clear()

    def arrays(self) -> list[np.ndarray]:
        """As `arrays_of`, of all chunks so far."""
        arrays = [np.frombuffer(self._values[key], np.float32) for key in sorted(self._values)]
        return arrays if all(np.isfinite(one).all() for one in arrays) else []


def _number_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
