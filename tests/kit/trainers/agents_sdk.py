"""examples/openai_agents.py with openai-agents, which is in a folder of its own (`make tools`)."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from tests.kit.peers.verifiers_rollouts import VERIFIERS_FOLDER


@contextmanager
def sdk_example() -> Iterator[ModuleType]:
    assert VERIFIERS_FOLDER.is_dir(), f"no openai-agents in {VERIFIERS_FOLDER}; see `make tools`"
    sys.path.append(str(VERIFIERS_FOLDER))
    try:
        yield importlib.import_module("examples.openai_agents")
    finally:
        sys.path.remove(str(VERIFIERS_FOLDER))
