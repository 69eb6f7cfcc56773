"""The counts of one front end."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from app.counts.families import FAMILIES, Family
from app.counts.shared_file import Counts, SharedFile, read_others, sum_of

_BY_NAME = {family.name: family for family in FAMILIES}


class Series(NamedTuple):
    """One combination of labels of a family, with its values (`Family.num_values`)."""

    family: Family
    labels: tuple[str, ...]
    values: list[float]


class FrontEndCounts:
    """What this process has counted since its start, and with it the whole server."""

    def __init__(self, run_dir: str = ""):
        """`run_dir`: where the server's other processes count; "": this process counts alone."""
        self._run_dir = run_dir
        self._file = SharedFile(run_dir)
        self._known: dict[tuple[Family, tuple[str, ...]], memoryview[float]] = {}

    def values(self, family: Family, *labels: str) -> "memoryview[float]":
        """The values of a series, to change in place; the labels must come from a small set."""
        key = (family, labels)
        found = self._known.get(key)
        if found is None:
            found = self._file.reserve(_encode([family.name, *labels]), family.num_values)
            self._known[key] = found
        return found

    def series(self) -> list[Series]:
        """All series of the whole server, by family."""
        counts = [self._file.read()]
        if self._file.path is not None:
            counts.append(read_others(self._run_dir, self._file.path))
        return _series_of(sum_of(counts))


def observe(
    values: "memoryview[float]", bounds: Sequence[float], value: float, times: int = 1
) -> None:
    """Counts `value` in a histogram's values."""
    values[bisect_left(bounds, value)] += times
    values[-1] += value * times


def _series_of(counts: Counts) -> list[Series]:
    found = []
    for key, values in counts.items():
        name, *labels = _decode(key)
        family = _BY_NAME.get(name)
        if family is not None and len(values) == family.num_values:
            found.append(Series(family, tuple(labels), values))
    return found


_encode = msgspec.msgpack.Encoder().encode


@lru_cache(maxsize=4096)
def _decode(key: bytes) -> list[str]:
    return msgspec.msgpack.decode(key, type=list[str])
