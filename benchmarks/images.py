"""Images a second on one worker, and the latency of text requests at the same time.

    python -m benchmarks.images                                    # tiny Qwen2.5-VL, any machine
    python -m benchmarks.images --shape qwen2.5-vl-3b --image-processes 1 4 8

Starts one server for each number of processes. Each server gets `--num-images` prompts with an image in
one request: alone, together with text requests that begin 8 times a second, again (all images are in
the prefix cache), and an eighth of them with n = 8. Then vLLM's engine alone gets the first round with
its images prepared before (`benchmarks.bare_images`).
"""

import argparse
import base64
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import requests

from benchmarks.machine import describe_machine
from harness.images import PLACEHOLDERS
from harness.servers import REPOSITORY, Server, environment, running_server
from harness.vision_models import QWEN_3B, make_qwen_vl

SHAPES: dict[str, dict[str, Any] | None] = {"tiny": None, "qwen2.5-vl-3b": QWEN_3B}
# Of text requests without images beside them.
ALONE_S = 5
# Ids after the image. More than a block of the prefix cache, or no image would be found in it.
TEXT = range(100, 240)
# Text requests: ids in, tokens out, begun a second.
TEXT_PROMPT = [*range(300, 428)]
NUM_TEXT_TOKENS = 16
TEXT_RATE = 8


