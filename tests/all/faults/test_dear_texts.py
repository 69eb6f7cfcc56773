"""A text that vLLM's parser takes seconds for, and a killed helper: neither costs a neighbour anything."""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.servers import Server, running_server, wait_until
from tests.conftest import ENGINE_OPTIONS
from tests.kit.models.scripted_model import make_scripted_model

# 3 s of a core for qwen3_coder, of which one completion may take 1.
DEAR = ["<tool_call>", "\n<function=f>", "<parameter=a>" * 1250, "</tool_call>"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "temperature": 0}
LENGTH = 400
PLAIN = CHAT | {
    "structured_outputs": {"regex": f"[a-z ]{{{LENGTH}}}"},
    "max_tokens": 2 * LENGTH,
    "stream": True,
}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("dear")
    make_scripted_model(folder, DEAR)
    options = ("--tool-call-parser", "qwen3_coder", "--num-workers", "1", "--num-front-ends", "1")
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(str(folder), *options, *ENGINE_OPTIONS, log=log) as made:
        yield made


def helpers_of(server: Server) -> list[psutil.Process]:
    """The processes that parse, with the one that they are forks of."""
    return [
        one
        for one in psutil.Process(server.process.pid).children(recursive=True)
        if one.cmdline()[:1] == ["titopool::parsing"]
    ]


def plain_stream(server: Server, begun: threading.Event | None = None) -> None:
    """A chat in words; each of its pieces comes once, whatever else goes on."""
    content, ends = "", []
    with server.post(PATH, PLAIN, stream=True) as answer:
        lines = [b""]
        for line in answer.iter_lines():
            lines.append(line)
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                content += choice["delta"].get("content") or ""
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                assert "parsing_error" not in choice["delta"]
            if begun is not None and len(content) > 20:
                begun.set()
    assert lines.count(b"data: [DONE]") == 1
    assert len(ends) == 1
    assert re.fullmatch(f"[a-z ]{{{LENGTH}}}", content)


def check_dear(message: dict[str, Any]) -> None:
    assert "CPU time" in message["parsing_error"]
    assert DEAR[2] in message["content"]


def test_a_dear_text_comes_as_content_and_a_neighbour_is_parsed(server: Server):
    begun = threading.Event()
    before = helpers_of(server)
    with ThreadPoolExecutor(2) as pool:
        neighbour = pool.submit(plain_stream, server, begun)
        assert begun.wait(60)
        (choice,) = server.post(PATH, CHAT | {"max_tokens": 8}).json()["choices"]
        check_dear(choice["message"])
        content: dict[str, str] = {"content": "", "parsing_error": ""}
        with server.post(PATH, CHAT | {"max_tokens": 8, "stream": True}, stream=True) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    for one in json.loads(line[6:])["choices"]:
                        for name in content:
                            content[name] += one["delta"].get(name) or ""
        check_dear(content)
        neighbour.result(120)
    (worker,) = server.get("/ready").json()["workers"]
    assert worker["phase"] == "ready"
    assert helpers_of(server) == before
    counted = re.compile(r"^titopool_worker_unparsed_completions_total{.*} 2.0$", re.MULTILINE)
    wait_until(lambda: counted.search(server.get("/metrics").text), within_s=30)
    assert "is lost" not in server.log


def test_a_killed_helper_is_started_again_and_each_stream_ends_once(server: Server):
    begun = [threading.Event() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(plain_stream, server, one) for one in begun]
        assert all(one.wait(60) for one in begun)
        before = helpers_of(server)
        pids = {one.pid for one in before}
        # The one that helpers are forks of, first: a helper that it made meanwhile would end with it,
        # as the second one of its text.
        for one in sorted(before, key=lambda one: one.ppid() in pids):
            one.kill()
        for one in streams:
            one.result(120)
    assert not set(helpers_of(server)) & set(before)
    counted = re.compile(r"^titopool_worker_parser_restarts_total{.*} [1-9].*$", re.MULTILINE)
    wait_until(lambda: counted.search(server.get("/metrics").text), within_s=30)
    (choice,) = server.post(PATH, CHAT | {"max_tokens": 8}).json()["choices"]
    check_dear(choice["message"])
