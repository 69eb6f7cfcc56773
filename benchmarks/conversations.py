"""Conversations of several turns: this server, vLLM's with data parallelism or behind vLLM's router,
and the bare engines.

    python -m benchmarks.conversations                                          # tiny Qwen3, any machine
    python -m benchmarks.conversations --shape qwen3-0.6b --num-workers 4

`benchmarks/conversations.json` fixes the number of conversations, their turns, lengths and seed for each
shape. All conversations begin at once and share a system prompt. A turn is a request with all ids so
far; the next turn appends the ids that were sampled and a tool's answer. All answers have log-
probabilities. The bare engines are as many `AsyncLLM`s, each in a process of its own, with the
conversations dealt out in turn: each conversation finds all of its prefix. vLLM's router stands before
as many `vllm serve`s; only it gets the id of the conversation in the header `X-Session-ID`, which its
policies for conversations need. Prints and keeps, for each target: seconds until the last conversation
ended, tokens a second, the share of prompt tokens that the prefix caches had, and the latency of a turn.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson

from benchmarks.bench import make_engine
from benchmarks.machine import describe_machine
from benchmarks.models import PROMPT_IDS
from benchmarks.processes import Running, engine_environment, running, share_of
from benchmarks.targets import Engine, Target, Titopool, VllmServe
from harness.servers import free_port
from titopool.settings.gpus import visible_gpus

PLANS = Path(__file__).with_suffix(".json")
TARGETS = ("bare engines", "vllm serve", "vllm router", "titopool")
TIMEOUT_S = 1800.0
# The most conversations of the first round: some for each front end, which loads its tokenizer then.
WARM_UP = 64


class Turn(NamedTuple):
    """A turn's own ids, and the tokens of its answer."""

    ids: list[int]
    answer_len: int


class Answer(NamedTuple):
    """What a target made of a turn."""

    token_ids: list[int]
    num_cached: int


class Measured(NamedTuple):
    """One turn, in seconds and tokens."""

    elapsed_s: float
    num_prompt: int
    num_cached: int
    num_sampled: int


