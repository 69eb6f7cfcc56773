"""Streams of this server and vLLM's: tokens a second, time to the first token, time between chunks.

    python -m benchmarks.streams                                            # tiny Qwen3, any machine
    python -m benchmarks.streams --shape qwen3-0.6b --num-streams 1 64 256

`--num-streams` streams begin at once. Each is a `POST /v1/completions` with one prompt of ids, and with
ids and log-probabilities in every chunk. Both servers get the same requests.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from benchmarks.bench import make_engine
from benchmarks.machine import describe_machine
from benchmarks.models import PROMPT_IDS
from benchmarks.processes import engine_environment, running
from benchmarks.targets import Titopool, VllmServe
from titopool.settings.gpus import visible_gpus

TIMEOUT_S = 300.0


class Stream(NamedTuple):
    """Times of one stream, in monotonic seconds."""

    begin: float
    # Arrival of each chunk with tokens, and the number of its tokens.
    times: list[float]
    num_tokens: list[int]


def main() -> None:
    options = parse_arguments()
    on_cpu = not visible_gpus()
    environ = engine_environment(on_cpu=on_cpu)
    result: dict[str, Any] = {"machine": describe_machine(), **vars(options), "runs": []}
    with tempfile.TemporaryDirectory() as name:
        engine = make_engine(options, Path(name), on_cpu=on_cpu)
        for target in (Titopool(1), VllmServe()):
            with running(target, engine, environ, Path(name) / "log") as server:
                url = server.url + "/v1/completions"
                measure(url, 4, options)
                for num_streams in options.num_streams:
                    for _ in range(options.repeats):
                        figures = measure(url, num_streams, options)
                        run = {"target": target.name, "num_streams": num_streams, **figures}
                        result["runs"].append(run)
                        print(json.dumps(run), flush=True)
    Path(options.out + ".json").write_text(json.dumps(result, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--num-streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-clients", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument(
        "--out", default="bench-streams", help="path of the result file, without extension"
    )
    parser.set_defaults(num_prompts=128, max_num_seqs=None, dummy_weights=True)
    return parser.parse_args()


def measure(url: str, num_streams: int, options: argparse.Namespace) -> dict[str, float]:
    """Figures of one run; in seconds except `tokens_per_s`."""
    chance = np.random.default_rng()
    prompts = chance.choice(np.array(PROMPT_IDS), (num_streams, options.input_len)).tolist()
    num_clients = min(options.num_clients, num_streams)
    # All streams begin at this time, when all client processes have started.
    start = time.monotonic() + 3
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_clients, mp_context=context) as pool:
        shares = [prompts[index::num_clients] for index in range(num_clients)]
        arguments = ([url] * num_clients, shares, [options.output_len] * num_clients)
        parts = list(pool.map(_client, *arguments, [start] * num_clients))
    streams = [stream for part in parts for stream in part]
    for stream in streams:
        if sum(stream.num_tokens) != options.output_len:
            raise SystemExit(f"expected {options.output_len} tokens, got {sum(stream.num_tokens)}")
    gaps = [b - a for one in streams for a, b in zip(one.times, one.times[1:], strict=False)]
    elapsed_s = max(one.times[-1] for one in streams) - min(one.begin for one in streams)
    return {
        "tokens_per_s": num_streams * options.output_len / elapsed_s,
        "first_token_s": statistics.median(one.times[0] - one.begin for one in streams),
        "between_chunks_s": statistics.median(gaps),
        "between_chunks_p99_s": float(np.quantile(gaps, 0.99)),
    }


def _client(url: str, prompts: list[list[int]], output_len: int, start: float) -> list[Stream]:
    return asyncio.run(_read_all(url, prompts, output_len, start))


async def _read_all(
    url: str, prompts: list[list[int]], output_len: int, start: float
) -> list[Stream]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        return await asyncio.gather(*(_read(session, url, one, output_len) for one in prompts))


async def _read(
    session: aiohttp.ClientSession, url: str, prompt: list[int], output_len: int
) -> Stream:
    body = {
        "prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "logprobs": 0,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    stream = Stream(time.monotonic(), [], [])
    async with session.post(url, json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                if choice["token_ids"]:
                    stream.times.append(time.monotonic())
                    stream.num_tokens.append(len(choice["token_ids"]))
    return stream


if __name__ == "__main__":
    main()
