"""First tokens of small requests beside wide ones, for `python -m benchmarks.groups --first-tokens`.

16 clients each send one small request after another, as streams of 8 tokens: beside nothing, beside one
wide request and beside four. A wide request has one prompt with n completions, or many prompts; it is
sent again when it ends. One more client reads streams of `BESIDE_LEN` tokens all the time. An engine
step is the median of their times for a token: chunks that a busy process passes on together would make
the median gap between chunks far too short. A row's last column is (p99 - p99 beside nothing) / its own
step. A small request that did not end within `LIMIT_S` is late and counts with that time, so p99 is a
lower bound.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import requests

from benchmarks.bench import say
from benchmarks.engine_counts import read_counts
from benchmarks.groups_tables import first_tokens_table
from benchmarks.models import PROMPT_IDS
from benchmarks.processes import Running
from benchmarks.streams import Stream, read_stream, step_s
from benchmarks.workload import Call

NUM_CLIENTS, SMALL_LEN, BESIDE_LEN = 16, 8, 64
# A prompt's completions, and the prompts of a request of many prompts.
WIDTHS = (1, 64, 256, 1024, 4096)
MANY = 65_536
LIMIT_S = 30.0
# From the start of wide requests to the first small one; for an engine to be idle again; before all.
BEGIN_S, IDLE_WITHIN_S, WARM_UP_S = 5.0, 120.0, 8.0
FORK = multiprocessing.get_context("fork")


def measure_all(servers: Any, result: dict[str, Any]) -> None:
    """Starts each target, measures all rows, and writes and prints them."""
    options = servers.options
    rows = [("nothing", 0, 1, 0)]
    for number in (1, 4):
        rows += [(f"{number} of n={n}", 1, n, number) for n in options.widths]
        if options.many:
            rows.append((f"{number} of {options.many:,} prompts", options.many, 1, number))
    for target in options.targets:
        server, model = servers.get(target), servers.engine.model
        # Each front end loads its tokenizer for its first stream.
        asyncio.run(_small(server.url, model, options.input_len, WARM_UP_S))
        for title, num_prompts, n, number in rows:
            with wide(server, num_prompts, n, number, options, model):
                found = asyncio.run(_small(server.url, model, options.input_len, options.seconds))
            wait_until_idle(server.url)
            result["runs"].append({"target": target, "beside": title, **found})
            say(json.dumps(result["runs"][-1]))
            Path(f"{options.out}.json").write_text(json.dumps(result, indent=1) + "\n")
    table = first_tokens_table(result)
    Path(f"{options.out}.md").write_text(table)
    print(table)


@contextmanager
def wide(
    server: Running, num_prompts: int, n: int, number: int, options: argparse.Namespace, model: str
) -> Iterator[None]:
    """Keeps `number` wide requests in flight. In the end their clients go away."""
    words = server, num_prompts, n, options, model
    processes = [FORK.Process(target=_repeat, args=words, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    time.sleep(BEGIN_S)
    try:
        yield
        if not all(process.is_alive() for process in processes):
            raise SystemExit("a wide request failed; the cause is above")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _repeat(
    server: Running, num_prompts: int, n: int, options: argparse.Namespace, model: str
) -> None:
    chance, target = random.Random(), server.target
    while True:
        prompts = [chance.choices(PROMPT_IDS, k=options.input_len) for _ in range(num_prompts)]
        call = Call(prompts, n=n, sampling=options.sampling)
        answer = requests.post(
            f"{server.url}{target.path_of(call)}", headers=dict(target.headers), timeout=3600,
            data=target.body(call, options.max_tokens, model),
        )  # fmt: skip
        if answer.status_code != 200:
            raise SystemExit(f"a wide request got {answer.status_code}: {answer.text[:1000]}")


async def _small(url: str, model: str, input_len: int, seconds: float) -> dict[str, Any]:
    """First tokens of small requests begun within `seconds`, and an engine step."""
    chance, end = random.Random(), time.monotonic() + seconds
    waits: list[float] = []
    beside: list[Stream] = []
    num_late = 0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def read(max_tokens: int) -> Stream:
            ids = chance.choices(PROMPT_IDS, k=input_len)
            body = {
                "model": model, "prompt": ids, "max_tokens": max_tokens, "ignore_eos": True,
                "logprobs": 0, "stream": True, "return_token_ids": True,
            }  # fmt: skip
            stream = await read_stream(session, f"{url}/v1/completions", body)
            if sum(stream.num_tokens) != max_tokens:
                raise SystemExit(f"expected {max_tokens} tokens, got {stream.num_tokens}")
            return stream

        async def client() -> None:
            nonlocal num_late
            while time.monotonic() < end:
                try:
                    stream = await asyncio.wait_for(read(SMALL_LEN), LIMIT_S)
                    waits.append(stream.times[0] - stream.begin)
                except TimeoutError:
                    num_late += 1
                    waits.append(LIMIT_S)

        async def reader() -> None:
            while time.monotonic() < end:
                try:
                    beside.append(await asyncio.wait_for(read(BESIDE_LEN), seconds + LIMIT_S))
                except TimeoutError:
                    return

        await asyncio.gather(reader(), *(client() for _ in range(NUM_CLIENTS)))
    steps = [step_s(one, 0) for one in beside]
    return {
        "p50_s": float(np.quantile(waits, 0.5)), "p99_s": float(np.quantile(waits, 0.99)),
        "num_requests": len(waits), "num_late": num_late,
        "step_s": statistics.median(steps) if steps else None,
    }  # fmt: skip


def wait_until_idle(url: str) -> None:
    """Until the engine runs nothing of the clients that went away."""
    # This server's workers send their engine's metrics every 2 s.
    time.sleep(3)
    deadline = time.monotonic() + IDLE_WITHIN_S
    while read_counts(url).num_running:
        if time.monotonic() > deadline:
            raise SystemExit(
                f"sequences of clients that went away {IDLE_WITHIN_S:.0f} s ago still run"
            )
        time.sleep(1)
