"""What one hostile or very large client costs the others: the waits of innocent requests.

    python -m benchmarks.abuse [NAME…] [--model FOLDER]

Without a model: one front end before two stub workers. With one: real vLLM in two workers, whose
extension (`tests/kit/extensions/hanging_extension.py`) hangs at one grammar that its trial lets pass. While the
requests of a case are sent, a process of its own asks /live and generates one token for one prompt
again and again. A table has a row for each case: the statuses, the growth of the front end's and of
the largest worker's memory, the longest calls, the 99th percentile of one token with that of the
idle server before, innocent requests that failed, and workers lost.
"""

import argparse
import base64
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import requests

from benchmarks.bench import quantiles, say
from benchmarks.front import stub_environment
from benchmarks.hostile import KINDS
from harness.hostile_grammars import NESTED, SLOW
from harness.hostile_requests import BODIES as MALFORMED
from harness.hostile_requests import CHUNKED, png_with_text
from harness.innocents import innocents
from harness.memory_growth import growth_of
from harness.servers import Server, running_server
from harness.stub_worker import IMAGE_PLACEHOLDER, Fault
from titopool.demo_model import demo_model_folder
from titopool.settings.grammars import MAX_GRAMMAR_BYTES
from titopool.settings.sampling import MAX_ENTRIES

MIB = 2**20
TIMEOUT_S = 300
TWO_WORKERS = ("--num-front-ends", "1", "--engine-probe-timeout-s", "4")
# How long clients drip, or wait before they leave.
HOLD_S = 10.0
IDLE_S = 5.0
# At the bounds of docs/http.md, with strings that the demo model does not write.
DEAREST = {
    "stop": [f"{number:060}" for number in range(MAX_ENTRIES["stop"])],
    "bad_words": [chr(0x4E00 + number) for number in range(MAX_ENTRIES["bad_words"])],
    "logit_bias": {str(number): 0.5 for number in range(MAX_ENTRIES["logit_bias"])},
    "repetition_detection": {"max_pattern_size": 256, "min_pattern_size": 200, "min_count": 8},
}
Sent = Iterator[tuple[str, object]]


def grammar(prompts: int = 1, **fields: object) -> tuple[str, object]:
    options = {"structured_outputs": fields}
    body = {"prompts": [[5, 6, 7]] * prompts, "max_tokens": 8, "generation_kwargs": options}
    return "/generate/", body


def nested_counts(target: "Target") -> Sent:
    """Small grammars that take an engine seconds to hours, or that are long."""
    yield grammar(regex=NESTED)
    yield grammar(regex="(( {1,20}){1,20}){1,20}")
    yield grammar(json={"type": "string", "pattern": NESTED})
    yield grammar(choice=[f"choice-{number}" for number in range(300_000)])
    for structured, _ in SLOW.values() if target.is_real else ():
        yield grammar(4, **structured)


def long_grammars(target: "Target") -> Sent:
    """One megabyte of regex for 16 prompts, and the longest that passes the front end."""
    for number in range(8):
        yield grammar(16, regex=str(number) + "a" * 1_000_000)
        yield grammar(16, regex=str(number) + "a" * (MAX_GRAMMAR_BYTES - 200))


def poison(target: "Target") -> Sent:
    """A prompt that kills the worker that runs it, or a grammar that hangs the engine."""
    if target.is_real:
        yield grammar(regex="[a-z ]{30,40}|hang3")
    else:
        yield "/generate/", {"prompts": [[Fault.KILL]], "max_tokens": 8}


def large_options(target: "Target") -> Sent:
    """One MiB of options for 320 prompts."""
    extra = {"extra_args": {"a": "b" * MIB}}
    yield "/generate/", {"prompts": [[1, 2]] * 320, "max_tokens": 1, "generation_kwargs": extra}