# The conversation's id, all token ids so far, and the tokens to sample.
Ask = Callable[[str, list[int], int], Awaitable[Answer]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    plans = json.loads(PLANS.read_text())
    parser.add_argument("--shape", choices=plans, default="tiny")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--serve-options", default="", help="of this server")
    parser.add_argument(
        "--router", metavar="FOLDER", default=str(Path(sys.prefix) / "clients" / "vllm-router"),
        help="with the package vllm-router",
    )  # fmt: skip
    # The policy that the router's documentation recommends for conversations.
    parser.add_argument("--router-policy", default="consistent_hash")
    parser.add_argument(
        "--out", default="bench-conversations", help="path of the result file, without extension"
    )
    options = parser.parse_args()
    if "vllm router" in options.targets and not Path(options.router, "vllm_router").is_dir():
        parser.error(f"no vllm_router in {options.router}: make bench-conversations installs it")
    plan = plans[options.shape]
    # What `make_engine` reads.
    options.dummy_weights, options.num_prompts = options.shape != "tiny", plan["conversations"]
    options.max_num_seqs = plan["max_num_seqs"]
    on_cpu = not visible_gpus()
    result: dict[str, Any] = {
        "machine": describe_machine(), **vars(options), "plan": plan, "runs": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = make_engine(options, folder, on_cpu=on_cpu, max_model_len=plan["max_model_len"])
        for target in options.targets:
            for run in measure(target, engine, plan, options, folder, on_cpu=on_cpu):
                result["runs"].append({"target": target, **run})
                print(json.dumps(result["runs"][-1]), flush=True)
                Path(options.out + ".json").write_text(json.dumps(result, indent=1) + "\n")


def conversations(plan: dict[str, Any], repeat: int) -> list[list[Turn]]:
    """The turns of each conversation; those of two repeats share nothing."""
    chance = random.Random(plan["seed"] + repeat)

    def length(of: dict[str, float]) -> int:
        return max(
            1, min(int(of["most"]), int(of["median"] * chance.lognormvariate(0, of["sigma"])))
        )

    def ids(number: int) -> list[int]:
        return chance.choices(PROMPT_IDS, k=number)

    system = ids(plan["system_len"])
    return [
        [
            Turn(
                [*system, *ids(length(plan["user_len"]))]
                if turn == 0
                else ids(length(plan["tool_len"])),
                length(plan["answer_len"]),
            )
            for turn in range(plan["turns"])
        ]
        for _ in range(plan["conversations"])
    ]


async def converse(turns: Sequence[Turn], ask: Ask) -> list[Measured]:
    session = str(uuid.uuid4())
    ids: list[int] = []
    measured = []
    for turn in turns:
        ids += turn.ids
        began = time.monotonic()
        answer = await ask(session, ids, turn.answer_len)
        if len(answer.token_ids) != turn.answer_len:
            raise SystemExit(f"expected {turn.answer_len} tokens, got {len(answer.token_ids)}")
        elapsed_s = time.monotonic() - began
        measured.append(Measured(elapsed_s, len(ids), answer.num_cached, turn.answer_len))
        ids += answer.token_ids
    return measured


def measure(
    target: str, engine: Engine, plan: dict[str, Any], options: argparse.Namespace, folder: Path,
    *, on_cpu: bool,
) -> list[dict[str, float]]:  # fmt: skip
    """Figures of each repeat; a first one of at most `WARM_UP` conversations does not count."""
    rounds = [conversations(plan, repeat) for repeat in range(options.repeats + 1)]
    del rounds[0][WARM_UP:]
    found: list[tuple[float, list[Measured]]] = []
    cpu: list[dict[str, float]] = []
    if target == "bare engines":
        found = bare_engines(engine, rounds, options.num_workers)
    else:
        with _serving(target, engine, options, folder, on_cpu=on_cpu) as servers:
            for turns in rounds:
                before = _cpu_s(servers)
                with_session = target == "vllm router"
                found.append(
                    asyncio.run(_over_http(servers[-1].url, engine.model, turns, with_session))
                )
                after = _cpu_s(servers)
                cpu.append({f"cpu_s_{role}": after[role] - before[role] for role in after})
    return [
        figures(elapsed_s, turns) | used
        for (elapsed_s, turns), used in list(zip_longest(found, cpu, fillvalue={}))[1:]
    ]


def figures(elapsed_s: float, turns: Sequence[Measured]) -> dict[str, float]:
    latencies = sorted(one.elapsed_s for one in turns)
    # The first turn of a conversation finds the system prompt only.
    return {
        "makespan_s": elapsed_s,
        "tokens_per_s": sum(one.num_sampled for one in turns) / elapsed_s,
        "cached": sum(one.num_cached for one in turns) / sum(one.num_prompt for one in turns),
        "turn_p50_s": statistics.median(latencies),
        "turn_p99_s": latencies[int(0.99 * (len(latencies) - 1))],
    }


@contextmanager
def _serving(
    target: str, engine: Engine, options: argparse.Namespace, folder: Path, *, on_cpu: bool
) -> Iterator[list[Running]]:
    """All servers of a target; the last one takes the requests."""
    num_engines = options.num_workers
    environ = engine_environment(on_cpu=on_cpu, num_workers=num_engines)
    with ExitStack() as stack:

        def start(one: Target) -> Running:
            return stack.enter_context(running(one, engine, environ, folder / "log"))

        def start_share(index: int) -> Running:
            share, log = share_of(index, num_engines), folder / f"log-{index}"
            return stack.enter_context(
                running(_CountedPrompts(), engine, environ | share.variables, log, share.cores)
            )

        if target == "titopool":
            yield [start(Titopool(num_engines, options=options.serve_options.split()))]
        elif target == "vllm serve":
            yield [start(_CountedPrompts(num_engines=num_engines))]
        else:
            with ThreadPoolExecutor(num_engines) as pool:
                servers = list(pool.map(start_share, range(num_engines)))
            router = _Router([one.url for one in servers], options.router_policy, options.router)
            yield [*servers, start(router)]


def _cpu_s(servers: Sequence[Running]) -> dict[str, float]:
    used = [one.cpu_s() for one in servers]
    return {role: sum(one[role] for one in used) for role in used[0]}


class _Router(VllmServe):
    """vLLM's router before servers that are ready."""

    ready_path = "/readiness"

    def __init__(self, urls: Sequence[str], policy: str, folder: str):
        super().__init__()
        self.name = "vllm router"
        self._urls, self._policy, self._folder = urls, policy, folder

    def command(self, engine: Engine, port: int) -> tuple[list[str], dict[str, str]]:
        words = [sys.executable, "-m", "vllm_router.launch_router", "--policy", self._policy]
        words += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *self._urls]
        # The level "info" writes several lines a request.
        words += ["--log-level", "warning", "--prometheus-port", str(free_port())]
        path = os.pathsep.join(filter(None, (self._folder, os.environ.get("PYTHONPATH"))))
        return words, {"PYTHONPATH": path}


class _CountedPrompts(VllmServe):
    """vLLM's server with what it counts in its answers."""

    def command(self, engine: Engine, port: int) -> tuple[list[str], dict[str, str]]:
        words, variables = super().command(engine, port)
        return [*words, "--enable-prompt-tokens-details"], variables


async def _over_http(
    url: str, model: str, conversed: Sequence[Sequence[Turn]], with_session: bool
) -> tuple[float, list[Measured]]:
    timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def ask(conversation: str, ids: list[int], max_tokens: int) -> Answer:
            headers = {"X-Session-ID": conversation} if with_session else {}
            body = {
                "model": model, "prompt": ids, "max_tokens": max_tokens, "ignore_eos": True,
                "logprobs": 0, "return_token_ids": True,
            }  # fmt: skip
            async with session.post(
                url + "/v1/completions", data=orjson.dumps(body), headers=headers
            ) as response:
                answer = await response.json(loads=orjson.loads)
            if response.status != 200:
                raise SystemExit(f"{response.status}: {answer}")
            details = answer["usage"].get("prompt_tokens_details") or {}
            return Answer(answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0)

        session.headers["Content-Type"] = "application/json"
        return await _all(conversed, ask)


async def _all(conversed: Sequence[Sequence[Turn]], ask: Ask) -> tuple[float, list[Measured]]:
    began = time.monotonic()
    found = await asyncio.gather(*(converse(turns, ask) for turns in conversed))
    return time.monotonic() - began, [one for turns in found for one in turns]


def bare_engines(
    engine: Engine, rounds: Sequence[Sequence[Sequence[Turn]]], num_engines: int
) -> list[tuple[float, list[Measured]]]:
    """Each round's seconds and turns; a round lasts as long as the slowest engine's."""
    context = multiprocessing.get_context("spawn")
    shares = [[turns[index::num_engines] for turns in rounds] for index in range(num_engines)]
    # All engines begin a round together.
    barrier = context.Manager().Barrier(num_engines)
    with ProcessPoolExecutor(num_engines, mp_context=context) as pool:
        parts = list(
            pool.map(
                _bare_engine, [engine] * num_engines, shares, range(num_engines),
                [num_engines] * num_engines, [barrier] * num_engines,
            )
        )  # fmt: skip
    return [
        (max(elapsed_s for elapsed_s, _ in found), [one for _, turns in found for one in turns])
        for found in zip(*parts, strict=True)
    ]


def _bare_engine(
    engine: Engine,
    rounds: Sequence[Sequence[Sequence[Turn]]],
    index: int,
    num_engines: int,
    barrier: Any,
) -> list[tuple[float, list[Measured]]]:
    share = share_of(index, num_engines)
    environ = engine_environment(on_cpu=not visible_gpus(), num_workers=num_engines)
    os.environ |= environ | share.variables
    if share.cores:
        os.sched_setaffinity(0, share.cores)

    async def run() -> list[tuple[float, list[Measured]]]:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=engine.model, **engine.options))
        numbers = iter(range(sys.maxsize))

        async def ask(conversation: str, ids: list[int], max_tokens: int) -> Answer:
            params = SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            last: Any = None
            async for output in llm.generate(tokens_input(list(ids)), params, str(next(numbers))):
                last = output
            return Answer(list(last.outputs[0].token_ids), last.num_cached_tokens or 0)

        found = []
        for conversed in rounds:
            barrier.wait(TIMEOUT_S)
            found.append(await _all(conversed, ask))
        llm.shutdown()
        return found

    return asyncio.run(run())


if __name__ == "__main__":
    main()
