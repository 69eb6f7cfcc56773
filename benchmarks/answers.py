"""What large answers take of a front end: memory, its loop's time, and the waits of /live.

    python -m benchmarks.answers [NAME…] [--mib 1024]

One front end before a stub worker, whose completions repeat their prompts. Clients read their
answers, read them slowly or not at all, or repeat a request under an Idempotency-Key and do not
read. A row has the statuses, the bytes that were read, the growth of the front end's memory with what
its budget said at most, the longest turn of its event loop by the CPU clock of that thread, and /live.
"""

import argparse
import json
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests

from benchmarks.bench import quantiles, say
from harness.fork_server import fork_server
from harness.front_end_notes import VARIABLE, longest_since, most_taken_since
from harness.innocents import innocents
from harness.memory_growth import front_end, growth_of
from harness.servers import REPOSITORY, Server, environment, forked_server
from titopool.demo_model import demo_model_folder

MIB = 2**20
TIMEOUT_S = 300
NUM_IDS, MAX_LEN = 4000, 110_000
IDS = [*range(1, NUM_IDS + 1)]
LONG = IDS * 25
# How long slow clients read, or do not, and how often. A front end gives unread answers up after 5 s,
# if somebody waits for their memory.
UNREAD_S, READ_EVERY_S = 8.0, 0.1


def prompts(num: int) -> list[list[int]]:
    return [IDS] * num


def sglang(num: int, **fields: Any) -> dict[str, Any]:
    scored = {"return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0}
    return (
        {"input_ids": prompts(num), "sampling_params": {"max_new_tokens": NUM_IDS}}
        | scored
        | fields
    )


AS_STREAM = {"stream": True, "logprob_start_len": -1, "top_logprobs_num": 0}
AS_IDS = {"return_tokens_as_token_ids": True, "return_token_ids": True}
# By name: route, body, headers.
ANSWERS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "/generate/ 512 × 4,000, logprobs 0": (
        "/generate/", {"prompts": prompts(512), "max_tokens": NUM_IDS, "logprobs": 0}, {},
    ),
    "/generate/ 64 × 4,000, logprobs 20": (
        "/generate/", {"prompts": prompts(64), "max_tokens": NUM_IDS, "logprobs": 20}, {},
    ),
    "the same, MessagePack": (
        "/generate/", {"prompts": prompts(64), "max_tokens": NUM_IDS, "logprobs": 20},
        {"Accept": "application/msgpack"},
    ),
    "/generate/ 65,536 × 2": (
        "/generate/", {"prompts": [[1, 2]] * 65_536, "max_tokens": 2, "logprobs": 0}, {},
    ),
    "SGLang 32 × 4,000, top 20 of prompt and completion": ("/generate", sglang(32), {}),
    "SGLang 128 × 4,000, top 20 of prompt and completion": ("/generate", sglang(128), {}),
    "/v1/completions 32 × 4,000, logprobs 20": (
        "/v1/completions",
        {"prompt": prompts(32), "max_tokens": NUM_IDS, "logprobs": 20, **AS_IDS}, {},
    ),
    "/inference/v1/generate 100,000, logprobs 20": (
        "/inference/v1/generate",
        {"token_ids": LONG, "sampling_params": {"max_tokens": 100_000, "logprobs": 20}}, {},
    ),
    "/inference/v1/generate 100,000, prompt_logprobs 20": (
        "/inference/v1/generate",
        {"token_ids": LONG, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 20}}, {},
    ),
    "/get_sequence_logprobs/ 64 × 4,000, top 20": (
        "/get_sequence_logprobs/",
        {"sequences": prompts(64), "prompt_lengths": [0] * 64, "top_logprobs": 20}, {},
    ),
    "the same, binary": (
        "/get_sequence_logprobs/",
        {"sequences": prompts(64), "prompt_lengths": [0] * 64, "top_logprobs": 20,
         "response_format": "binary"}, {},
    ),
    "/v1/completions/render, a session of 0.5 MB × 2,000": (
        "/v1/completions/render",
        {"prompt": [[5]] * 2000, "max_tokens": 1, "session_id": "s" * 500_000}, {},
    ),
    "/v1/completions/render, a regex of 60 KB × 2,000": (
        "/v1/completions/render",
        {"prompt": [[5]] * 2000, "max_tokens": 1, "structured_outputs": {"regex": "a" * 60_000}}, {},
    ),
    "/v1/completions/render, a regex of 60 KB × 65,536": (
        "/v1/completions/render",
        {"prompt": [[5]] * 65_536, "max_tokens": 1, "structured_outputs": {"regex": "a" * 60_000}}, {},
    ),
}  # fmt: skip
# Of 150 clients at once.
SMALL = {"prompts": [IDS[:64]], "n": 1000, "max_tokens": 64, "logprobs": 20}
WIDE = {"prompts": prompts(64), "max_tokens": NUM_IDS, "logprobs": 20}
OPENAI = {"prompt": prompts(16), "max_tokens": NUM_IDS, "logprobs": 20, **AS_IDS}


class Slow(NamedTuple):
    """Clients that read slowly."""

    num: int
    path: str
    body: dict[str, Any]
    bytes_per_s: int = 0
    headers: Mapping[str, str] = MappingProxyType({})