def large_lists(target: "Target") -> Sent:
    """Lists, texts and ids whose objects take many times the body."""
    for _ in range(4):
        yield "/generate/", b'{"prompts":[' + b"[]," * (16 * MIB // 3) + b"[1]]}"
        yield "/generate/", {"prompts": ["word " * (8 * MIB // 5)]}
        yield "/generate/", {"prompts": ["a" * (4 * MIB)]}
        yield "/detokenize", {"tokens": [1234] * (16 * MIB // 6)}


def distinct_options(target: "Target") -> Sent:
    """40 requests of 2 MiB of options each, all different."""
    for number in range(40):
        bias = {str(token): number + 1 for token in range(2 * MIB // 9)}
        yield "/generate/", {"prompts": [[1]], "generation_kwargs": {"logit_bias": bias}}


def slow_checks(target: "Target") -> Sent:
    """Tool calls with malformed arguments, names of an update, PNGs with much text."""
    call = {"function": {"name": "f", "arguments": "{"}}
    turn = {"role": "assistant", "tool_calls": [call] * (4 * MIB // 48)}
    yield "/v1/chat/completions", {"messages": [turn], "max_tokens": 1}
    yield KINDS["names"](16 * MIB)
    image = base64.b64encode(png_with_text(60)).decode()
    prompts = [[1, IMAGE_PLACEHOLDER]] * 256
    yield "/generate/", {"prompts": prompts, "images": [[image]] * 256, "max_tokens": 1}


def many_prompts(target: "Target") -> Sent:
    """65,536 prompts; the client leaves after a while."""
    yield "/generate/", {"prompts": [[1, 2, 3]] * 65_536, "max_tokens": 16}


def completions(**options: object) -> tuple[str, object]:
    """64 completions, of which two workers of 128 slots have all at once."""
    kwargs = {"ignore_eos": True, **options}
    body = {"prompts": [[5, 6]], "n": 64, "max_tokens": 400, "generation_kwargs": kwargs}
    return "/generate/", body


def plain_completions(target: "Target") -> Sent:
    """What `dear_options` is to be compared with."""
    yield completions()


def dear_options(target: "Target") -> Sent:
    """The dearest options that pass, and 10,000 stop strings, which do not."""
    yield completions(**DEAREST)
    yield completions(stop=[f"{number:04}" for number in range(10_000)])


def foreign_page(target: "Target") -> Sent:
    """A request that a page of another site sends."""
    yield "/pause", b"{}"


Case = Callable[["Target"], Sent]
# In the order in which they run.
CASES: dict[str, Case] = {
    "nested counts": nested_counts,
    "long grammars": long_grammars,
    "poison": poison,
    "large options": large_options,
    "large lists": large_lists,
    "distinct options": distinct_options,
    "slow checks": slow_checks,
    "many prompts": many_prompts,
    "foreign page": foreign_page,
    "plain completions": plain_completions,
    "dear options": dear_options,
}  # fmt: skip


class Target:
    """A server with one front end and two workers."""

    def __init__(self, server: Server, *, is_real: bool):
        self.server, self.is_real = server, is_real

    @property
    def front_end(self) -> psutil.Process:
        children = psutil.Process(self.server.process.pid).children()
        return next(one for one in children if "gunicorn: worker" in " ".join(one.cmdline()))

    @property
    def workers(self) -> list[psutil.Process]:
        """Those of this server only: the machine may run others."""
        root = psutil.Process(self.server.process.pid if self.is_real else None)
        found = []
        for one in root.children(recursive=True):
            with suppress(psutil.Error):
                words = one.cmdline()
                module = words[words.index("-m") + 1] if "-m" in words else ""
                if module == ("workers" if self.is_real else "harness.stub_worker"):
                    found.append(one)
        return found

    @property
    def num_lost(self) -> int:
        return len(re.findall(r"is lost with \d+ open jobs", self.server.log))

    def post(self, path: str, body: object, timeout_s: float = TIMEOUT_S) -> str:
        """The status; "left" of a client that has left, "closed" of a closed connection."""
        data = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"Origin": "https://example.org"} if path == "/pause" else {}
        try:
            sent = requests.post(
                self.server.url + path, data=data, timeout=timeout_s, headers=headers
            )
            return str(sent.status_code)
        except requests.Timeout:
            return "left"
        except requests.ConnectionError:
            return "closed"

    def send_raw(self, data: bytes) -> str:
        address = urlsplit(self.server.url)
        with socket.create_connection((address.hostname, address.port), timeout=30) as client:
            client.sendall(data)
            return client.recv(4096).split(b" ")[1].decode()

    @contextmanager
    def unfinished(self, number: int, *, drips: bool) -> Iterator[None]:
        """Uploads that do not end; `drips`: that get a byte every second."""
        address, is_over = urlsplit(self.server.url), threading.Event()
        head = f"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: {16 * MIB}\r\n\r\n"
        opened = [
            socket.create_connection((address.hostname, address.port), timeout=30)
            for _ in range(number)
        ]

        def drip() -> None:
            while not is_over.wait(1):
                for one in opened:
                    with suppress(OSError):
                        one.sendall(b" ")

        for one in opened:
            one.sendall(head.encode() + b"{" + b" " * (0 if drips else MIB))
        thread = threading.Thread(target=drip if drips else is_over.wait)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            for one in opened:
                one.close()


def send_case(target: Target, name: str) -> Counter[str]:
    if name == "malformed chunks":
        return Counter(target.send_raw(CHUNKED + body) for body in MALFORMED.values())
    if name == "dripping bodies":
        with target.unfinished(200, drips=True):
            time.sleep(HOLD_S)
        return Counter({"unfinished": 200})
    if name == "texts of clients that left":
        body = {"prompts": ["word " * 1_000_000]}
        with ThreadPoolExecutor(16) as threads:
            return Counter(threads.map(lambda _: target.post("/generate/", body, 2.0), range(16)))
    if name == "unreachable trainer":
        group = {"host": "127.0.0.1", "port": 9, "world_size": 3, "session": "a", "backend": "gloo"}
        return Counter(target.post("/weights/init", group) for _ in range(2))
    sent = list(CASES[name](target))
    with ExitStack() as stack:
        if name == "distinct options":
            stack.enter_context(target.unfinished(16, drips=False))
        timeout_s = HOLD_S if name == "many prompts" else TIMEOUT_S
        threads = stack.enter_context(ThreadPoolExecutor(16))
        return Counter(threads.map(lambda one: target.post(*one, timeout_s), sent))


NAMES = [
    *list(CASES)[:8], "texts of clients that left", "dripping bodies", "unreachable trainer",
    "foreign page", "malformed chunks", "plain completions", "dear options",
]  # fmt: skip


def measure(target: Target, name: str) -> None:
    target.server.wait_until_ready(2)
    lost_before = target.num_lost
    prompt = '"a b"' if name == "texts of clients that left" else "[1, 2]"
    with innocents(target.server.url, prompt=prompt) as idle:
        time.sleep(IDLE_S)
    with ExitStack() as stack:
        waits = stack.enter_context(innocents(target.server.url, prompt=prompt))
        growth = stack.enter_context(growth_of(target.front_end))
        of_workers = [stack.enter_context(growth_of(one)) for one in target.workers]
        began_s = time.monotonic()
        statuses = send_case(target, name)
        took_s = time.monotonic() - began_s
    cells = (
        name,
        ", ".join(f"{number} × {status}" for status, number in statuses.items()),
        f"{took_s:.1f} s",
        f"{growth.num_bytes // MIB} MiB",
        f"{max((one.num_bytes for one in of_workers), default=0) // MIB} MiB",
        f"{1000 * max(waits.live):.0f} ms",
        f"{1000 * max(waits.generated):.0f} ms of {len(waits.generated)}",
        " of ".join(f"{1000 * quantiles(one.generated)['p99']:.0f}" for one in (waits, idle))
        + " ms",
        waits.num_failed,
        target.num_lost - lost_before,
    )
    say(f"| {' | '.join(map(str, cells))} |")


@contextmanager
def stub_pool(folder: Path) -> Iterator[list[str]]:
    """Two stub workers, each started again when it has ended."""
    endpoints = [f"ipc://{folder}/worker-{index}" for index in range(2)]
    is_over = threading.Event()

    def keep(endpoint: str) -> None:
        words = [sys.executable, "-m", "harness.stub_worker", "--endpoint", endpoint]
        words += ["--worker-id", endpoint[-1], "--max-num-seqs", "128", "--in-slots"]
        words += ["--delay-s", "0.02", "--tokenizer", demo_model_folder(), "--max-images", "1"]
        while not is_over.is_set():
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
            process = subprocess.Popen(words, env=stub_environment())
            while process.poll() is None and not is_over.wait(0.1):
                pass
        process.terminate()
        process.wait(60)

    threads = [threading.Thread(target=keep, args=(one,)) for one in endpoints]
    for one in threads:
        one.start()
    try:
        yield endpoints
    finally:
        is_over.set()
        for one in threads:
            one.join()


@contextmanager
def started(model: str, folder: Path) -> Iterator[Target]:
    log = folder / "log"
    if model:
        options = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "128")
        extension = (
            "--worker-extension-cls",
            "tests.kit.extensions.hanging_extension.HangingExtension",
        )
        words = (model, *options, *extension, "--num-workers", "2", *TWO_WORKERS)
        with running_server(*words, log=log, num_workers=2) as server:
            yield Target(server, is_real=True)
    else:
        with stub_pool(folder) as endpoints:
            words = ("--endpoints", ",".join(endpoints), *TWO_WORKERS)
            with running_server(*words, log=log, num_workers=2) as server:
                yield Target(server, is_real=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--model", default="", help="folder; default: stub engines")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder, started(options.model, Path(folder)) as target:
        say(
            "| sent | answers | in | front end | worker | /live | one token | p99, idle | failed | lost |"
        )
        say("|---" * 10 + "|")
        for name in options.names or NAMES:
            measure(target, name)


if __name__ == "__main__":
    main()
