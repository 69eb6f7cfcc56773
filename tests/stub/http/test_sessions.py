"""The tree of a session, who may use it, what it may take, and what it survives, with two front ends."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from app.conversations.store import FILE
from harness.servers import Server, front_ends, wait_until
from tests.conftest import StartStub
from titopool.demo_model import make_tokenizer
from titopool.wire.run_dir import SESSIONS

WORDS = ("one", "two", "three")
SYSTEM = {"role": "system", "content": "Be brief."}
KEYS = {"ada": "key-of-ada", "bob": "key-of-bob"}


class Pool(NamedTuple):
    server: Server
    # One for each front end.
    connections: list[requests.Session]

    def call(
        self, method: str, path: str, body: Any = None, *, key: str = "", number: int = 0
    ) -> requests.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.connections[number].request(
            method, self.server.url + path, json=body, headers=headers, timeout=60
        )

    def make(self, key: str = "") -> dict[str, Any]:
        answer = self.call("POST", "/sessions", key=key)
        assert answer.ok, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def chat(
        self, made: dict[str, Any], messages: list[Any], *, key: str = "", number: int = 0
    ) -> requests.Response:
        body = {"messages": messages, "max_tokens": 3, "return_token_ids": True}
        path = f"{made['path']}/chat/completions"
        return self.call("POST", path, body, key=key, number=number)

    def read(self, made: dict[str, Any], key: str = "") -> requests.Response:
        return self.call("GET", f"/sessions/{made['session_id']}", key=key)


@pytest.fixture
def start(
    start_stub: StartStub, stub_server: Callable[..., Server], tmp_path: Path
) -> Callable[..., Pool]:
    def start(*options: str) -> Pool:
        make_tokenizer(tmp_path)
        start_stub(0, "--tokenizer", str(tmp_path), "--max-model-len", "4096")
        run_dir = ("--run-dir", str(tmp_path / "run"))
        server = stub_server(1, "--num-front-ends", "2", *run_dir, *options)
        # A server with keys does not tell everybody which process answers.
        has_keys = "--api-key-file" in options
        found = [requests.Session(), requests.Session()]
        return Pool(server, found if has_keys else list(front_ends(server).values()))

    return start


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def mangled(message: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A message in another form of the same."""
    text = message["content"]
    if message["role"] == "assistant" and draw.random() < 0.5:
        return {**message, "content": f"\n {text} ", "reasoning": "a thought"}
    if draw.random() < 0.5:
        part = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        return {**message, "content": [part]}
    return message


def test_the_prompt_of_each_node_of_random_trees_begins_with_what_was_sampled(start):
    pool, draw = start(), random.Random(7)
    for _ in range(4):
        made = pool.make()
        # Of each turn: all its messages with the answer, and all its ids.
        turns: list[tuple[list[dict[str, Any]], list[int]]] = []
        parents: list[int | None] = []
        for number in range(40):
            history = draw.choice(turns)[0] if turns and draw.random() < 0.9 else [SYSTEM]
            asked = [*history, user(draw.choice(WORDS))]
            answer = pool.chat(made, [mangled(one, draw) for one in asked], number=number % 2)
            assert answer.ok, answer.text
            found = answer.json()
            known = [
                index for index, (before, _) in enumerate(turns) if before == asked[: len(before)]
            ]
            # The longest one, and of equal ones the last.
            parent = max(known, key=lambda index: (len(turns[index][0]), index), default=None)
            prompt, (choice,) = found["prompt_token_ids"], found["choices"]
            if parent is not None:
                before = turns[parent][1]
                assert prompt[: len(before)] == before
                assert len(prompt) > len(before)
            parents.append(parent)
            turns.append(([*asked, choice["message"]], prompt + choice["token_ids"]))
        answer = pool.read(made)
        assert answer.ok, answer.text
        shown = answer.json()["turns"]
        assert [one["parent"] for one in shown] == parents
        path = f"/sessions/{made['session_id']}/samples"
        samples = pool.call("GET", path, number=1).json()["samples"]
        ends = [number for number in range(40) if number not in parents]
        assert [one["turns"][-1] for one in samples] == ends
        assert all(one["ids"] == turns[one["turns"][-1]][1] for one in samples)
        counted = sum(sum(one["loss_mask"]) for one in samples)
        assert counted == sum(one["completion_tokens"] for one in shown)


