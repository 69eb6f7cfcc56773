"""The environment of the server's own processes: they import this package wherever they start.

`app` and `workers` are common names, and the working folder may hold others of these names. So
the working folder is not on the import path of these processes, nor of those that vLLM
starts. It stays the working folder: relative paths, vLLM's own among them, mean what they say.
"""

import os
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGES = ("app", "titopool", "workers")
# The folder that holds the three packages: a checkout, or where pip has installed them.
HOME = Path(__file__).resolve().parent.parent


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child process that runs a module of ours."""
    # An empty part of PYTHONPATH would mean the working folder.
    parts = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    # What stands in PYTHONPATH goes before the standard library, which some packages of
    # site-packages would replace. So site-packages is named only where it must be.
    if HOME.name not in ("site-packages", "dist-packages") or _hold_other_packages(parts):
        parts.insert(0, str(HOME))
    path = {"PYTHONPATH": os.pathsep.join(parts)} if parts else {}
    rest = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return rest | path | {"PYTHONSAFEPATH": "1"}


def _hold_other_packages(folders: list[str]) -> bool:
    """Whether a package of ours would be taken from one of `folders`."""
    found = [PathFinder.find_spec(name, folders) for name in PACKAGES]
    # Without an origin it is a folder without __init__.py, behind which Python looks further.
    return any(spec is not None and spec.origin is not None for spec in found)
