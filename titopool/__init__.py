"""titopool: a token-in/token-out generation server for reinforcement-learning post-training.

    from titopool import Client, AsyncClient, Rollout, run_rollouts

Trainers import this package, and both sides of the server share it: `app` (the HTTP front end) and
`workers` (one process for each engine). It imports neither side, nor Flask, vLLM or torch, at the
top of a module. The names above are imported at their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from titopool.release import RELEASE as __version__

if TYPE_CHECKING:
    from titopool.client.agent_sessions import AsyncSession, Session
    from titopool.client.async_client import AsyncClient
    from titopool.client.results import Completion, PromptResult, Score, SessionSample
    from titopool.client.sync_client import Client
    from titopool.errors import TitopoolError
    from titopool.rollouts.agents import AgentRun, run_agents, run_agents_async
    from titopool.rollouts.async_runner import run_rollouts_async
    from titopool.rollouts.batches import TokenBatch, pad_rollouts
    from titopool.rollouts.pipeline import TokenPipeline
    from titopool.rollouts.rollout import Rollout
    from titopool.rollouts.runner import run_rollouts

__all__ = [
    "AgentRun",
    "AsyncClient",
    "AsyncSession",
    "Client",
    "Completion",
    "PromptResult",
    "Rollout",
    "Score",
    "Session",
    "SessionSample",
    "TitopoolError",
    "TokenBatch",
    "TokenPipeline",
    "__version__",
    "pad_rollouts",
    "run_agents",
    "run_agents_async",
    "run_rollouts",
    "run_rollouts_async",
]

_MODULES = {
    "AgentRun": "titopool.rollouts.agents",
    "AsyncClient": "titopool.client.async_client",
    "AsyncSession": "titopool.client.agent_sessions",
    "Client": "titopool.client.sync_client",
    "Completion": "titopool.client.results",
    "PromptResult": "titopool.client.results",
    "Rollout": "titopool.rollouts.rollout",
    "Score": "titopool.client.results",
    "Session": "titopool.client.agent_sessions",
    "SessionSample": "titopool.client.results",
    "TitopoolError": "titopool.errors",
    "TokenBatch": "titopool.rollouts.batches",
    "TokenPipeline": "titopool.rollouts.pipeline",
    "pad_rollouts": "titopool.rollouts.batches",
    "run_agents": "titopool.rollouts.agents",
    "run_agents_async": "titopool.rollouts.agents",
    "run_rollouts": "titopool.rollouts.runner",
    "run_rollouts_async": "titopool.rollouts.async_runner",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
