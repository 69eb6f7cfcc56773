"""One short request after the other, and images: servers side by side on one GPU, which take turns.

    python -m benchmarks.side_by_side                        # qwen3-0.6b, qwen3-8b, qwen2.5-vl-3b
    python -m benchmarks.side_by_side --parts short --shapes qwen3-0.6b

All servers of a part run at the same time, and one of them works. So a machine that becomes slower
for a while does so for all. `short`: each round, each server gets 15 requests of 256 new ids and 8
tokens. Each process notes times (`benchmarks/noted_times`), which tell how long a request is outside
of the engine's process. `images`: each round, each server gets 128 new images: the engine alone,
whose images were prepared before, and this server in one request, and this server and vLLM's as 128
chat requests at once. The first round warms up.
"""

import argparse
import asyncio
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import images
from benchmarks.machine import describe_machine
from benchmarks.models import PROMPT_IDS
from benchmarks.processes import Running, engine_environment, running
from benchmarks.targets import VLLM_SERVERS, Engine, Target, Titopool
from benchmarks.workload import Call
from harness.vision_models import make_qwen_vl

NOTED_TIMES = Path(__file__).resolve().parent / "noted_times"
START_TIMEOUT_S = 600.0
INPUT_LEN, OUTPUT_LEN, IMAGE_OUTPUT_LEN = 256, 8, 16
REQUESTS_A_ROUND = 15
# Each engine's memory for keys and values, so that several fit; no engine then measures what is free,
# which changes while the others load.
SHORT_CACHE, IMAGE_CACHE = 2 * 2**30, 5 * 2**30
COMMON: Mapping[str, Any] = {
    "logprobs_mode": "processed_logprobs", "load_format": "dummy", "gpu_memory_utilization": 0.2,
}  # fmt: skip
SHORT_SERVERS: Mapping[str, Target] = {
    "titopool": Titopool(1),
    "titopool, --metrics false": Titopool(1, options=["--metrics", "false"]),
    "vllm serve": VLLM_SERVERS["vllm"],
    "vllm serve, Rust front end": VLLM_SERVERS["vllm-rust"],
}
# Begin and end of a request, in monotonic seconds.
Span = tuple[float, float]
# Milliseconds of a request: in all, before the engine's process, in it, and after.
Part = tuple[float, float, float, float]


