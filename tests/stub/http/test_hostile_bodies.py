"""Bodies that are slow, large or wasteful, against a front end with a small budget."""

import concurrent.futures
import json
import re
import select
import socket
import time
from collections import Counter
from contextlib import closing, suppress
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
import requests

from harness.images import encoded, picture
from harness.innocents import Waits, innocents
from harness.memory_growth import MIB, front_end, growth_of, taken_by
from harness.servers import Server, wait_until
from harness.stub_worker import IMAGE_PLACEHOLDER, Fault
from titopool.settings.config import ServerConfig

BUDGET = 32 * MIB
# Of /live beside the bodies; idle it takes 2 ms. A body that is decoded in one piece takes seconds.
MAX_MEDIAN_S, MAX_P90_S = 0.1, 1.0
# Each 8 MiB, and what they would take: up to 24 times as much.
BODIES = {
    "lists": ("/generate/", b'{"prompts": [' + b"[]," * (8 * MIB // 3) + b"[1]]}"),
    "objects": ("/v1/chat/completions", b'{"messages": [' + b"{}," * (8 * MIB // 3) + b"{}]}"),
    "ids": ("/detokenize", b'{"tokens": [' + b"1234," * (8 * MIB // 5) + b"1]}"),
    "wide text": ("/generate/", b'{"prompts": ["' + "\u20ac".encode() * (8 * MIB // 3) + b'"]}'),
    "keys": ("/generate", b"{" + b'"a":1,' * (8 * MIB // 6) + b'"b":1}'),
    "biases": ("/v1/completions", b'{"logit_bias": {' + b'"1":1,' * (8 * MIB // 6) + b'"1":1}}'),
    "arguments": (
        "/v1/chat/completions",
        b'{"messages": [], "chat_template_kwargs": {"a": [' + b"1," * 4 * MIB + b"1]}}",
    ),
    "names": ("/weights/begin", b'{"names": [' + b'"",' * (8 * MIB // 3) + b'""]}'),
}


def begin_slowly(server: Server) -> socket.socket:
    """A connection that has sent the head of a request and one byte of its body."""
    address = urlsplit(server.url)
    client = socket.create_connection((address.hostname, address.port), timeout=30)
    client.sendall(b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    return client


@pytest.fixture
def server(stub_server, start_stub, monkeypatch: pytest.MonkeyPatch) -> Server:
    # The stub's model has no tokenizer, which nobody should look for in the network.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start_stub(0)
    return stub_server(
        1, "--num-front-ends", "1", "--memory-budget-bytes", str(BUDGET),
        "--max-open-requests", "2", "--client-timeout-s", "2",
    )  # fmt: skip


def check_live(waits: Waits) -> None:
    """Asserts that /live was answered; the bounds are for a busy machine of CI."""
    taken = sorted(waits.live)
    median, p90 = taken[len(taken) // 2], taken[int(0.9 * len(taken))]
    print(
        f"/live: {len(taken)} calls, median {median:.3f} s, p90 {p90:.3f} s, max {taken[-1]:.3f} s"
    )
    assert not waits.num_failed
    assert median < MAX_MEDIAN_S, median
    assert p90 < MAX_P90_S, p90


def test_slow_and_wasteful_bodies_hurt_nobody(server: Server):
    slow = [begin_slowly(server) for _ in range(8)]
    # Eight unfinished bodies, and two places.
    assert server.generate([[1, 2]], max_tokens=1)["completion_ids"] == [[2]]
    for one in slow:
        # The byte every so often that keeps a connection alive does not help.
        one.sendall(b" ")
    answers = [one.recv(4096) for one in slow]
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers), answers

    process = front_end(server)
    # Imports the tokenizer's library, which takes 350 MiB.
    assert server.post("/generate/", {"prompts": ["a"]}).status_code == 503

    def send(name: str) -> int:
        path, body = BODIES[name]
        try:
            return requests.post(server.url + path, data=body, timeout=60).status_code
        except requests.ConnectionError:
            # The server closed before the whole body was sent.
            return 0

    with (
        innocents(server.url, only_live=True) as waits,
        concurrent.futures.ThreadPoolExecutor(16) as threads,
        growth_of(process) as growth,
    ):
        statuses = Counter(threads.map(send, list(BODIES) * 6))
        wait_until(lambda: server.generate([[1]], max_tokens=1), 30)
    # 503: a text got as far as the tokenizer, which the stub's model does not have.
    assert set(statuses) <= {0, 400, 413, 429, 503}, statuses
    # One of them may take more than the budget; unbounded, eight objects alone take 1.5 GiB.
    assert growth.num_bytes < 8 * BUDGET, f"{growth.num_bytes // MIB} MiB, {statuses}"
    check_live(waits)
    assert front_end(server).pid == process.pid
    # What `app/http/errors.py` logs of an exception that no handler expected.
    assert " failed, request " not in server.log, server.log[-3000:]


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n"]
)
def test_what_comes_late_of_a_slow_body_is_not_another_request(server: Server, framing: bytes):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as client:
        client.sendall(b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\n" + framing)
        # A byte every so often keeps the socket's own timeout away.
        while not select.select([client], [], [], 0.4)[0]:
            client.sendall(b" ")
        answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        with suppress(OSError):
            client.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while more := client.recv(65536):
                answer += more
    assert answer.count(b"HTTP/1.1 ") == 1, answer


def test_the_rest_of_a_refused_body_that_comes_late_stops_nobody(server: Server):
    """gunicorn would read it without a pause: 64 GiB of copies for 64 MiB."""
    address = urlsplit(server.url)
    client = socket.create_connection((address.hostname, address.port), timeout=30)
    size = 2 * ServerConfig().max_body_bytes
    client.sendall(
        b"POST /generate/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n{" % size
    )
    assert client.recv(4096).startswith(b"HTTP/1.1 413 ")
    with innocents(server.url, only_live=True) as waits:
        # The server waits for `client_timeout_s`, 2 s.
        time.sleep(4)
        with suppress(OSError):
            for _ in range(64):
                client.sendall(bytes(MIB))
    client.close()
    check_live(waits)
    assert max(waits.live) < 4 * MAX_P90_S


def test_a_long_body_is_answered_as_a_short_one(server: Server):
    rows = [list(range(index, index + 500)) for index in range(400)]
    for prompts in (rows, [{"prompt_token_ids": row} for row in rows]):
        answer = server.generate(prompts, max_tokens=1)
        assert answer["completion_ids"] == [[row[-1]] for row in rows]
        assert answer["prompt_ids"] == rows
    refused = server.post("/generate/", {"prompts": [*rows, [1, 10**9]]})
    assert refused.json()["error"]["message"].startswith("prompts[400][1]: expected a token id in ")
    sent = {"token_ids": [1] * 400_000, "sampling_params": {}}
    assert server.post("/inference/v1/generate", sent).json()["error"]["code"] == "prompt_too_long"


def test_a_huge_prompt_does_not_take_the_memory_of_its_ids_as_integers(server: Server):
    """5.6 million ids would take 224 MiB as Python's integers."""
    ids, process = b"12345," * (32 * MIB // 6) + b"1", front_end(server)
    for body in (
        b'{"prompts": [[' + ids + b"]]}",
        b'{"prompts": [{"prompt_token_ids": [' + ids + b"]}]}",
    ):
        with growth_of(process) as growth:
            answer = requests.post(server.url + "/generate/", data=body, timeout=120)
        assert answer.json()["error"]["code"] == "prompt_too_long", answer.text
        assert growth.num_bytes < 160 * MIB, f"{body[:30]!r}: {growth.num_bytes // MIB} MiB"


def test_the_largest_body_of_images_passes(stub_server, start_stub):
    """256 MiB, `max_body_bytes`, with the default budget."""
    start_stub(0, "--max-images", "1")
    server = stub_server(1, "--num-front-ends", "1")
    limit, image = ServerConfig().max_body_bytes, encoded(picture(1200, 1000), "BMP")
    num_images = (limit - 100) // (len(image) + len("[[1,40009]],[],") + 2)
    prompts = ",".join([f"[1,{IMAGE_PLACEHOLDER}]"] * num_images)
    images = ",".join([f'["{image}"]'] * num_images)
    body = f'{{"max_tokens":1,"prompts":[{prompts}],"images":[{images}]}}'.encode()
    assert limit - len(image) - 1000 < len(body) <= limit
    process = front_end(server)
    before = process.memory_info().rss
    with innocents(server.url, only_live=True) as waits, growth_of(process) as growth:
        answer = requests.post(server.url + "/generate/", data=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["completion_ids"] == [[IMAGE_PLACEHOLDER]] * num_images
    print(f"{num_images} images, front end {(before + growth.num_bytes) // MIB} MiB")
    assert before + growth.num_bytes < 1536 * MIB
    check_live(waits)


def test_results_count_as_they_arrive(stub_server, start_stub):
    """Those that wait for the last job of their request keep other bodies out."""
    start_stub(0)
    limit = 2 * MIB
    server = stub_server(1, "--num-front-ends", "1", "--memory-budget-bytes", str(limit))
    wide = {"prompts": [[1, 2]], "n": 128, "max_tokens": 1000, "logprobs": 1}
    refused = server.post("/generate/", wide)
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "n")
    expected = (
        f"at most {limit} bytes of completions for a prompt .* got up to {128_000 * 28}: n = 128"
    )
    assert re.search(expected, refused.json()["error"]["message"])
    assert server.post("/generate/", wide | {"logprobs": 0}).status_code == 200
    # Jobs of 0.4 MiB have results of 1.6 MiB. The last one never ends.
    prompts = [[index + 1] * 1000 for index in range(24)]
    sent = {"prompts": [*prompts, [Fault.HANG]], "max_tokens": 1000, "n": 8, "logprobs": 0}
    address = urlsplit(server.url)
    client = HTTPConnection(str(address.hostname), address.port, timeout=30)
    with closing(client):
        client.request("POST", "/generate/", json.dumps(sent))
        wait_until(lambda: taken_by(server) > 0.9 * limit, 30, lambda: str(taken_by(server)))
        refused = server.post("/generate/", {"prompts": [[1] * 100_000, [2] * 100_000]})
        assert refused.status_code == 429
        assert server.generate([[1, 2]], max_tokens=1)["completion_ids"] == [[2]]
    wait_until(lambda: taken_by(server) == 0, 10, lambda: str(taken_by(server)))
    refused = server.post("/generate/", sent | {"prompts": prompts * 2})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "answer_too_large")
    assert f"at most {limit} bytes" in refused.json()["error"]["message"]
