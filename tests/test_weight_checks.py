"""Folders and addresses of trainers that are none are refused, whatever they are."""

import asyncio
import os
from pathlib import Path

import pytest

from titopool.errors import InvalidRequest
from workers.weights.checks import checked_folder, is_listening


@pytest.mark.parametrize(
    "name", ["loop", "in/loop", "x" * 300, "missing", "file", "\0", "..", "in/out"]
)
def test_a_folder_that_is_none_below_the_root_is_refused(tmp_path: Path, name: str):
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (root / "file").write_text("")
    os.symlink(root / "loop", root / "loop")
    os.symlink(root / "in" / "loop", root / "in" / "loop")
    os.symlink(tmp_path, root / "in" / "out")
    with pytest.raises(InvalidRequest, match="path: expected a") as caught:
        checked_folder(f"{root}/{name}", str(root))
    assert caught.value.param == "path"


def test_a_link_within_the_root_is_taken(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("")
    os.symlink(tmp_path / "a", tmp_path / "b")
    assert checked_folder(f"{tmp_path}/b", str(tmp_path)) == os.path.realpath(tmp_path / "a")


@pytest.mark.parametrize("host", ["127.0.0.1\0", "a..b", "x" * 300, "x" * 300_000, "é" * 70, ""])
def test_a_host_that_cannot_be_looked_up_does_not_answer(host: str):
    assert asyncio.run(is_listening(host, 1)) is False
