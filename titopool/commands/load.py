"""The load of `titopool bench`: requests of random ids, some at once, each with its times.

Times are seconds of this process's monotonic clock. A request's time begins right before it is sent;
the waiting for a place among those that run at once does not count.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from titopool.client.async_client import AsyncClient
from titopool.errors import TitopoolError

# Longest line of a stream: one event.
MAX_EVENT_BYTES = 2**22


@dataclass(frozen=True)
class Shape:
    """What is sent: counts, and lengths in tokens."""

    num_prompts: int
    concurrency: int
    input_len: int
    output_len: int
    streamed: bool
    # Ask for the log-probability of each sampled token.
    logprobs: bool = True
    seed: int = 0
    timeout_s: float = 600.0


@dataclass
class Outcome:
    """What became of one request."""

    num_tokens: int = 0
    latency_s: float = 0.0
    # None: not streamed, or no token came.
    first_token_s: float | None = None
    # "": it was completed.
    error_code: str = ""
    error: str = ""


@dataclass(frozen=True)
class Run:
    """All outcomes, and the time from the first request's sending to the last answer."""

    outcomes: Sequence[Outcome]
    wall_s: float
    # Of this process, in the same time.
    cpu_s: float


def random_prompts(shape: Shape, vocab_size: int) -> list[np.ndarray]:
    """int32 ids of shape [input_len] for each prompt, the same for the same seed."""
    numbers = np.random.default_rng(shape.seed)
    size = (shape.num_prompts, shape.input_len)
    return list(numbers.integers(0, vocab_size, size, dtype=np.int32))


async def run(
    client: AsyncClient, prompts: Sequence[np.ndarray], shape: Shape, on_end: Callable[[], None]
) -> Run:
    """Sends all prompts, `shape.concurrency` at once, each in a request of its own."""
    places = asyncio.Semaphore(shape.concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=shape.timeout_s)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=MAX_EVENT_BYTES
    ) as session:

        async def one(prompt: np.ndarray) -> Outcome:
            async with places:
                outcome = Outcome()
                began = time.monotonic()
                try:
                    if shape.streamed:
                        await _stream(client, session, prompt, shape, outcome, began)
                    else:
                        await _generate(client, prompt, shape, outcome)
                except TitopoolError as error:
                    outcome.error_code, outcome.error = error.code, str(error)
                except TimeoutError:
                    outcome.error_code = "timed_out"
                    outcome.error = f"expected an answer within {shape.timeout_s:g} s, got none"
                except (aiohttp.ClientError, ValueError) as error:
                    outcome.error_code, outcome.error = "connection_lost", str(error)
                outcome.latency_s = time.monotonic() - began
                on_end()
                return outcome

        began, cpu_began = time.monotonic(), time.process_time()
        outcomes = await asyncio.gather(*map(one, prompts))
        return Run(outcomes, time.monotonic() - began, time.process_time() - cpu_began)


async def _generate(
    client: AsyncClient, prompt: np.ndarray, shape: Shape, outcome: Outcome
) -> None:
    (result,) = await client.generate(
        [prompt], max_tokens=shape.output_len, ignore_eos=True, temperature=1.0,
        logprobs=0 if shape.logprobs else None,
    )  # fmt: skip
    outcome.num_tokens = len(result.completions[0].ids)


async def _stream(
    client: AsyncClient,
    session: aiohttp.ClientSession,
    prompt: np.ndarray,
    shape: Shape,
    outcome: Outcome,
    began: float,
) -> None:
    sampling = {"max_tokens": shape.output_len, "ignore_eos": True, "temperature": 1.0}
    if shape.logprobs:
        sampling["logprobs"] = 0
    body = {"token_ids": prompt.tolist(), "sampling_params": sampling, "stream": True}
    headers = {"Authorization": f"Bearer {client.api_key}"} if client.api_key else {}
    url = client.base_url + "/inference/v1/generate"
    async with session.post(url, json=body, headers=headers) as answer:
        if answer.status != 200:
            raise _error_of(_json(await answer.text()), answer.status)
        async for line in answer.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise _error_of(event, 500)
            count = sum(len(choice["token_ids"]) for choice in event["choices"])
            if count and outcome.first_token_s is None:
                outcome.first_token_s = time.monotonic() - began
            outcome.num_tokens += count


def _json(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _error_of(body: Mapping[str, Any], status: int) -> TitopoolError:
    given = body.get("error")
    fields = given if isinstance(given, dict) else {}
    error = TitopoolError(str(fields.get("message", f"expected status 200, got {status}")))
    # The code of this error only; its class stands for all others.
    vars(error)["code"] = str(fields.get("code", f"http_{status}"))
    return error
