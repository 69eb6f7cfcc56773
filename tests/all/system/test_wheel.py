"""The wheel contains the whole server, and works without the checkout."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import psutil
import pytest
import requests

from harness.servers import (
    KV_CACHE,
    REPOSITORY,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Server,
    first_request,
    free_port,
    kill_all,
    wait_until,
    wait_until_ended,
)
from titopool import __version__

ROOTS = ("app", "titopool", "workers")
DATA = {"titopool/demo_tokenizer.json"} | {
    path.relative_to(REPOSITORY).as_posix()
    for path in (REPOSITORY / "app/operators/page/static").rglob("*")
    if path.is_file()
}
INSTALL_TIMEOUT_S = 900.0
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, because setuptools writes into the source folder."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, source)
    for name in ROOTS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run([*PIP, "wheel", *options, str(source)], check=True, timeout=120)
    (built,) = folder.glob("titopool-*.whl")
    return built


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel; its other packages come from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    options = ["--no-deps", "--no-index", "--no-compile"]
    pip = [*PIP, "--python", str(python), "install", *options]
    subprocess.run([*pip, str(wheel)], check=True, timeout=120)
    # Added after the installation, or pip would find the checkout's titopool there. Python adds the
    # folder to the import path but reads no .pth file in it, so the editable installation has no
    # effect.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python.parent


def environment(**variables: str) -> dict[str, str]:
    """Environment without the checkout on the import path, and without settings."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key != "PYTHONPATH" and not key.startswith("TITOPOOL_")
    }
    return kept | variables


def run(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=environment(), cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_the_wheel_contains_every_module_and_nothing_else(wheel: Path):
    sources = {
        path.relative_to(REPOSITORY).as_posix()
        for root in ROOTS
        for path in (REPOSITORY / root).rglob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == sources | DATA


def test_the_commands_start_without_the_checkout(commands: Path, tmp_path: Path):
    code = "import app, titopool, workers; print(app.__file__, titopool.__file__, workers.__file__)"
    found = run(tmp_path, commands / "python", "-c", code)
    assert found.stdout.count(str(commands.parent)) == 3, found.stdout + found.stderr
    assert run(tmp_path, commands / "titopool", "--version").stdout == f"{__version__}\n"
    assert "--num-workers" in run(tmp_path, commands / "titopool", "serve", "--help").stdout
    worker = run(tmp_path, commands / "python", "-P", "-m", "workers")
    assert worker.returncode != 0
    assert "--endpoint is missing; usage: " in worker.stdout + worker.stderr


@pytest.mark.parametrize(
    "words",
    [["titopool", "serve"], ["python", "-m", "gunicorn", "app:create_app()"]],
    ids=["command", "gunicorn"],
)
def test_the_server_runs_without_the_checkout(commands: Path, tmp_path: Path, words: list[str]):
    """A front end; its pool has no worker, so that no engine starts."""
    shutil.copy(REPOSITORY / "gunicorn.conf.py", tmp_path)
    port, log = free_port(), tmp_path / "log"
    variables = {"TITOPOOL_PORT": str(port), "TITOPOOL_ENDPOINTS": f"ipc://{tmp_path}/none"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [commands / words[0], *words[1:]],
            env=environment(**variables), cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def is_live() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            answer = requests.get(f"http://127.0.0.1:{port}/live", timeout=5)
        except requests.RequestException:
            return False
        return answer.status_code == 200

    try:
        wait_until(is_live, START_TIMEOUT_S, log.read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(INSTALL_TIMEOUT_S + START_TIMEOUT_S + 300)
def test_titopool_serve_answers_in_an_environment_with_the_wheel_alone(wheel: Path, tmp_path: Path):
    """What only the tests' environment has, the server does not need."""
    folder = tmp_path / "installed"
    options = [f"VENV={folder}", f"PACKAGE={wheel}", f"PYTHON={sys.executable}"]
    # .ci/run names what installs faster than pip.
    if installer := os.environ.get("CI_INSTALL"):
        options.append(f"INSTALL={installer} --python {folder}/bin/python")
    subprocess.run(
        ["make", "install", *options], env=environment(), cwd=REPOSITORY, check=True,
        timeout=INSTALL_TIMEOUT_S,
    )  # fmt: skip
    port, log = free_port(), tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [folder / "bin" / "titopool", "serve", "--port", str(port), *KV_CACHE],
            env=environment(), cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    server = Server(process, f"http://127.0.0.1:{port}", log)
    descendants: list[psutil.Process] = []
    try:
        server.wait_until_ready()
        descendants = psutil.Process(process.pid).children(recursive=True)
        assert {one.cmdline()[0] for one in descendants} & {f"{folder}/bin/python"}
        assert len(first_request(server.url)["completion_ids"][0]) == 8
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0, server.log
        wait_until_ended(descendants)
    finally:
        process.kill()
        process.wait()
        kill_all(descendants)