SLOW = {
    "150 × /generate/ n=1,000 × 64, logprobs 20, unread": Slow(150, "/generate/", SMALL),
    "150 repeats of one, unread": Slow(
        150, "/generate/", SMALL, headers={"Idempotency-Key": "one"}
    ),
    "8 × /generate/ 64 × 4,000, logprobs 20, unread": Slow(8, "/generate/", WIDE),
    "8 × /generate/ 64 × 4,000, logprobs 20, 100 KiB/s": Slow(8, "/generate/", WIDE, 102_400),
    "8 × /v1/completions 16 × 4,000, logprobs 20, unread": Slow(8, "/v1/completions", OPENAI),
    "8 × /v1/completions 16 × 4,000, logprobs 20, 100 KiB/s": Slow(8, "/v1/completions", OPENAI, 102_400),
    "8 × /v1/completions as streams, unread": Slow(8, "/v1/completions", OPENAI | {"stream": True}),
    "8 × /v1/completions as streams, 100 KiB/s": Slow(
        8, "/v1/completions", OPENAI | {"stream": True}, 102_400
    ),
    "8 × SGLang 4 × 4,000 as streams, unread": Slow(8, "/generate", sglang(4, **AS_STREAM)),
    "8 × SGLang 4 × 4,000 as streams, 100 KiB/s": Slow(8, "/generate", sglang(4, **AS_STREAM), 102_400),
}  # fmt: skip


# With the first, nothing is sent.
NAMES = ["nothing", *ANSWERS, *SLOW]


class Target:
    """A server, and what its front end notes."""

    def __init__(self, server: Server, notes: Path):
        self.server, self.notes = server, notes
        self.process = front_end(server)

    def read(self, name: str) -> tuple[Counter[str], int]:
        path, body, headers = ANSWERS[name]
        with requests.post(
            self.server.url + path, json=body, headers=headers, stream=True, timeout=TIMEOUT_S
        ) as answer:
            size = sum(map(len, answer.iter_content(MIB)))
            return Counter({str(answer.status_code): 1}), size

    def read_slowly(self, name: str) -> tuple[Counter[str], int]:
        slow = SLOW[name]
        data, address = json.dumps(slow.body).encode(), urlsplit(self.server.url)
        head = f"POST {slow.path} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n"
        head += f"Content-Length: {len(data)}\r\n"
        head += "".join(f"{key}: {value}\r\n" for key, value in slow.headers.items()) + "\r\n"

        def send(_: int) -> tuple[str, int]:
            with socket.create_connection((address.hostname, address.port)) as client:
                client.settimeout(60)
                client.sendall(head.encode() + data)
                try:
                    status = client.recv(12)[9:12].decode()
                except TimeoutError:
                    return "waits", 0
                num_read, ends_s = 0, time.monotonic() + UNREAD_S
                while status == "200" and time.monotonic() < ends_s:
                    time.sleep(READ_EVERY_S)
                    if slow.bytes_per_s:
                        num_read += len(client.recv(int(slow.bytes_per_s * READ_EVERY_S)))
                return status or "closed", num_read

        if slow.headers:
            requests.post(
                self.server.url + slow.path, json=slow.body, headers=slow.headers, timeout=TIMEOUT_S
            )
        with ThreadPoolExecutor(slow.num) as threads:
            found = list(threads.map(send, range(slow.num)))
        return Counter(status for status, _ in found), sum(num for _, num in found)


def send(target: Target, name: str) -> tuple[Counter[str], int]:
    if name in SLOW:
        return target.read_slowly(name)
    if name in ANSWERS:
        return target.read(name)
    time.sleep(UNREAD_S)
    return Counter(), 0


def measure(target: Target, name: str) -> None:
    with ExitStack() as stack:
        waits = stack.enter_context(innocents(target.server.url, only_live=True))
        growth = stack.enter_context(growth_of(target.process))
        began_s = time.time()
        statuses, size = send(target, name)
        took_s = time.time() - began_s
    live = quantiles(waits.live)
    taken = most_taken_since(target.notes, began_s)
    cells = (
        name,
        ", ".join(f"{num} × {status}" for status, num in statuses.items()),
        f"{size / MIB:.0f} MiB",
        f"{took_s:.1f} s",
        f"{growth.num_bytes / MIB:.0f} of {taken / MIB:.0f} MiB",
        f"{1000 * longest_since(target.notes, began_s):.0f} ms",
        f"{1000 * live['p99']:.0f}, {1000 * live['max']:.0f} ms",
    )
    say(f"| {' | '.join(cells)} |")


@contextmanager
def started(folder: Path, limit: int) -> Iterator[Target]:
    endpoint, notes = f"ipc://{folder}/worker-0", folder / "notes"
    for name in ("worker-0", "notes"):
        (folder / name).unlink(missing_ok=True)
    words = ["--endpoint", endpoint, "--max-model-len", str(MAX_LEN)]
    worker = fork_server.start(
        "harness.stub_worker", [*words, "--tokenizer", demo_model_folder()],
        environ=environment(), folder=REPOSITORY,
    )  # fmt: skip
    options = (
        "--endpoints",
        endpoint,
        "--num-front-ends",
        "1",
        "--memory-budget-bytes",
        str(limit),
    )
    try:
        with forked_server(*options, log=folder / "log", **{VARIABLE: str(notes)}) as server:
            yield Target(server, notes)
    finally:
        worker.kill_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(NAMES))
    parser.add_argument("--mib", type=int, default=1024, help="memory_budget_bytes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        say("| answer | statuses | bytes | in | front end, budget | turn | /live p99, max |")
        say("|---" * 7 + "|")
        for name in options.names or NAMES:
            # A new front end: Python's allocator keeps what it has.
            with started(Path(folder), options.mib * MIB) as target:
                target.server.generate([[1, 2]], max_tokens=1)
                measure(target, name)


if __name__ == "__main__":
    main()
