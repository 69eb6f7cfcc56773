"""Clients that ask all the time, and count what they got."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import requests

from harness.servers import Server, front_ends


def has_phases(server: Server, *expected: str) -> bool:
    """Whether both front ends say so."""
    answers = [one.get(server.url + "/ready") for one in front_ends(server).values()]
    return all([one["phase"] for one in it.json()["workers"]] == list(expected) for it in answers)


class Target(Protocol):
    """What a client sends to."""

    def post(self, path: str, json: Any) -> requests.Response: ...


class Load:
    """Clients that ask one prompt after the other, and count how each request ended."""

    def __init__(self, server: Target, num_clients: int = 8, *, with_streams: bool = False):
        """`with_streams`: every second client reads streams."""
        # The first id of each prompt, which no other has.
        self.answered, self.failed = list[int](), list[str]()
        self._server, self._with_streams = server, with_streams
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(num_clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stopping.is_set():
            turn += 1
            ids = [3000 * number + turn, turn + 1]
            is_stream = self._with_streams and number % 2 == 1
            answer, found = (self._stream if is_stream else self._ask)(ids)
            if found == ids[::-1]:
                self.answered.append(ids[0])
            else:
                self.failed.append(f"{answer.status_code} {answer.text}")

    def _ask(self, ids: list[int]) -> tuple[requests.Response, list[int] | None]:
        answer = self._server.post("/generate/", {"prompts": [ids], "max_tokens": 2})
        (found,) = answer.json().get("completion_ids", [None])
        return answer, found

    def _stream(self, ids: list[int]) -> tuple[requests.Response, list[int] | None]:
        body = {"prompt": ids, "max_tokens": 2, "stream": True, "return_token_ids": True}
        answer = self._server.post("/v1/completions", body)
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [one for event in events for one in json.loads(event).get("choices", ())]
        found = [token_id for one in choices for token_id in one["token_ids"]]
        return answer, found if "data: [DONE]" in answer.text else None

    @property
    def num_answered(self) -> int:
        return len(self.answered)

    def num_repeated(self, runs: Path) -> int:
        """How many jobs ran more than once, by the file of stubs; asserts that each answered one did,
        and no other."""
        counts = Counter(map(int, runs.read_text().split()))
        assert counts.keys() == set(self.answered)
        return sum(one > 1 for one in counts.values())


@contextmanager
def load_on(*calls: Callable[[], object]) -> Iterator[None]:
    """Repeats each call in a thread."""
    ends = threading.Event()

    def repeat(call: Callable[[], object]) -> None:
        while not ends.is_set():
            call()

    threads = [threading.Thread(target=repeat, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()