def main() -> None:
    options = parse_arguments()
    result: dict[str, Any] = {"machine": describe_machine(), **vars(options)}
    with tempfile.TemporaryDirectory() as name:
        if "short" in options.parts:
            result["short"] = []
            for shape in options.shapes:
                result["short"] += measure_short(shape, Path(name) / shape, options.short_rounds)
        if "images" in options.parts:
            result["images"] = measure_images(Path(name) / "images", options)
    Path(options.out + ".json").write_text(json.dumps(result, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=["short", "images"])
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--short-rounds", type=int, default=12)
    parser.add_argument("--images-shape", choices=images.SHAPES, default="qwen2.5-vl-3b")
    parser.add_argument("--num-images", type=int, default=128)
    parser.add_argument("--image-rounds", type=int, default=3)
    parser.add_argument("--image-processes", type=int, default=8)
    parser.add_argument(
        "--out", default="bench-side-by-side", help="path of the result file, without extension"
    )
    return parser.parse_args()


# ---- starting


def start(stack: ExitStack, managers: Mapping[str, AbstractContextManager[Any]]) -> dict[str, Any]:
    """Enters all at the same time; those that have started end with `stack`."""
    with ThreadPoolExecutor(len(managers)) as pool:
        asked = {name: pool.submit(one.__enter__) for name, one in managers.items()}
    for name, manager in managers.items():
        if asked[name].exception() is None:
            stack.push(manager)
    return {name: future.result() for name, future in asked.items()}


@contextmanager
def bare(words: Sequence[str], environ: Mapping[str, str], log: Path) -> Iterator[Any]:
    """Starts `benchmarks.bare_turns`; yields a function that sends a line and returns the answer."""
    command = [sys.executable, "-m", "benchmarks.bare_turns", *words]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=dict(environ), stderr=output, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    sender, receiver = process.stdin, process.stdout

    def ask(line: str) -> Any:
        sender.write(line + "\n")
        sender.flush()
        return json.loads(receiver.readline())

    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    try:
        if receiver.readline().strip() != "ready":
            sys.exit(f"the bare engine did not start; its log ends:\n{log.read_text()[-6000:]}")
        timer.cancel()
        yield ask
    finally:
        timer.cancel()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


# ---- short requests


def measure_short(shape: str, folder: Path, num_rounds: int) -> list[dict[str, Any]]:
    folder.mkdir()
    times = folder / "times"
    times.mkdir()
    environ = engine_environment(on_cpu=False)
    environ |= {
        "NOTED_TIMES": str(times), "PYTHONPATH": f"{NOTED_TIMES}:{environ['PYTHONPATH']}",
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.models", shape, str(folder / "model"), "dummy"]
    subprocess.run(command, check=True)
    chosen = {
        **COMMON, "max_model_len": 1536, "max_num_seqs": 64, "max_cudagraph_capture_size": 512,
        "kv_cache_memory_bytes": SHORT_CACHE,
    }  # fmt: skip
    engine = Engine(str(folder / "model"), chosen)
    words = ["short", engine.model, json.dumps(chosen)]
    managers = {"bare engine": bare(words, environ, folder / "bare.log")} | {
        name: running(target, engine, environ, folder / f"{number}.log")
        for number, (name, target) in enumerate(SHORT_SERVERS.items())
    }
    chance = random.Random(shape)

    def prompts(number: int) -> list[list[int]]:
        return [chance.choices(PROMPT_IDS, k=INPUT_LEN) for _ in range(number)]

    spans: dict[str, list[list[Span]]] = {name: [] for name in managers}
    with ExitStack() as stack:
        servers = start(stack, managers)
        for server in servers.values():
            send_short(server, engine, prompts(REQUESTS_A_ROUND))
        for number in range(num_rounds):
            for name in in_turn(list(servers), number):
                asked = prompts(REQUESTS_A_ROUND)
                spans[name].append(send_short(servers[name], engine, asked))
    noted = [read_times(file) for file in times.glob("*.txt")]
    return [
        describe(shape, name, [[parts_of(one, noted) for one in round_] for round_ in rounds])
        for name, rounds in spans.items()
    ]


def send_short(server: Any, engine: Engine, prompts: list[list[int]]) -> list[Span]:
    """Sends one request after the other: to a server, or to the bare engine's function."""
    if not isinstance(server, Running):
        answer = server(json.dumps({"prompts": prompts, "max_tokens": OUTPUT_LEN}))
        return [(begin, end) for begin, end in answer]
    target, spans = server.target, []
    # A server closes a connection that was idle for long.
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.connect()
    for ids in prompts:
        call = Call([ids])
        body = target.body(call, OUTPUT_LEN, engine.model)
        begin = time.monotonic()
        connection.request("POST", target.path_of(call) or "", body, dict(target.headers))
        response = connection.getresponse()
        answer = response.read()
        spans.append((begin, time.monotonic()))
        assert response.status == 200, answer[:500]
        assert target.lengths(answer) == [OUTPUT_LEN]
    connection.close()
    return spans


def read_times(file: Path) -> tuple[list[float], list[str]]:
    """A process's times and their names, in order."""
    lines = (line.split(" ", 1) for line in file.read_text().splitlines())
    noted = sorted((float(seconds), name) for seconds, name in lines)
    return [seconds for seconds, _ in noted], [name for _, name in noted]


def parts_of(span: Span, noted: list[tuple[list[float], list[str]]]) -> Part:
    """The parts of the request that was the only one at that time."""
    begin, end = span
    core: list[tuple[float, str]] = []
    handled = []
    for times, names in noted:
        there = slice(bisect_left(times, begin), bisect_right(times, end))
        found = list(zip(times[there], names[there], strict=True))
        handled += [at for at, name in found if name == "outputs) 1"]
        # Other engines are asked whether they live.
        if any(name == "core.sample(" for _, name in found):
            core += found
    first = min(at for at, name in core if name == "core.step(")
    # On a CPU, the bare engine's process is the caller's.
    taken = min((at for at, name in core if name == "core.request("), default=first)
    # A step without a token follows the last one. The server in Rust notes no outputs.
    handled_s = max(handled, default=end)
    last = max(at for at, name in core if name == "core.step)" and at < handled_s)
    return tuple(1e3 * one for one in (end - begin, taken - begin, last - taken, end - last))  # type: ignore[return-value]


def describe(shape: str, name: str, rounds: list[list[Part]]) -> dict[str, Any]:
    """Medians in milliseconds."""
    every = [part for parts in rounds for part in parts]

    def median(index: int, parts: list[Part]) -> float:
        return round(statistics.median(one[index] for one in parts), 3)

    run = {
        "shape": shape, "target": name, "num_requests": len(every), "p50_ms": median(0, every),
        "before_engine_ms": median(1, every), "in_engine_ms": median(2, every),
        "after_engine_ms": median(3, every),
        "outside_engine_ms": round(statistics.median(one[1] + one[3] for one in every), 3),
        "p50_of_rounds_ms": [median(0, parts) for parts in rounds],
        "in_engine_of_rounds_ms": [median(2, parts) for parts in rounds],
    }  # fmt: skip
    print(json.dumps(run), flush=True)
    return run


# ---- images


def measure_images(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    folder.mkdir()
    model = folder / "model"
    model.mkdir()
    make_qwen_vl(model, shape=images.SHAPES[options.images_shape])
    environ = engine_environment(on_cpu=False)
    chosen = {
        **COMMON, "max_model_len": 2048, "max_num_seqs": 256, "max_cudagraph_capture_size": 256,
        "kv_cache_memory_bytes": IMAGE_CACHE,
    }  # fmt: skip
    engine = Engine(str(model), chosen)
    vllms = Engine(str(model), {**chosen, "limit_mm_per_prompt": '{"image": 1, "video": 0}'})
    processes = ["--image-processes", str(options.image_processes)]
    words = ["images", str(model), "--num-workers", "1", *processes, *engine.argv()]
    target, peer = Titopool(1, options=processes), VLLM_SERVERS["vllm-4"]
    managers = {
        "bare engine": bare(words, environ, folder / "bare.log"),
        "titopool": running(target, engine, environ, folder / "titopool.log"),
        "peer": running(peer, vllms, environ, folder / "vllm.log"),
    }
    file = folder / "body.json"
    with ExitStack() as stack:
        servers = start(stack, managers)
        urls = {name: servers[name].url for name in ("titopool", "peer")}

        def ask_bare(bodies: list[bytes]) -> float:
            file.write_bytes(bodies[0])
            return float(servers["bare engine"](str(file)))

        def ask(url: str) -> Callable[[list[bytes]], float]:
            return lambda bodies: asyncio.run(post_all(url, bodies))

        kinds = {
            "bare engine": (one_body, ask_bare),
            "titopool, one request": (one_body, ask(urls["titopool"] + "/generate/")),
            "titopool, chat requests": (
                chat_bodies, ask(urls["titopool"] + "/v1/chat/completions"),
            ),
            f"{peer.name}, chat requests": (
                chat_bodies, ask(urls["peer"] + "/v1/chat/completions"),
            ),
        }  # fmt: skip
        ids = images.placeholder_ids(model)
        text = text_of(model)
        runs, first = [], 0
        for number in range(1 + options.image_rounds):
            for name in in_turn(list(kinds), number):
                make, send = kinds[name]
                bodies = make(str(model), ids, text, first, options.num_images)
                first += options.num_images
                run = {
                    "target": name, "round": number, "is_warm_up": number == 0,
                    "images_per_s": options.num_images / send(bodies),
                }  # fmt: skip
                print(json.dumps(run), flush=True)
                runs.append(run)
    return runs


def in_turn(names: list[str], number: int) -> list[str]:
    """The order of a round: each begins with another one."""
    shift = number % len(names)
    return names[shift:] + names[:shift]


def text_of(model: Path) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(model).decode(list(images.TEXT)))


def one_body(model: str, ids: list[int], text: str, first: int, number: int) -> list[bytes]:
    """One request of `number` prompts of ids with the images from number `first` on."""
    options = argparse.Namespace(output_len=IMAGE_OUTPUT_LEN)
    return [json.dumps(images.body(ids, 640, 480, first, number, options)).encode()]


def chat_bodies(model: str, ids: list[int], text: str, first: int, number: int) -> list[bytes]:
    """`number` chat requests with an image each."""
    bodies = []
    for index in range(first, first + number):
        url = "data:image/jpeg;base64," + images.photo(640, 480, index)
        content = [
            {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text},
        ]  # fmt: skip
        body = {
            "model": model, "messages": [{"role": "user", "content": content}], "logprobs": True,
            "max_tokens": IMAGE_OUTPUT_LEN, "temperature": 1.0, "ignore_eos": True,
        }  # fmt: skip
        bodies.append(json.dumps(body).encode())
    return bodies


async def post_all(url: str, bodies: list[bytes]) -> float:
    """Seconds until all are answered."""
    headers, timeout = {"Content-Type": "application/json"}, aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def post(body: bytes) -> dict[str, Any]:
            async with session.post(url, data=body, headers=headers) as response:
                answer = await response.read()
                assert response.status == 200, answer[:500]
                fields: dict[str, Any] = json.loads(answer)
                return fields

        begin = time.monotonic()
        answers = await asyncio.gather(*(post(body) for body in bodies))
        elapsed_s = time.monotonic() - begin
    for answer in answers:
        if "usage" in answer:
            lengths = {answer["usage"]["completion_tokens"]}
        else:
            lengths = {len(one) for one in answer["completion_ids"]}
        assert lengths == {IMAGE_OUTPUT_LEN}, lengths
    return elapsed_s


if __name__ == "__main__":
    main()
