"""Streams of this server and vLLM's, and the same requests as whole answers.

    python -m benchmarks.streams                                            # tiny Qwen3, any machine
    python -m benchmarks.streams --shape qwen3-0.6b --num-streams 1 64 256

`--num-streams` streams begin at once. Each is a `POST /v1/completions` with one prompt of ids, and with
ids and log-probabilities in every chunk. Both servers get the same requests. CPU time is that of all
processes of a server, the engine's included, for each token. The time between chunks is given for all
of a run, and for its part in which all streams have begun: before, the engine's steps also process
prompts and take longer. A step is the time in which a stream gets a token in that part.
"""

import argparse
import asyncio
import gc
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
import orjson

from benchmarks.bench import make_engine
from benchmarks.machine import describe_machine
from benchmarks.models import PROMPT_IDS
from benchmarks.processes import Running, engine_environment, running
from benchmarks.targets import VLLM_SERVERS, Titopool
from titopool.settings.gpus import visible_gpus

TIMEOUT_S = 300.0
TARGETS = ("titopool", *VLLM_SERVERS)


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
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(options, Path(folder), on_cpu=on_cpu)
        made = {"titopool": Titopool(1, options=options.serve_options.split()), **VLLM_SERVERS}
        for target in (made[name] for name in options.targets):
            with running(target, engine, environ, Path(folder) / "log") as server:
                measure(server, 4, options, is_streamed=True)
                for num_streams in options.num_streams:
                    for _ in range(options.repeats):
                        for is_streamed in (False, True):
                            figures = measure(server, num_streams, options, is_streamed)
                            run = {"target": target.name, "num_streams": num_streams, **figures}
                            result["runs"].append(run)
                            print(json.dumps(run), flush=True)
            # Keeps the results so far, also if the next server fails.
            Path(options.out + ".json").write_text(json.dumps(result, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--num-streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, help="of the engines; default: their own")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS[:2])
    parser.add_argument(
        "--serve-options", default="", help="of this server, e.g. a stream interval"
    )
    parser.add_argument("--num-clients", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument(
        "--out", default="bench-streams", help="path of the result file, without extension"
    )
    parser.set_defaults(dummy_weights=True)
    options = parser.parse_args()
    # Engines have twice as many slots.
    options.num_prompts = max(options.num_streams)
    return options


def measure(
    server: Running, num_streams: int, options: argparse.Namespace, is_streamed: bool
) -> dict[str, float | bool]:
    """Figures of one run: `_s` in seconds, `cpu_us_` in µs of CPU time a token."""
    chance = np.random.default_rng()
    prompts = chance.choice(np.array(PROMPT_IDS), (num_streams, options.input_len)).tolist()
    num_clients = min(options.num_clients, num_streams)
    bodies = [
        {"prompt": prompt, "max_tokens": options.output_len, "ignore_eos": True, "logprobs": 0,
         "stream": is_streamed, "return_token_ids": True} for prompt in prompts
    ]  # fmt: skip
    before = server.cpu_s()
    # All streams begin at this time, when all client processes have started.
    start = time.monotonic() + 3
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_clients, mp_context=context) as pool:
        shares = [bodies[index::num_clients] for index in range(num_clients)]
        url = server.url + "/v1/completions"
        parts = list(pool.map(_client, [url] * num_clients, shares, [start] * num_clients))
    after = server.cpu_s()
    streams = [stream for part in parts for stream in part]
    for stream in streams:
        if sum(stream.num_tokens) != options.output_len:
            raise SystemExit(f"expected {options.output_len} tokens, got {sum(stream.num_tokens)}")
    num_tokens = num_streams * options.output_len
    elapsed_s = max(one.times[-1] for one in streams) - min(one.begin for one in streams)
    figures = {"is_streamed": is_streamed, "tokens_per_s": num_tokens / elapsed_s} | {
        f"cpu_us_{role}": 1e6 * (after[role] - before[role]) / num_tokens for role in after
    }
    if is_streamed:
        begun = max(one.times[0] for one in streams)
        gaps = gaps_of(streams, since=0)
        # Empty if the first stream ended before the last one began.
        if decoding := gaps_of(streams, since=begun):
            steps_s = [found for one in streams if (found := step_s(one, begun))]
            figures |= {
                "step_s": statistics.median(steps_s),
                "between_chunks_p99_begun_s": float(np.quantile(decoding, 0.99)),
            }
        figures |= {
            "tokens_per_chunk": num_tokens / sum(len(one.times) for one in streams),
            "first_token_s": statistics.median(one.times[0] - one.begin for one in streams),
            "between_chunks_s": statistics.median(gaps),
            "between_chunks_p99_s": float(np.quantile(gaps, 0.99)),
        }
    return figures


def gaps_of(streams: list[Stream], since: float) -> list[float]:
    """Seconds between one chunk and the next, for chunks that came after the time `since`."""
    pairs = [pair for one in streams for pair in zip(one.times, one.times[1:], strict=False)]
    return [after - before for before, after in pairs if before >= since]


def step_s(stream: Stream, since: float) -> float:
    """Seconds for each of the stream's tokens after the time `since`; 0 if there is none."""
    index = next((at for at, time_s in enumerate(stream.times) if time_s >= since), -1)
    num_tokens = sum(stream.num_tokens[index + 1 :]) if index >= 0 else 0
    return (stream.times[-1] - stream.times[index]) / num_tokens if num_tokens else 0.0


def _client(url: str, bodies: list[dict[str, Any]], start: float) -> list[Stream]:
    # A collection here would stop all of its streams, and look like a gap of the server.
    gc.disable()
    return asyncio.run(_read_all(url, bodies, start))


async def _read_all(url: str, bodies: list[dict[str, Any]], start: float) -> list[Stream]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        return await asyncio.gather(*(read_stream(session, url, one) for one in bodies))


async def read_stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Stream:
    stream = Stream(time.monotonic(), [], [])
    async with session.post(url, json=body) as answer:
        if not body["stream"]:
            (choice,) = (await answer.json(loads=orjson.loads))["choices"]
            stream.times.append(time.monotonic())
            stream.num_tokens.append(len(choice["token_ids"]))
            return stream
        async for line in answer.content:
            if line.startswith(b"data: {"):
                (choice,) = orjson.loads(line[6:])["choices"]
                if choice["token_ids"]:
                    stream.times.append(time.monotonic())
                    stream.num_tokens.append(len(choice["token_ids"]))
    return stream


if __name__ == "__main__":
    main()
