"""titopool: a token-in/token-out generation server for reinforcement-learning post-training.

Trainers import this package, and both sides of the server share it: `app` (the HTTP front end) and
`workers` (one process for each engine). It imports neither side, nor Flask, vLLM or torch, at the
top of a module.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"

# Public names and their modules, which are imported at the first use.
_EXPORTS = {
    "Rollout": "titopool.rollouts.rollout",
    "TokenPipeline": "titopool.rollouts.pipeline",
    "pad_rollouts": "titopool.rollouts.batches",
    "run_rollouts": "titopool.rollouts.runner",
}


def __getattr__(name: str) -> _Any:
    if name in _EXPORTS:
        return getattr(_import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
