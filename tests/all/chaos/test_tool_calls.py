"""Chats that write long tool calls, while helpers that parse and workers are killed and clients leave."""

import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import requests

from harness.servers import Server, running_server, wait_until
from tests.all.chaos.rounds import SECONDS, SEED
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models.scripted_model import make_scripted_model

NUM_CLIENTS = 16
# A model of tests says each token once. Of the call's one argument: about 10 KiB.
WORDS = [f"word{index} " * 12 for index in range(100)]
CALL = ['\n{"name": "f", "arguments": {"a": "', *WORDS, '"}}\n']
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = {
    "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "temperature": 0,
    "max_tokens": len(CALL) + 8, "stream": True,
}  # fmt: skip
PATH = "/v1/chat/completions"
# What a stream may end with whose worker is killed.
ALLOWED = {"generation_failed", "no_ready_worker"}
# For how long a helper is stopped: the fault itself, and no wait for something.
STOPPED_S = 1.0
# Seconds for a killed worker to start again, on a busy machine.
RESTART_S = 120.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "model"
    folder.mkdir()
    make_scripted_model(folder, ["<tool_call>", *CALL, "</tool_call>"])
    options = ("--tool-call-parser", "hermes", "--num-workers", "2", "--num-front-ends", "2")
    log = tmp_path / "log"
    with running_server(str(folder), *options, *ENGINE_OPTIONS, log=log, num_workers=2) as made:
        yield made


class Chats:
    """Clients that ask again and again; some leave in the middle of an answer."""

    def __init__(self, server: Server, seed: int):
        self._server, self._chance = server, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._has_ended = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_CLIENTS)]
        for one in self._threads:
            one.start()

    def end(self) -> None:
        self._has_ended.set()
        for one in self._threads:
            one.join()

    def _run(self) -> None:
        while not self._has_ended.is_set():
            leaves_after = self._chance.choice([None, None, self._chance.randrange(len(WORDS))])
            try:
                self.outcomes[self.ask(leaves_after)] += 1
            except (AssertionError, requests.RequestException, ValueError) as error:
                self.wrong.append(repr(error)[:2000])

    def ask(self, leaves_after: int | None = None) -> str:
        """How a chat ends: its call is whole, or it has an error that the faults allow."""
        content, arguments, ends, lines, is_parsed = "", "", [], [], True
        with self._server.post(PATH, CHAT, stream=True) as answer:
            if answer.status_code != 200:
                return self._error(answer.json())
            for line in answer.iter_lines():
                lines.append(line)
                if leaves_after is not None and len(lines) > leaves_after:
                    return "left"
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return self._error(event)
                for choice in event["choices"]:
                    delta = choice["delta"]
                    is_parsed &= "parsing_error" not in delta
                    content += delta.get("content") or ""
                    for call in delta.get("tool_calls") or ():
                        arguments += call["function"].get("arguments") or ""
                    ends += [choice["finish_reason"]] if choice["finish_reason"] else []
        assert lines.count(b"data: [DONE]") == 1
        assert len(ends) == 1
        if not is_parsed:
            # Two helpers were killed while they had this text; the rest of it comes as it is.
            assert "".join(WORDS) in arguments + content, (arguments, content)
            return "not parsed"
        assert ends == ["tool_calls"]
        assert not content.strip(), content
        assert json.loads(arguments) == {"a": "".join(WORDS)}
        return "called"

    def _error(self, event: dict[str, dict[str, str]]) -> str:
        code = event["error"]["code"]
        assert code in ALLOWED, event
        return code


def family(server: Server, word: str) -> list[psutil.Process]:
    """The server's processes with a word in their command line."""
    found = []
    for one in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [one] if word in " ".join(one.cmdline()) else []
    return found


def kill_helper(server: Server, chance: random.Random) -> None:
    """One that parses, or the one that it is a fork of."""
    chance.choice(family(server, "titopool::parsing")).kill()


def stop_helper(server: Server, chance: random.Random) -> None:
    helper = chance.choice(family(server, "titopool::parsing"))
    helper.send_signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    helper.send_signal(signal.SIGCONT)


def kill_worker(server: Server, chance: random.Random) -> None:
    chance.choice(family(server, "VLLM::EngineCore")).kill()
    wait_until(lambda: server.get("/ready").json()["num_ready"] == 2, RESTART_S, lambda: server.log)


def kill_template(server: Server, chance: random.Random) -> None:
    """The process that workers are forks of; the next worker waits for another one."""
    chance.choice(family(server, "workers.template")).kill()


FAULTS: list[Callable[[Server, random.Random], None]] = [
    kill_helper, stop_helper, kill_worker, kill_template,
]  # fmt: skip


def test_each_call_is_whole_or_ends_with_an_error(server: Server):
    chance = random.Random(SEED)
    chats = Chats(server, SEED)
    faults: Counter[str] = Counter()
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end or not faults.total():
            time.sleep(chance.uniform(0.5, 2))
            # A killed worker takes longer than the others.
            fault = chance.choices(FAULTS, [20, 10, 1, 2])[0]
            with suppress(psutil.NoSuchProcess, IndexError):
                fault(server, chance)
                faults[fault.__name__] += 1
    finally:
        chats.end()
    print(dict(faults), dict(chats.outcomes))
    assert not chats.wrong, chats.wrong[:3]
    assert chats.outcomes["called"]
    assert chats.ask() == "called"
    assert "Traceback" not in server.log