def main() -> None:
    options = parse_arguments()
    width, height = map(int, options.size.split("x"))
    result: dict[str, Any] = {"machine": describe_machine(), **vars(options), "runs": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        make_qwen_vl(folder, shape=SHAPES[options.shape])
        for num_processes in options.image_processes:
            words = ["--num-workers", "1", "--image-processes", str(num_processes)]
            words += ["--max-model-len", "2048", *options.serve_options.split()]
            if options.shape != "tiny":
                words += ["--load-format", "dummy"]
            with running_server(str(folder), *words, log=Path(name) / "log") as server:
                ids = placeholder_ids(folder)
                measured = measure(server, ids, width, height, options)
            measured |= bare(
                body(ids, width, height, 10_000, options.num_images, options), words, folder
            )
            result["runs"].append({"image_processes": num_processes, **measured})
            print(json.dumps(result["runs"][-1]), flush=True)
    Path(options.out + ".json").write_text(json.dumps(result, indent=1) + "\n")
    Path(options.out + ".md").write_text(markdown(result))
    print(markdown(result))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--size", default="640x480", help="width x height of each image")
    parser.add_argument("--num-images", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--image-processes", type=int, nargs="+", default=[1])
    parser.add_argument("--serve-options", default="")
    parser.add_argument(
        "--out", default="bench-images", help="path of the result files, without extension"
    )
    return parser.parse_args()


def placeholder_ids(folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(folder)(PLACEHOLDERS["qwen"])["input_ids"]
    return ids


def measure(
    server: Server, ids: list[int], width: int, height: int, options: argparse.Namespace
) -> dict[str, Any]:
    count = options.num_images

    def ask(first: int, number: int, n: int = 1, scale: int = 1) -> Callable[[], None]:
        """A function that sends `body(…)`."""
        # Encoded in advance, because this process also sends text requests.
        encoded = json.dumps(body(ids, width, height, first, number, options, n, scale)).encode()

        def send() -> None:
            answer = requests.post(server.url + "/generate/", encoded, timeout=600)
            assert answer.status_code == 200, answer.text[:500]
            lengths = {len(one) for one in answer.json()["completion_ids"]}
            assert lengths == {options.output_len}, lengths

        return send

    ask(0, 2)()
    _, idle = with_text_beside(server, lambda: time.sleep(ALONE_S))
    alone_s = seconds(ask(10_000, count))
    beside_s, beside = with_text_beside(server, ask(20_000, count))
    again_s = seconds(ask(20_000, count))
    groups_s = seconds(ask(30_000, count // 8, n=8))
    shrunk_s, shrunk = with_text_beside(server, ask(40_000, count, scale=3))
    return {
        "images_per_s": count / alone_s, "images_per_s_with_text": count / beside_s,
        "images_per_s_again": count / again_s,
        "images_per_s_groups": count // 8 / groups_s,
        "text_alone": spread(idle), "text_beside": spread(beside),
        "shrunk_images_per_s": count / shrunk_s, "text_beside_shrunk": spread(shrunk),
        "image_seconds": server.metrics("image_seconds_total")["0"],
        "images": server.metrics("images_total")["0"],
    }  # fmt: skip


def body(
    ids: list[int], width: int, height: int, first: int, number: int,
    options: argparse.Namespace, n: int = 1, scale: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """A request of `number` prompts with the images from number `first` on.

    Args:
        scale: factor for the files' width and height. If it is not 1, the processor scales the
            images down to 16 tokens: much work for its processes, little for the engine.
    """
    images = [photo(scale * width, scale * height, first + index) for index in range(number)]
    kwargs = None if scale == 1 else {"max_pixels": 16 * 28 * 28}
    return {
        "mm_processor_kwargs": kwargs,
        "prompts": [[10, *ids, *TEXT]] * number, "images": images, "n": n,
        "max_tokens": options.output_len, "generation_kwargs": {"ignore_eos": True},
    }  # fmt: skip


def bare(asked: dict[str, Any], words: list[str], folder: Path) -> dict[str, float]:
    """Images a second of the engine alone, new to it and again."""
    command = [sys.executable, "-m", "benchmarks.bare_images", str(folder), *words]
    done = subprocess.run(
        command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True,
        cwd=REPOSITORY, env=environment(),
    )  # fmt: skip
    seconds = json.loads(done.stdout.splitlines()[-1])
    number = len(asked["prompts"])
    return {
        "bare_images_per_s": number / seconds["bare_s"],
        "bare_images_per_s_again": number / seconds["bare_again_s"],
    }


def photo(width: int, height: int, seed: int) -> str:
    """A JPEG in base64, as smooth as a photograph, so that its file size is realistic."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    image = PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.Resampling.BICUBIC)
    file = BytesIO()
    image.save(file, "JPEG", quality=90)
    return base64.b64encode(file.getvalue()).decode()


def seconds(call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


def with_text_beside(server: Server, send: Callable[[], None]) -> tuple[float, list[float]]:
    """Seconds of `send`, and the latencies of text requests that begin at the same time."""
    is_over = threading.Event()
    with ThreadPoolExecutor(256) as pool:

        def ask_for_text() -> list[Future[float]]:
            asked = []
            while not is_over.wait(1 / TEXT_RATE):
                fields = {"max_tokens": NUM_TEXT_TOKENS, "generation_kwargs": {"ignore_eos": True}}
                prompt = [[len(asked) % 1000 + 10, *TEXT_PROMPT[1:]]]
                asked.append(pool.submit(seconds, partial(server.generate, prompt, **fields)))
            return asked

        asking = pool.submit(ask_for_text)
        elapsed_s = seconds(send)
        is_over.set()
        return elapsed_s, [one.result() for one in asking.result()]


def spread(latencies: list[float]) -> dict[str, float]:
    return {
        "p50_s": statistics.median(latencies),
        "p99_s": float(np.percentile(latencies, 99)),
        "number": len(latencies),
    }


COLUMNS = {
    "processes": lambda run: str(run["image_processes"]),
    "images/s": lambda run: f"{run['images_per_s']:.1f}",
    "with text requests": lambda run: f"{run['images_per_s_with_text']:.1f}",
    "in the prefix cache": lambda run: f"{run['images_per_s_again']:.1f}",
    "n = 8": lambda run: f"{run['images_per_s_groups']:.1f}",
    "process ms per image": lambda run: f"{1e3 * run['image_seconds'] / run['images']:.1f}",
    "bare engine, new and again: images/s": lambda run: (
        f"{run['bare_images_per_s']:.1f}, {run['bare_images_per_s_again']:.1f}"
    ),
    "text alone, p50 and p99 ms": lambda run: pair(run["text_alone"]),
    "text with images, p50 and p99": lambda run: pair(run["text_beside"]),
    "3 times as large, scaled down: images/s": lambda run: f"{run['shrunk_images_per_s']:.1f}",
    "text with these, p50 and p99": lambda run: pair(run["text_beside_shrunk"]),
}


def pair(found: dict[str, float]) -> str:
    """Milliseconds of text requests."""
    return f"{1e3 * found['p50_s']:.1f}, {1e3 * found['p99_s']:.1f}"


def markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    where = ", ".join(dict.fromkeys(machine["gpus"])) or machine["processor"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{machine['date']}, {where}; {machine['num_cores']} CPU cores; {versions}", "",
        f"{result['shape']}, {result['num_images']} JPEG of {result['size']} in one request, "
        f"{result['output_len']} tokens each, one worker; {TEXT_RATE} text requests a second of "
        f"{len(TEXT_PROMPT)} ids and {NUM_TEXT_TOKENS} tokens",
        "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|",
    ]  # fmt: skip
    for run in result["runs"]:
        lines.append(f"| {' | '.join(show(run) for show in COLUMNS.values())} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
