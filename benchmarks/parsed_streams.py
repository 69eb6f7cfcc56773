"""Whether chats that write a call keep the pace of the same chats unparsed, with a real engine.

    python -m benchmarks.parsed_streams --shape qwen3-8b --streams 64 256 [parser …]

The model is random, so a grammar makes each chat write the same call with a string of 4 KiB, a bias
makes it take the longest tokens, and `tool_choice` says whether the text is parsed. Rows alternate;
each takes the time between two chunks of a stream, as a client reads them, and counts the calls that
came whole. `benchmarks/parser_pace.py` does the same for every parser with a stub engine.
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import orjson

from benchmarks.bench import make_engine
from benchmarks.machine import describe_machine
from benchmarks.parser_calls import CALLS, HERMES, TOOL, WORD, all_markup
from benchmarks.processes import Running, engine_environment, running
from benchmarks.targets import Titopool
from titopool.settings.gpus import visible_gpus

NUM_BYTES = 4096
# More than one client process reads, so that none is late.
NUM_CLIENTS = 4
# From now to the first request: the processes of clients start meanwhile.
START_S = 4.0
TIMEOUT_S = 300.0
BIAS = 50.0


class Chat(NamedTuple):
    """Seconds between a stream's chunks, and whether it ended as the whole call."""

    gaps_s: list[float]
    num_tokens: int
    is_call: bool


def main() -> None:
    options = parse_arguments()
    print(json.dumps(describe_machine()))
    print("| parser | streams | p99 unparsed, parsed | ratio | at most | tokens a second | calls |")
    print("|---|---|---|---|---|---|---|")
    for name in options.parsers:
        with serving(name, options) as (server, tokenizer):
            bodies = [body_of(name, tokenizer, choice) for choice in ("none", "auto")]
            # A run of each warms up the grammar, the tokenizer and the helpers.
            _ = [run(server, body, 8) for body in bodies]
            for num_streams in options.streams:
                pairs = [
                    [run(server, body, num_streams) for body in bodies]
                    for _ in range(options.rounds)
                ]
                print(row(name, num_streams, *map(list, zip(*pairs, strict=True))), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parsers", nargs="*", default=["hermes", "glm45", "qwen3_coder"])
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    # What `make_engine` reads.
    options.dummy_weights, options.max_num_seqs = options.shape != "tiny", max(options.streams)
    return options


@contextmanager
def serving(name: str, options: argparse.Namespace) -> Iterator[tuple[Running, Any]]:
    """A server with the parser, and its tokenizer, which has the markup of all parsers."""
    from transformers import AutoTokenizer

    on_cpu = not visible_gpus()
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(
            options,
            Path(folder),
            on_cpu=on_cpu,
            max_model_len=2048 if options.shape == "tiny" else 8192,
        )
        tokenizer = AutoTokenizer.from_pretrained(engine.model)
        if options.dummy_weights:
            # Markup and a word are a token each, as with a model that calls tools.
            tokenizer.add_tokens([WORD, *sorted(all_markup(), key=len, reverse=True)])
            tokenizer.save_pretrained(engine.model)
        engine = replace(engine, options={**engine.options, "tool_call_parser": name})
        log = Path(folder) / "log"
        with running(Titopool(1), engine, engine_environment(on_cpu=on_cpu), log) as server:
            yield server, tokenizer


def body_of(name: str, tokenizer: Any, tool_choice: str) -> dict[str, Any]:
    text = CALLS.get(name, HERMES).replace("…", WORD * (NUM_BYTES // len(WORD)))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return {
        "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "temperature": 0,
        "tool_choice": tool_choice, "max_tokens": 1500, "stream": True, "return_token_ids": True,
        "logit_bias": {str(one): BIAS for one in set(ids)},
        "structured_outputs": {"grammar": f"root ::= {json.dumps(text, ensure_ascii=False)}"},
    }  # fmt: skip


def run(server: Running, body: dict[str, Any], num_streams: int) -> tuple[list[Chat], float]:
    """The streams, and tokens a second of all of them."""
    num_clients = min(NUM_CLIENTS, num_streams)
    start = time.monotonic() + START_S
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_clients, mp_context=context) as pool:
        calls = [
            pool.submit(_client, server.url, body, num_streams // num_clients, start)
            for _ in range(num_clients)
        ]
        chats = [chat for call in calls for chat in call.result()]
    elapsed_s = max(sum(chat.gaps_s) for chat in chats)
    return chats, sum(chat.num_tokens for chat in chats) / elapsed_s


def _client(url: str, body: dict[str, Any], num_streams: int, start: float) -> list[Chat]:
    return asyncio.run(_read_all(url, body, num_streams, start))


async def _read_all(url: str, body: dict[str, Any], num_streams: int, start: float) -> list[Chat]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        return await asyncio.gather(*(read_chat(session, url, body) for _ in range(num_streams)))


async def read_chat(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Chat:
    times, ids, arguments, end = [], [], "", ""
    async with session.post(url + "/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"a stream failed: {event}")
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    times.append(time.monotonic())
                    ids += choice["token_ids"]
                end = choice["finish_reason"] or end
                for call in choice["delta"].get("tool_calls") or ():
                    arguments += call["function"].get("arguments") or ""
    return Chat(np.diff(times).tolist(), len(ids), end == "tool_calls" and is_whole(arguments))


def is_whole(arguments: str) -> bool:
    words = orjson.loads(arguments)["a"].split()
    return words == [WORD.strip()] * (NUM_BYTES // len(WORD))


def row(
    name: str,
    num_streams: int,
    unparsed: list[tuple[list[Chat], float]],
    parsed: list[tuple[list[Chat], float]],
) -> str:
    gaps = [
        np.array([gap for chats, _ in runs for chat in chats for gap in chat.gaps_s])
        for runs in (unparsed, parsed)
    ]
    before_s, after_s = (float(np.percentile(one, 99)) for one in gaps)
    rates = [float(np.median([rate for _, rate in runs])) for runs in (unparsed, parsed)]
    num_calls = sum(chat.is_call for chats, _ in parsed for chat in chats)
    return (
        f"| `{name}` | {num_streams} | {1e3 * before_s:.0f}, {1e3 * after_s:.0f} ms | "
        f"{after_s / before_s:.2f} | {1e3 * gaps[0].max():.0f}, {1e3 * gaps[1].max():.0f} ms | "
        f"{rates[0]:,.0f}, {rates[1]:,.0f} | {num_calls} of {num_streams * len(parsed)} |"
    )


if __name__ == "__main__":
    main()
