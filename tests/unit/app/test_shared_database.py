"""The check of the folder in which front ends share their files."""

import resource
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from app.shared_database import CHECK_BYTES, check_folder
from titopool.errors import ConfigError


def test_a_folder_is_checked_and_left_as_it_was(tmp_path: Path):
    check_folder(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_where_the_log_does_not_work_is_refused(tmp_path: Path, monkeypatch):
    """As on a file system without memory that processes share: SQLite has an interface without it."""
    connect = sqlite3.connect

    def connect_without_shared_memory(path: Path, **options: Any) -> sqlite3.Connection:
        return connect(f"file:{path}?vfs=unix-dotfile", uri=True, **options)

    monkeypatch.setattr(sqlite3, "connect", connect_without_shared_memory)
    with pytest.raises(ConfigError, match=r"run_dir: .* got journal_mode delete\); choose one"):
        check_folder(str(tmp_path))


def test_a_full_disk_is_no_reason_to_refuse_a_folder(tmp_path: Path, caplog):
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHECK_BYTES - 1, hard))
    try:
        check_folder(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path} cannot be checked" in caplog.text
