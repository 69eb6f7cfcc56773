"""Large and wasteful bodies, many at once: what they cost a front end and other requests.

    python -m benchmarks.hostile [KIND…] [--mib 16] [--at-once 64]

One front end with default settings and a stub engine. While the bodies are sent, a process of its own
asks /live and generates one token for one prompt, every few milliseconds. Prints, for each kind, the
statuses of the bodies, by how much the resident memory of the front end and of the worker grew at
most, and milliseconds.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import psutil

from benchmarks.bench import quantiles, say
from benchmarks.front import FrontEnd, stub_environment, stub_workers
from benchmarks.processes import running
from benchmarks.targets import Engine
from harness.innocents import innocents
from harness.memory_growth import growth_of

MIB = 2**20
TIMEOUT_S = 300


def repeated(path: str, begin: bytes, element: bytes, end: bytes) -> Callable[[int], tuple]:
    """Makes a body of a size in bytes: `begin`, elements, `end`."""

    def make(size: int) -> tuple[str, bytes]:
        num = (size - len(begin) - len(end)) // (len(element) + 1)
        return path, begin + b",".join([element] * num) + end

    return make


TURN = b'{"role":"user","content":"Hello there"}'
PART, MANY_PARTS = b'{"type":"text","text":"a"}', b'{"messages":[{"role":"user","content":['
KINDS = {
    "ids": repeated("/generate/", b'{"max_tokens":1,"prompts":[[', b"12345", b"]]}"),
    "prompts": repeated("/generate/", b'{"max_tokens":1,"prompts":[', b"[1,2,3]", b"]}"),
    "objects": repeated(
        "/generate/", b'{"max_tokens":1,"prompts":[', b'{"prompt_token_ids":[1,2,3]}', b"]}"
    ),
    "texts": repeated("/generate/", b'{"max_tokens":1,"prompts":[', b'"a b"', b"]}"),
    "SGLang's ids": repeated("/generate", b'{"input_ids":[', b"[1,2,3]", b"]}"),
    "messages": repeated("/v1/chat/completions", b'{"max_tokens":1,"messages":[', TURN, b"]}"),
    "conversations": repeated("/chat/", b'{"max_tokens":1,"messages":[', b"[" + TURN + b"]", b"]}"),
    "sequences": repeated(
        "/get_sequence_logprobs/", b'{"prompt_lengths":[1],"sequences":[', b"[1,2,3]", b"]}"
    ),
    "keys": repeated("/generate", b"{", b'"a":1', b"}"),
    "biases": repeated("/v1/completions", b'{"logit_bias":{', b'"1":1', b"}}"),
    "arguments": repeated(
        "/v1/chat/completions", b'{"messages":[],"chat_template_kwargs":{"a":[', b"1", b"]}}"
    ),
    "parts": repeated("/v1/chat/completions", MANY_PARTS, PART, b"]}]}"),
    "nulls": repeated("/generate/", b'{"prompts":[', b"null", b"]}"),
    "a text, then ids": repeated("/generate", b'{"input_ids":["a",', b"1", b"]}"),
    "names": repeated("/weights/begin", b'{"names":[', b'""', b"]}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--mib", type=int, default=16, help="of each body")
    parser.add_argument("--at-once", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, stub_workers(1, Path(folder)) as found:
        for kind in options.kinds or KINDS:
            # A new server: Python's allocator keeps what it has.
            target = FrontEnd(1, found, kind="JSON")
            environ = {**stub_environment(), "HF_HUB_OFFLINE": "1"}
            with running(target, Engine("", {}), environ, Path(folder) / "log") as server:
                (worker,) = [
                    one
                    for one in psutil.Process().children()
                    if "stub_worker" in str(one.cmdline())
                ]
                measure(kind, server.url, server.process, worker, options)


def measure(
    kind: str,
    url: str,
    server: psutil.Process,
    worker: psutil.Process,
    options: argparse.Namespace,
) -> None:
    host, port = url.removeprefix("http://").split(":")
    path, body = KINDS[kind](options.mib * MIB)

    def send(_: int) -> int:
        connection = HTTPConnection(host, int(port), timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, body)
            return connection.getresponse().status
        except OSError:
            # The server answered and closed before it had read everything.
            return 0
        finally:
            connection.close()

    (front_end,) = server.children()
    with (
        innocents(url) as waits,
        ThreadPoolExecutor(options.at_once) as threads,
        growth_of(front_end) as growth,
        growth_of(worker) as of_worker,
    ):
        began = time.monotonic()
        statuses = Counter(threads.map(send, range(options.at_once)))
        took_s = time.monotonic() - began
    assert not waits.num_failed, f"{waits.num_failed} innocent requests failed"
    shown = [
        f"{name} p50 {found['p50'] * 1e3:.0f}, p99 {found['p99'] * 1e3:.0f}, "
        f"max {found['max'] * 1e3:.0f} ms of {len(taken)}"
        for name, taken in (("/live", waits.live), ("one token", waits.generated))
        for found in (quantiles(taken),)
    ]
    say(
        f"{kind}: {dict(statuses)} in {took_s:.1f} s, {growth.num_bytes // MIB} MiB, "
        f"worker {of_worker.num_bytes // MIB} MiB; " + "; ".join(shown)
    )


if __name__ == "__main__":
    main()
