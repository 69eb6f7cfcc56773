"""Keeps the working folder off the import path of the server's processes.

`app` and `workers` are common names, so the working folder may hold other modules of these names.
Child processes, also those that vLLM starts, get an environment without the working folder on the
import path (`child_environment`). `python -m titopool.launch` is gunicorn's command with the same
property. All processes still run in the working folder, so relative paths mean the same everywhere.
"""

import os
import signal
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

PACKAGES = ("app", "titopool", "workers")
# The folder that holds the three packages: a checkout, or pip's site-packages.
HOME = Path(__file__).resolve().parent.parent


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child process that runs a module of this server."""
    # An empty entry in PYTHONPATH would be the working folder.
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    # PYTHONPATH is searched before the standard library, and some packages in site-packages would
    # replace modules of the standard library. So site-packages is added only where it must be.
    if HOME.name not in ("site-packages", "dist-packages") or _hold_other_packages(folders):
        folders.insert(0, str(HOME))
    path = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    rest = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return rest | path | {"PYTHONSAFEPATH": "1"}


def execute(module: str, *arguments: str, environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by Python that runs `module`."""
    command = [sys.executable, "-m", module, *arguments]
    os.execve(sys.executable, command, child_environment(environ))


def _hold_other_packages(folders: list[str]) -> bool:
    """Whether `folders` hold a package or module with the name of one of `PACKAGES`."""
    found = [PathFinder.find_spec(name, folders) for name in PACKAGES]
    # A spec without an origin is a folder without __init__.py: Python prefers a later package.
    return any(spec is not None and spec.origin is not None for spec in found)


def run_gunicorn() -> None:
    """gunicorn's command with the arguments of this process."""
    # Until gunicorn has its own handler, Ctrl-C ends this process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Only here: other users of this module, such as `titopool doctor`, need no gunicorn.
    from gunicorn.app.wsgiapp import WSGIApplication

    class GunicornServer(WSGIApplication):  # type: ignore[misc]
        """gunicorn's command; gunicorn's own class puts the working folder on the import path."""

        def chdir(self) -> None:
            """Changes to the folder of gunicorn's setting `chdir`."""
            os.chdir(self.cfg.chdir)

    GunicornServer("%(prog)s [OPTIONS] [APP_MODULE]").run()


if __name__ == "__main__":
    run_gunicorn()
