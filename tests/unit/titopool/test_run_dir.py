"""Files of run_dir, and folders that a server makes for itself."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.servers import REPOSITORY
from titopool.wire.run_dir import (
    ENDS,
    OWNERS,
    WorkerEnd,
    make_run_dir,
    own_run_dir,
    read_record,
    replace_file,
    write_record,
)


def read_ends(run_dir: str) -> dict[str, WorkerEnd]:
    return read_record(run_dir, ENDS, dict[str, WorkerEnd], {})


def test_a_record_is_read_back_and_a_broken_one_is_logged(tmp_path: Path, caplog):
    ends = {"0": WorkerEnd("it exited with code 3", 12.5)}
    assert read_ends(str(tmp_path)) == {}
    write_record(str(tmp_path), ENDS, ends, "lost")
    assert read_ends(str(tmp_path)) == ends
    assert not caplog.text
    for broken in (b"{", b"\xff", b'{"0": 1}', b"[" * 10_000):
        (tmp_path / ENDS).write_bytes(broken)
        assert read_ends(str(tmp_path)) == {}
    assert caplog.text.count(f"{tmp_path / ENDS} cannot be read") == 4
    assert read_ends("") == {}


def test_a_record_that_cannot_be_written_is_logged_only(tmp_path: Path, caplog):
    write_record(str(tmp_path / "nowhere"), ENDS, {}, "ends are lost")
    assert "ends are lost: " in caplog.text


def test_a_file_that_cannot_be_replaced_stays_and_no_draft_beside_it(tmp_path: Path):
    """A folder has the file's name: the draft is whole, and cannot take its place."""
    (tmp_path / ENDS / "x").mkdir(parents=True)
    with pytest.raises(OSError, match=ENDS):
        replace_file(tmp_path / ENDS, b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / ENDS]


OWNER = """
import sys, tempfile
from titopool.wire.run_dir import make_run_dir, own_run_dir
tempfile.tempdir = sys.argv[1]
own_run_dir(sys.argv[2]) if sys.argv[2:] else print(make_run_dir(), flush=True)
print("owns", flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(*arguments: str) -> Iterator[str]:
    """The first line of a process that owns a folder until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, cwd=REPOSITORY,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def test_a_start_clears_folders_that_no_process_owns(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = tmp_path / "titopool-of-another-program"
    foreign.mkdir()
    link = tmp_path / "titopool-link"
    with owner(str(tmp_path)) as living:
        link.symlink_to(living)
        with owner(str(tmp_path)) as left_behind:
            Path(left_behind, "worker-0.log").write_text("x")
            # The supervisor of a master that was killed.
            with owner(str(tmp_path), living) as answer:
                assert answer == "owns"
                make_run_dir()
                assert Path(left_behind).exists()
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        make_run_dir()
        assert Path(left_behind).exists()
        monkeypatch.undo()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        mine = make_run_dir()
        assert not Path(left_behind).exists()
        assert all(Path(one).exists() for one in (living, mine, foreign, link))
    own_run_dir(living)
    make_run_dir()
    assert Path(living).exists()


def test_starts_at_once_clear_nothing_of_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for index in range(20):
        orphan = tmp_path / f"titopool-{index}"
        orphan.mkdir()
        (orphan / OWNERS).touch()
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: make_run_dir(), range(40)))
    assert {str(one) for one in tmp_path.iterdir()} == set(made)
    assert len(set(made)) == 40
