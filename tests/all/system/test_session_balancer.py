"""Sessions of two servers with files of their own, behind nginx as docs/operators.md configures it."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from harness.servers import REPOSITORY, Server, free_port, wait_until
from tests.all.system.packages import need, path_of
from tests.conftest import StartStub
from titopool.demo_model import make_tokenizer

BLOCK = re.compile(r"^```nginx\n(.*?)^```$", re.M | re.S)
NUM_SESSIONS = 12
# Characters of a message: more than nginx holds in memory.
LONG = 200_000
START = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx-errors;
{user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/answers;
    fastcgi_temp_path {folder}/unused-1;
    uwsgi_temp_path {folder}/unused-2;
    scgi_temp_path {folder}/unused-3;
{block}
}}
"""


class Balancer:
    """nginx before two servers."""

    def __init__(self, folder: Path, servers: list[Server]):
        (block,) = BLOCK.findall((REPOSITORY / "docs" / "operators.md").read_text())
        port = free_port()
        for name, server in zip(("host-a", "host-b"), servers, strict=True):
            block = block.replace(f"{name}:8000", server.url.removeprefix("http://"))
        block = block.replace("listen 8080", f"listen 127.0.0.1:{port}")
        path, program = folder / "nginx.conf", path_of("nginx")
        assert program is not None
        user = "user root;" if folder.owner() == "root" else ""
        path.write_text(START.format(folder=folder, block=block, user=user))
        self.process = subprocess.Popen([program, "-p", str(folder), "-c", str(path)])
        self.url, self.servers = f"http://127.0.0.1:{port}", servers
        wait_until(self._listens, 20)
        answer = self.call("GET", "/live")
        assert answer.ok, answer.text

    def _listens(self) -> bool:
        try:
            return bool(self.call("GET", "/live").status_code)
        except requests.ConnectionError:
            return False

    def call(self, method: str, path: str, body: Any = None, key: str = "") -> requests.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return requests.request(method, self.url + path, json=body, headers=headers, timeout=60)


@pytest.fixture
def balancer(
    start_stub_at: StartStub, stub_server: Callable[..., Server], tmp_path: Path
) -> Iterator[Balancer]:
    need("nginx")
    make_tokenizer(tmp_path)
    servers = list[Server]()
    for name in ("a", "b"):
        endpoint = f"ipc://{tmp_path}/worker-{name}"
        options = ("--tokenizer", str(tmp_path), "--texts", "--max-model-len", "1000000")
        start_stub_at(endpoint, "--worker-id", name, *options)
        run_dir = ("--run-dir", str(tmp_path / f"run-{name}"))
        servers.append(stub_server(0, "--endpoints", endpoint, *run_dir, num_ready=1))
    made = Balancer(tmp_path, servers)
    yield made
    made.process.terminate()
    made.process.wait(20)


def said(made: requests.Response) -> dict[str, Any]:
    message: dict[str, Any] = made.json()["choices"][0]["message"]
    return message


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def host_of(balancer: Balancer, made: dict[str, Any]) -> int:
    """The only server that has a session."""
    path = f"/sessions/{made['session_id']}"
    statuses = [server.get(path).status_code for server in balancer.servers]
    assert sorted(statuses) == [200, 404]
    return statuses.index(200)


def play(balancer: Balancer, made: dict[str, Any], *, by_key: bool) -> None:
    """Three turns, the last one a stream."""
    path, key = ("/v1", made["key"]) if by_key else (made["path"], "")
    messages, known = [user("a " * (LONG // 2))], list[int]()
    body = {"max_tokens": 3, "return_token_ids": True}
    for _ in range(2):
        answer = balancer.call(
            "POST", f"{path}/chat/completions", {"messages": messages, **body}, key
        )
        assert answer.ok, answer.text
        reply = answer.json()
        assert reply["prompt_token_ids"][: len(known)] == known
        known = reply["prompt_token_ids"] + reply["choices"][0]["token_ids"]
        messages += [said(answer), user("b")]
    whole = {"messages": messages, **body, "stream": True}
    streamed = balancer.call("POST", f"{path}/chat/completions", whole, key)
    first = json.loads(streamed.text.partition("\n")[0].removeprefix("data: "))
    assert first["prompt_token_ids"][: len(known)] == known
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_each_request_of_a_session_reaches_its_host(balancer: Balancer):
    made = [balancer.call("POST", "/sessions", {}).json() for _ in range(NUM_SESSIONS)]
    hosts = [host_of(balancer, one) for one in made]
    assert set(hosts) == {0, 1}
    for number, one in enumerate(made):
        play(balancer, one, by_key=number % 2 == 0)
        path = f"/sessions/{one['session_id']}"
        turns = balancer.call("GET", path).json()["turns"]
        assert [turn["reason"] for turn in turns] == ["first", "", ""]
        (sample,) = balancer.call("GET", f"{path}/samples").json()["samples"]
        assert sum(sample["loss_mask"]) == 9
    # Outside of sessions, and sessions that no host has.
    chat = {"messages": [user("a")], "max_tokens": 3}
    assert balancer.call("POST", "/v1/chat/completions", chat).ok
    unknown = balancer.call("GET", f"/sessions/{'0' * 32}")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")
    for one in made[: NUM_SESSIONS // 2]:
        path = f"/sessions/{one['session_id']}"
        assert balancer.call("DELETE", path).json() == {"deleted": 3}
        assert balancer.call("GET", path).status_code == 410
    # The sessions of a host survive the other one.
    balancer.servers[0].process.kill_group()  # type: ignore[attr-defined]
    for one, host in zip(made[NUM_SESSIONS // 2 :], hosts[NUM_SESSIONS // 2 :], strict=True):
        status = balancer.call("GET", f"/sessions/{one['session_id']}").status_code
        assert status in ((404, 502) if host == 0 else (200,))
    assert balancer.call("POST", "/sessions", {}).ok
