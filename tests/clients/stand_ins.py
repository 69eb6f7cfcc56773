"""Imports of published clients that their HTTP calls do not need: empty modules take their place.

`python -m tests.kit.forks tests.clients.stand_ins …` imports this module before a client. It must not
import anything heavy.
"""

import importlib.abc
import importlib.machinery
import sys
import types
import typing
from unittest.mock import MagicMock

import typing_extensions

# Sandboxes, storage, launchers and training frameworks.
ROOTS = {
    "aiofiles", "cloudpathlib", "hydra", "math_verify", "omegaconf", "prime_sandboxes",
    "prime_tunnel", "ray", "tomli_w", "torchdata",
}  # fmt: skip


class StandIn(types.ModuleType):
    """A module whose attributes are classes and functions without behaviour."""

    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> typing.Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (MagicMock,), {}) if name[0].isupper() else MagicMock()
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> typing.Any:
        if fullname.partition(".")[0] in ROOTS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


# Last, so that an installed package comes first.
sys.meta_path.append(Finder())
# SkyRL is written for Python 3.12, where pydantic takes typing's TypedDict.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
