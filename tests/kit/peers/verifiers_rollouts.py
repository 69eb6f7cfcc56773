"""Interleaved rollouts of the published verifiers package, unmodified, in a separate process.

`make tools` installs verifiers without most of its dependencies, in a folder that this module adds
to the import path.
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.kit.forks import Forks

VERIFIERS_FOLDER = Path(os.environ.get("VERIFIERS_FOLDER", Path(sys.prefix) / "verifiers"))
SCRIPT = """
import asyncio, json, sys
from tests.kit.peers.verifiers_rollouts import run

print(json.dumps(asyncio.run(run(sys.argv[1], **json.loads(sys.argv[2])))))
"""
QUESTIONS = ["Hello, ü!", "Count to three."]


def rollouts(url: str, **options: Any) -> list[dict[str, Any]]:
    """Each rollout's stop condition, error and turns.

    Args:
        options: `sampling` (verifiers' sampling_args), `max_turns`, `reply` (what the environment,
            or its tool, returns each turn), `with_tools`.
    """
    printed = forks().run(SCRIPT, url, json.dumps(options), timeout_s=150)
    found: list[dict[str, Any]] = json.loads(printed.splitlines()[-1])
    return found


@functools.cache
def forks() -> Forks:
    """Processes that have imported verifiers."""
    assert VERIFIERS_FOLDER.is_dir(), f"no verifiers in {VERIFIERS_FOLDER}; see `make tools`"
    return Forks("verifiers", PYTHONPATH=str(VERIFIERS_FOLDER), HF_HUB_OFFLINE="1")


async def run(url: str, sampling: dict, max_turns: int, reply: str, with_tools: bool) -> list[dict]:
    import verifiers as vf
    from datasets import Dataset
    from openai import AsyncOpenAI

    class Echo(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> list[dict]:
            return [{"role": "user", "content": f"{reply} {len(state['trajectory'])}"}]

    def look(at: str) -> str:
        """Looks at something."""
        return f"{reply} {at}"

    options: dict[str, Any] = {
        "dataset": Dataset.from_list([{"question": one, "answer": ""} for one in QUESTIONS]),
        "system_prompt": "Be brief.", "max_turns": max_turns, "interleaved_rollouts": True,
    }  # fmt: skip
    env = vf.ToolEnv(tools=[look], **options) if with_tools else Echo(**options)
    # Without retries, so that every refusal of the server shows.
    async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        outputs = await env.generate(
            env.get_dataset().repeat(3), client=client, model=model, sampling_args=sampling
        )
    return [read(state) for state in outputs["state"]]


def read(state: Any) -> dict[str, Any]:
    return {
        "stop_condition": state["stop_condition"],
        "error": repr(state["error"]) if state["error"] else None,
        "turns": [
            {
                **step["tokens"],
                "messages": step["prompt"],
                "finish_reason": step["response"].choices[0].finish_reason,
                "is_truncated": step["is_truncated"],
            }
            for step in state["trajectory"]
        ],
    }
