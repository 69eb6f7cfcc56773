"""What the Dockerfile copies before it installs is what the installation reads; needs no Docker."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from harness.servers import REPOSITORY
from titopool import __version__

INSTALL = re.compile(r"^RUN (?P<before>mkdir .*?) \\\n +&& .*make install ", re.M)


def are_sent(path: str) -> bool:
    """Whether .dockerignore, which names what to keep, sends the file `path` to the engine."""
    kept = re.findall(r"^!(.*)$", (REPOSITORY / ".dockerignore").read_text(), re.M)
    return any(path == one or (one.endswith("/") and path.startswith(one)) for one in kept)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The folder in which the image runs `make install`, without its virtual environment."""
    text = (REPOSITORY / "Dockerfile").read_text()
    install = INSTALL.search(text)
    assert install is not None
    for words in re.findall(r"^COPY (.*)$", text[: install.start()], re.M):
        *sources, target = words.split()
        for source in map(REPOSITORY.joinpath, sources):
            files = [source] if source.is_file() else filter(Path.is_file, source.rglob("*"))
            for file in files:
                if not are_sent(file.relative_to(REPOSITORY).as_posix()):
                    continue
                # COPY copies a folder's content, and a file into a target that ends with a slash.
                name = file.relative_to(source) if source.is_dir() else file.name
                path = tmp_path / target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, path)
    subprocess.run(["bash", "-euc", install["before"]], cwd=tmp_path, check=True, timeout=30)
    return tmp_path


def test_the_package_can_be_read_from_the_copied_files(copied: Path) -> None:
    code = """
from setuptools import build_meta

build_meta.get_requires_for_build_editable()
print(build_meta.prepare_metadata_for_build_editable("."))
"""
    # Without `site`, Python reads no .pth file: this environment's own titopool is not found.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=copied, timeout=120, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": sysconfig.get_paths()["purelib"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    metadata = (copied / done.stdout.split()[-1] / "METADATA").read_text()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nProvides-Extra: cpu\n" in metadata


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_make_install_finds_its_files(copied: Path, platform: str) -> None:
    command = ["make", "--dry-run", "install", f"PLATFORM={platform}"]
    done = subprocess.run(command, cwd=copied, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in re.findall(r"-c (\S+)", done.stdout):
        assert (copied / path).is_file(), path
