"""`titopool top`: in a real terminal before a real server with stub workers, and its parts."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pexpect
import pyte
import pytest
import requests

from harness.servers import REPOSITORY, TITOPOOL, environment, free_port, running_server, wait_until
from titopool.answers.operators import OpenRequest, ReadyWorker
from titopool.top.keys import keys_in
from titopool.top.snapshot import Snapshot, WorkerRow, _worker_row
from titopool.top.tables import age
from titopool.top.view import SORTS, Abort, Quit, View

LINES, COLUMNS = 30, 140


class Terminal:
    """The command in a pseudo-terminal, and the screen that a terminal would show."""

    def __init__(self, *arguments: str, **variables: str):
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.Stream(self._screen)
        self.child = pexpect.spawn(
            TITOPOOL, ["top", "--interval-s", "0.2", *arguments], dimensions=(LINES, COLUMNS),
            # pytest-xdist's processes have COLUMNS, which wins over the terminal's size.
            env=environment(TERM="xterm-256color", COLUMNS=str(COLUMNS), **variables),
            cwd=str(REPOSITORY), encoding="utf-8",
        )  # fmt: skip

    @property
    def text(self) -> str:
        """The lines of the screen now."""
        # It draws all the time, so there may be no pause to wait for.
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            try:
                self._stream.feed(self.child.read_nonblocking(65_536, timeout=0.1))
            except (pexpect.TIMEOUT, pexpect.EOF):
                break
        return "\n".join(self._screen.display)

    def wait_for(self, pattern: str, within_s: float = 10) -> str:
        wait_until(lambda: re.search(pattern, self.text), within_s, lambda: self.text)
        return self.text

    def press(self, keys: str) -> None:
        self.child.send(keys)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """`terminal("--url", …)`."""
    started: list[Terminal] = []

    def start(*arguments: str, **variables: str) -> Terminal:
        started.append(Terminal(*arguments, **variables))
        return started[-1]

    yield start
    for one in started:
        one.child.close(force=True)


def test_the_terminal_shows_sorts_filters_and_aborts(start_stub, stub_server, terminal):
    start_stub(0, "--delay-s", "100", "--max-num-seqs", "4")
    server = stub_server(1, "--num-front-ends", "2", TITOPOOL_API_KEY="a-key")

    def post(name: str, num_ids: int) -> requests.Response:
        headers = {"X-Request-Id": name, "Authorization": "Bearer a-key"}
        return server.post("/generate/", {"prompts": [[7] * num_ids]}, headers=headers)

    with ThreadPoolExecutor() as threads:
        found = []
        for index, name in enumerate(("first", "second", "third")):
            found.append(threads.submit(post, name, 10 * (index + 1)))
            # Their ages differ.
            time.sleep(0.3)
        shown = terminal("--url", server.url, TITOPOOL_API_KEY="a-key")
        shown.wait_for(r"1/1 workers ready +3 requests in flight")
        text = shown.wait_for(
            r"first .* running .* 10 +1 +1 +/generate +127\.0\.0\.1:\d+ +api_key +0 +stub"
        )
        assert text.index("first") < text.index("second") < text.index("third")
        assert re.search(r"0 +ready +0 +\S+ 3/4", text)
        # By tokens out, then by tokens in, the most first.
        shown.press("ss")
        text = shown.wait_for("requests by tokens in")
        assert text.index("third") < text.index("second") < text.index("first")
        shown.press("r")
        text = shown.wait_for("by tokens in, reversed")
        assert text.index("first") < text.index("third")
        shown.press("/sec\r")
        text = shown.wait_for("with 'sec'")
        assert "first" not in text
        shown.press("a")
        shown.wait_for(r"abort second \(/generate, [\d.]+ s\)\?")
        shown.press("n")
        shown.wait_for("not aborted")
        assert not any(one.done() for one in found)
        shown.press("ay")
        shown.wait_for("aborted second")
        assert found[1].result(20).json()["finish_reasons"] == ["abort"]
        assert not any(one.done() for one in (found[0], found[2]))
        # The cursor keeps its request: the last row.
        shown.press("\x1b")
        shown.wait_for("2 requests in flight")
        shown.press("\x1b[B\x1b[Ba")
        shown.wait_for("abort third")
        shown.press("y")
        assert found[2].result(20).json()["finish_reasons"] == ["abort"]
        server.post("/abort_requests", {}, headers={"Authorization": "Bearer a-key"})
        assert found[0].result(20).status_code == 200
        shown.press("q")
        shown.child.expect(pexpect.EOF, timeout=10)
        shown.child.close()
        assert shown.child.exitstatus == 0
        # A pipe gets one table.
        piped = subprocess.run(
            [TITOPOOL, "top", "--once", "--url", server.url], capture_output=True, text=True,
            timeout=60, check=True, env=environment(TITOPOOL_API_KEY="a-key"),
        )  # fmt: skip
        assert "1/1 workers ready" in piped.stdout
        assert "\x1b" not in piped.stdout
        refused = subprocess.run(
            [TITOPOOL, "top", "--once", "--url", server.url], capture_output=True, text=True,
            timeout=60, check=False, env=environment(TITOPOOL_API_KEY="another"),
        )  # fmt: skip
        assert (refused.returncode, "401" in refused.stderr) == (1, True)


def test_it_waits_for_a_server_that_is_away(terminal, start_stub, tmp_path):

    port = free_port()
    shown = terminal("--url", f"http://127.0.0.1:{port}")
    shown.wait_for(r"no server answers \(Connection refused\).*; trying again")
    start_stub(0)
    endpoint = f"ipc://{tmp_path}/worker-0"
    with running_server("--endpoints", endpoint, log=tmp_path / "log", port=port):
        shown.wait_for("1/1 workers ready", 20)
        assert "trying again" not in shown.text
    # What was seen last stays.
    text = shown.wait_for("trying again")
    assert "1/1 workers ready" in text
    shown.press("q")
    shown.child.expect(pexpect.EOF, timeout=10)


def row(name: str | None, **fields: Any) -> OpenRequest:
    plain = OpenRequest(
        id=name, job_ids=[], route="/generate", client=f"host:{name}", key="", age_s=1.0,
        phase="running", num_prompts=1, num_completions=1, tokens_in=1, tokens_out=1,
        workers=["0"], model="m", is_aborted=False,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **fields)


def view_of(*rows: OpenRequest) -> View:
    view = View()
    view.update(Snapshot(requests=list(rows), num_requests=len(rows)))
    return view


def test_the_question_is_about_the_row_that_was_chosen():
    view = view_of(row("a", age_s=3.0), row("b", age_s=2.0), row("c"))
    view.on_key("down")
    assert view.on_key("a") is None
    # Another one comes before the answer.
    view.update(Snapshot(requests=[row("z", age_s=9.0), row("b", age_s=2.0)]))
    assert view.asked.id == "b"
    assert view.on_key("y") == Abort("b")
    view.on_key("a")
    assert view.on_key("q") is None
    assert isinstance(view.on_key("q"), Quit)


def test_a_request_of_another_key_is_not_aborted():
    view = view_of(row(None, client=None, key=None))
    assert view.on_key("a") is None
    assert view.mode == "table"
    assert "administrator" in view.message
    assert view_of().on_key("a") is None


@pytest.mark.parametrize("name", SORTS)
def test_every_order_sorts_hidden_requests_too(name):
    view = view_of(row("a"), row(None, client=None, key=None, workers=[]))
    view.sort = name
    assert len(view.rows) == 2


@pytest.mark.parametrize(
    "text, keys",
    [
        ("q", ["q"]), ("\x1b[A\x1b[B", ["up", "down"]), ("\x1bOAj", ["up", "j"]), ("\x1b", ["escape"]),
        ("\x1b[5~\x1b[6~", ["page-up", "page-down"]), ("\x1b[1;5Cx", ["x"]), ("\r", ["enter"]),
        ("\x03", ["ctrl-c"]), ("é\x01z", ["é", "z"]), ("\x1b[15~a", ["a"]),
    ],
)  # fmt: skip
def test_keys_of_terminals(text, keys):
    assert list(keys_in(text)) == keys


@pytest.mark.parametrize(
    "seconds, text", [(1.26, "1.3 s"), (99.96, "100.0 s"), (125, "2:05"), (3725, "1:02:05")]
)
def test_ages(seconds, text):
    assert age(seconds) == text


def test_rates_of_a_worker_that_was_restarted_count_from_zero():
    shown = ReadyWorker(worker="0", phase="ready", phase_s=1.0, silent_s=0.1, weight_version=1)
    last = Snapshot(counters={("completion_tokens_total", "0"): 500.0}, at_s=10.0)
    now = {("completion_tokens_total", "0"): 30.0, ("prompt_tokens_total", "0"): 4.0,
           ("cached_tokens_total", "0"): 1.0}  # fmt: skip
    found = _worker_row(shown, now, last, 12.0)
    assert isinstance(found, WorkerRow)
    assert (found.tokens_per_s, found.prompt_tokens_per_s, found.cache_hits) == (15.0, 2.0, 0.25)


def test_a_key_is_read_from_a_private_file(tmp_path):
    file = tmp_path / "key"
    file.write_text("k\n")
    file.chmod(0o644)
    answer = subprocess.run(
        [sys.executable, "-m", "titopool.cli", "top", "--once", "--api-key-file", str(file)],
        capture_output=True, text=True, timeout=60, check=False, env=environment(), cwd=REPOSITORY,
    )  # fmt: skip
    assert answer.returncode == 2
    assert "--api-key-file" in answer.stderr