def test_a_session_is_open_to_its_maker_and_its_own_key_only(start, tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    pool = start("--api-key-file", str(keys))
    made = pool.make(KEYS["ada"])
    for key in (KEYS["ada"], made["key"]):
        assert pool.chat(made, [user("a")], key=key).ok
    other = pool.make(KEYS["bob"])
    for key in (KEYS["bob"], other["key"], "session:" + "0" * 32):
        answer = pool.chat(made, [user("a")], key=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    assert pool.chat(made, [user("a")], key="unknown").status_code == 401
    path = f"/sessions/{made['session_id']}"
    for method, end in (("GET", ""), ("GET", "/samples"), ("DELETE", "")):
        assert pool.call(method, path + end, key=KEYS["bob"]).status_code == 404
        assert pool.call(method, path + end, key=made["key"]).status_code == 401
    # Without the id in the path, the key says which session it is.
    body = {"messages": [user("b")], "max_tokens": 2}
    assert pool.call("POST", "/v1/chat/completions", body, key=made["key"]).ok
    assert len(pool.read(made, KEYS["ada"]).json()["turns"]) == 3
    # The maker's key ends, and with it its sessions.
    keys.write_text(f"bob {KEYS['bob']}\n")
    wait_until(lambda: pool.chat(made, [user("a")], key=made["key"]).status_code == 404, 20)


def test_more_sessions_and_turns_than_there_is_room_for_are_refused(start):
    pool = start("--max-sessions", "2", "--session-bytes", str(1024**2))
    made, _ = pool.make(), pool.make()
    refused = pool.call("POST", "/sessions", number=1)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "60")
    assert "max_sessions" in refused.json()["error"]["message"]
    assert pool.call("DELETE", f"/sessions/{made['session_id']}").json() == {"deleted": 0}
    made = pool.make()
    for number in range(400):
        answer = pool.chat(made, [user(f"{number} " + "long " * 900)], number=number % 2)
        if answer.status_code != 200:
            break
    assert answer.status_code == 429
    assert "session_bytes" in answer.json()["error"]["message"]
    metrics = pool.call("GET", "/metrics").text
    assert "titopool_sessions 2.0" in metrics
    (line,) = [one for one in metrics.splitlines() if one.startswith("titopool_session_bytes ")]
    assert 0.5 * 1024**2 < float(line.rpartition(" ")[2]) <= 1024**2
    assert pool.call("DELETE", f"/sessions/{made['session_id']}").json()["deleted"] > 50
    assert pool.chat(pool.make(), [user("a")]).ok


def test_a_session_ends_after_its_time_without_a_call(start):
    pool = start("--session-timeout-s", "5")
    made = pool.make()
    assert pool.chat(made, [user("a")]).ok
    time.sleep(5.5)
    answer = pool.read(made)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_ended")

    def is_unknown() -> bool:
        pool.make()
        return pool.read(made).status_code == 404

    # That it has ended is known for as long again.
    wait_until(is_unknown, 60)


def test_a_session_outlives_its_front_ends_and_a_broken_file_is_an_error(start, tmp_path: Path):
    pool = start()
    made = pool.make()
    first = pool.chat(made, [user("a")]).json()
    asked = [user("a"), first["choices"][0]["message"], user("b")]
    old = front_ends(pool.server)
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not set(_pids(pool.server)) & set(old), 30)
    pool = Pool(pool.server, list(front_ends(pool.server).values()))
    second = pool.chat(made, asked).json()
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before
    path = tmp_path / "run" / SESSIONS / FILE
    (tmp_path / "broken").write_bytes(b"no database " * 1000)
    os.replace(tmp_path / "broken", path)
    # SQLite would read the pages there.
    Path(f"{path}-wal").unlink()
    answers = [pool.chat(made, asked, number=number % 2) for number in range(4)]
    assert {one.json()["error"]["code"] for one in answers} == {"session_not_found"}
    assert pool.chat(pool.make(), [user("a")]).ok


def _pids(server: Server) -> list[int]:
    try:
        return list(front_ends(server))
    except requests.RequestException:
        return []
