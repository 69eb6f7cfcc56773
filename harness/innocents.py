"""Innocent requests while something else happens, from a process of their own: how long each took.

    python -m harness.innocents URL [--prompt '"text"'] [--only-live]

Asks /live, and generates one token for one prompt, each again and again until its input ends. Prints
a line once both were answered, and at the end `Waits` as JSON.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

import msgspec

TIMEOUT_S = 300.0
PAUSE_S = 0.005


class Waits(msgspec.Struct):
    """Seconds that each call took, and calls with another status than 200."""

    live: list[float] = []
    generated: list[float] = []
    num_failed: int = 0


@contextmanager
def innocents(url: str, *, prompt: str = "[1, 2]", only_live: bool = False) -> Iterator[Waits]:
    """Sends innocent requests within the block; `Waits` is complete after it.

    Args:
        prompt: in JSON, ids or a text.
        only_live: asks /live only.
    """
    words = [sys.executable, "-m", "harness.innocents", url, "--prompt", prompt]
    words += ["--only-live"] if only_live else []
    sender = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None
    waits = Waits()
    try:
        sender.stdout.readline()
        yield waits
        found = msgspec.json.decode(sender.communicate("", timeout=TIMEOUT_S)[0], type=Waits)
        for name in Waits.__struct_fields__:
            setattr(waits, name, getattr(found, name))
    finally:
        sender.kill()
        sender.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--prompt", default="[1, 2]")
    parser.add_argument("--only-live", action="store_true")
    options = parser.parse_args()
    waits, is_over = Waits(), threading.Event()
    body = json.dumps({"prompts": [json.loads(options.prompt)], "max_tokens": 1})
    calls = [(waits.live, "GET", "/live", None)]
    if not options.only_live:
        calls.append((waits.generated, "POST", "/generate/", body))

    def send_on(taken: list[float], *call: str | None) -> None:
        connection = HTTPConnection(urlsplit(options.url).netloc, timeout=TIMEOUT_S)
        while not is_over.is_set() or not taken:
            began_s = time.monotonic()
            try:
                connection.request(*call)  # type: ignore[arg-type]
                answer = connection.getresponse()
                answer.read()
                waits.num_failed += answer.status != 200
            except OSError:
                connection.close()
                waits.num_failed += 1
            taken.append(time.monotonic() - began_s)
            time.sleep(PAUSE_S)

    threads = [threading.Thread(target=send_on, args=call) for call in calls]
    for one in threads:
        one.start()
    while not all(call[0] for call in calls):
        time.sleep(PAUSE_S)
    print("ready", flush=True)
    sys.stdin.read()
    is_over.set()
    for one in threads:
        one.join()
    print(msgspec.json.encode(waits).decode(), flush=True)


if __name__ == "__main__":
    main()
