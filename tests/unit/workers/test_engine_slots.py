"""A completion's engine slot is free once the engine has made it, while its text is still parsed."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.settings.sources import from_command_line
from titopool.wire.messages import Job
from workers.engine.base import FreeSlots
from workers.engine.outputs.completions import RunContext
from workers.engine.vllm import VllmEngine

TIMEOUT_S = 10.0
COMPLETION = SimpleNamespace(
    finish_reason="stop", token_ids=[1, 2], text="text", logprobs=None, stop_reason=None
)
OUTPUT = SimpleNamespace(outputs=[COMPLETION], num_cached_tokens=0)


class NotedSlots(FreeSlots):
    def __init__(self) -> None:
        self.given_back = list[int]()

    def give_back(self, num_steps: int, took_s: float) -> None:
        self.given_back.append(num_steps)


class Waiting:
    """A parser that waits to be told, and may fail then."""

    def __init__(self, *, fails: bool):
        self.fails = fails
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def whole(self, text: str, *_: Any) -> Any:
        self.has_begun.set()
        await self.may_end.wait()
        if self.fails:
            raise RuntimeError("staged")
        return {"content": text}, "stop"


@pytest.mark.parametrize("fails", [False, True])
def test_a_slot_is_given_back_before_the_text_is_parsed(fails: bool):
    engine = VllmEngine(from_command_line(["--model", "m"]), on_cpu=True)

    async def generate(*_: Any) -> AsyncIterator[Any]:
        yield OUTPUT

    engine._llm = SimpleNamespace(
        generate=generate, output_processor=SimpleNamespace(request_states={})
    )
    options = msgspec.Raw(encode_options(SamplingOptions()))
    job = Job(1, 1, np.int32([5]).tobytes(), 1, 3, options)

    async def run() -> None:
        parsing, slots = Waiting(fails=fails), NotedSlots()
        params: Any = SimpleNamespace(prompt_logprobs=None)
        context = RunContext(params, lambda _: None, parsing)  # type: ignore[arg-type]
        generating = asyncio.create_task(engine._generate(job, None, context, slots))
        await asyncio.wait_for(parsing.has_begun.wait(), TIMEOUT_S)
        assert slots.given_back == [2]
        parsing.may_end.set()
        await asyncio.wait([generating], timeout=TIMEOUT_S)
        assert (generating.exception() is not None) == fails
        assert slots.given_back == [2]

    with engine.versions.job(job, lambda: None):
        asyncio.run(run())
