"""`GET /requests` and aborts by its ids, over two front ends and stub workers."""

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import requests
from flask import Flask

from app import create_app
from app.call.open_requests import OpenRequests
from harness.servers import Server, front_ends, wait_until
from titopool.settings.config import ServerConfig
from titopool.wire.messages import owned_id
from workers.engine.versions import Versions

KEYS = "alice alice-key\nbob bob-key weight=2\nroot root-key admin\n"


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-key"}


@pytest.fixture
def pool():
    with ThreadPoolExecutor(64) as threads:
        yield threads


def listed(server: Server, session: Any = requests, **options: Any) -> dict[str, Any]:
    answer = session.get(server.url + "/requests", timeout=20, **options)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def ids_of(server: Server, session: Any = requests) -> set[str]:
    return {one["id"] for one in listed(server, session)["requests"]}


@pytest.fixture
def server(start_stub, stub_server):
    """Two front ends, a stub with two slots and one with a slow engine."""
    start_stub(0, "--max-num-seqs", "2", "--delay-s", "60")
    return stub_server(1, "--num-front-ends", "2")


def post(server: Server, session: Any, name: str, body: dict[str, Any], path="/generate/"):
    headers = {"X-Request-Id": name} if name else {}
    return session.post(server.url + path, json=body, headers=headers, timeout=100)


def test_both_front_ends_list_and_abort_all(server, pool):
    fronts = list(front_ends(server).values())
    begun = []
    for index, session in enumerate(fronts):
        body = {"prompts": [[5, 6, 7], [8, 9]], "n": 1, "max_tokens": 2}
        begun.append(pool.submit(post, server, session, f"request-{index}", body))
        # Their ages differ by more than the front ends' answers.
        time.sleep(0.5)
    # Both slots are taken. This one has no id of its own, and waits.
    begun.append(pool.submit(post, server, requests, "", {"prompts": [[1]], "max_tokens": 1}))
    fresh = front_ends(server)
    wait_until(lambda: len(ids_of(server)) == 3, 10)
    for session in fresh.values():
        found = listed(server, session)
        assert (found["num_requests"], found["num_front_ends"], found["num_missing"]) == (3, 2, 0)
        first = next(one for one in found["requests"] if one["id"] == "request-0")
        assert first["route"] == "/generate"
        assert first["client"].startswith("127.0.0.1:")
        assert (first["num_prompts"], first["tokens_in"], first["model"]) == (2, 5, "stub")
        assert first["phase"] in ("running", "waiting")
        ages = [one["age_s"] for one in found["requests"]]
        assert ages == sorted(ages, reverse=True)
        assert 0 < ages[-1] <= ages[0] < 60
    running = [one for one in found["requests"] if one["phase"] == "running"]
    assert running
    assert all(one["workers"] == ["0"] for one in running)
    # The stub counts a token for each job that runs.
    assert sum(one["tokens_out"] for one in running) >= 1
    # One entry at most, the oldest.
    assert [one["id"] for one in listed(server, params={"limit": 1})["requests"]] == ["request-0"]
    # Each is ended through the other front end, also by the id that the server made.
    names = [one["id"] for one in found["requests"]]
    for index, name in enumerate(names):
        session = list(fresh.values())[index % 2]
        answer = post(server, session, "", {"request_ids": [name]}, "/abort_requests")
        assert answer.json()["aborted"] >= 1, name
    for future in begun:
        answer = future.result(30)
        assert answer.status_code == 200
        assert set(answer.json()["finish_reasons"]) == {"abort"}
    wait_until(lambda: not ids_of(server), 10)


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "1e9", ""])
def test_another_limit_is_refused(limit):
    answer = (
        create_app(ServerConfig()).test_client().get("/requests", query_string={"limit": limit})
    )
    assert (answer.status_code, answer.json["error"]["code"]) == (400, "invalid_request")


def test_phases_of_streams_and_checks_and_ids_of_prompts(start_stub, stub_server, pool):
    start_stub(0, "--delay-s", "4")
    server = stub_server(1, "--num-front-ends", "1")

    def phases() -> dict[str, str]:
        return {one["id"]: one["phase"] for one in listed(server)["requests"]}

    # The first id comes after 4 s.
    stream = pool.submit(
        post, server, requests, "streams", {"token_ids": [1, 2, 3], "stream": True,
        "sampling_params": {"max_tokens": 3}}, "/inference/v1/generate",
    )  # fmt: skip
    waits = pool.submit(
        post, server, requests, "checks",
        {"prompts": [[1, 2]], "max_tokens": 2, "min_weight_version": 7},
    )  # fmt: skip
    wait_until(lambda: phases().get("streams") == "streaming", 10)
    batch = {"input_ids": [[4], [5]], "rid": ["rid-a", "rid-b"], "sampling_params": {}}
    hangs = pool.submit(post, server, requests, "batch", batch, "/generate")

    expected = {"streams": "streaming", "checks": "checking", "batch": "running"}
    wait_until(lambda: phases() == expected, 20, lambda: str(listed(server)))
    (shown,) = [one for one in listed(server)["requests"] if one["id"] == "batch"]
    assert shown["job_ids"] == ["rid-a", "rid-b"]
    (shown,) = [one for one in listed(server)["requests"] if one["id"] == "streams"]
    assert 0 < shown["tokens_out"] <= 3
    # Before it has jobs: they end without a token.
    assert server.post("/abort_requests", {"request_ids": ["checks"]}).json()["aborted"] == 1
    assert waits.result(10).json()["finish_reasons"] == ["abort"]
    # By the id of the whole request.
    server.post("/abort_requests", {"request_ids": ["batch"]})
    assert hangs.result(10).status_code in (200, 400)
    stream.result(60)
    wait_until(lambda: phases() == {}, 10)


def test_a_request_that_waits_for_memory_is_aborted(start_stub, stub_server, pool):
    """It waited on, for up to an hour, and all that waited behind it did too."""
    start_stub(0, "--delay-s", "40")
    options = {"num-front-ends": 1, "memory-budget-bytes": 16 * 2**20, "max-queued-prompts": 8}
    server = stub_server(1, *(f"--{name}={value}" for name, value in options.items()))
    # Each expects a quarter of the budget, and an eighth is for small ones: three of them run.
    wide = {"prompts": [[1, 2]], "n": 128, "max_tokens": 1700}
    rids = {
        "input_ids": [[4], [5]], "rid": ["rid-a", "rid-b"],
        "sampling_params": {"n": 128, "max_new_tokens": 4000},
    }  # fmt: skip

    def begin(name: str, body: dict[str, Any], path: str = "/generate/"):
        begun = pool.submit(post, server, requests, name, body, path)
        wait_until(lambda: begun.done() or name in ids_of(server), 10)
        assert not begun.done(), begun.result().text[:1000]
        return begun

    def end(*names: str) -> int:
        return server.post("/abort_requests", {"request_ids": names}).json()["aborted"]

    begun = [begin(f"has-memory-{index}", wide) for index in range(3)]
    wait_until(lambda: all(one["workers"] for one in listed(server)["requests"]), 10)
    first, of_rids, last = begin("first", wide), begin("rids", rids, "/generate"), begin("l", wide)
    for one in listed(server)["requests"][3:]:
        assert (one["phase"], one["workers"]) == ("waiting", []), one
    # An autoscaler adds workers for them, as for those that wait in the queue.
    wait_until(lambda: "titopool_waiting_prompts 4.0" in server.get("/metrics").text, 10)
    assert end("another") == 0
    # One that alone has too many prompts does not wait.
    alone = server.post("/generate/", wide | {"prompts": [[1]] * 9})
    assert "max_queued_prompts" in alone.json()["error"]["message"]
    assert end("first") == 1
    assert first.result(10).json()["finish_reasons"] == ["abort"] * 128
    # One prompt of two.
    assert end("rid-a") == 1
    assert end("rid-a") == 0
    assert end("rids") == 1
    types = {one["meta_info"]["finish_reason"]["type"] for one in of_rids.result(10).json()}
    assert types == {"abort"}
    assert not last.done()
    # All requests.
    assert end() == 4
    for future in (*begun, last):
        assert set(future.result(10).json()["finish_reasons"]) == {"abort"}


def test_a_front_end_that_hangs_holds_nothing_up(server, pool):
    fronts = front_ends(server)
    (stopped, _), (_, session) = fronts.items()
    begun = pool.submit(post, server, requests, "a", {"prompts": [[1, 2]]})
    wait_until(lambda: ids_of(server, session) == {"a"}, 10)
    os.kill(stopped, signal.SIGSTOP)
    try:
        began = time.monotonic()
        found = listed(server, session)
        passed_s = time.monotonic() - began
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert (found["num_front_ends"], found["num_missing"]) == (1, 1)
    assert passed_s < 20
    # And afterwards.
    wait_until(lambda: listed(server, session)["num_missing"] == 0, 10)
    assert ids_of(server, session) == {"a"}
    server.post("/abort_requests", {"request_ids": ["a"]})
    begun.result(10)


def test_other_keys_see_no_ids(start_stub, stub_server, tmp_path, pool):
    start_stub(0, "--delay-s", "30")
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    server = stub_server(1, "--num-front-ends", "2", "--api-key-file", str(keys))
    body = {"prompts": [[1, 2]], "max_tokens": 2}
    begun = pool.submit(
        requests.post, server.url + "/generate/", json=body, timeout=60,
        headers={**bearer("alice"), "X-Request-Id": "of-alice"},
    )  # fmt: skip
    wait_until(lambda: listed(server, headers=bearer("root"))["requests"], 10)
    (seen,) = listed(server, headers=bearer("root"))["requests"]
    assert (seen["id"], seen["key"]) == ("of-alice", "alice")
    assert listed(server, headers=bearer("alice"))["requests"][0]["id"] == "of-alice"
    (hidden,) = listed(server, headers=bearer("bob"))["requests"]
    assert {hidden[name] for name in ("id", "client", "key")} == {None}
    assert hidden["tokens_in"] == 2
    assert server.get("/requests").status_code == 401
    for text in (str(seen), str(hidden)):
        assert "alice-key" not in text
    answer = requests.post(
        server.url + "/abort_requests", json={"request_ids": ["of-alice"]}, timeout=10,
        headers=bearer("root"),
    )  # fmt: skip
    assert answer.json()["aborted"] == 1
    assert begun.result(10).json()["finish_reasons"] == ["abort"]


def test_a_key_aborts_its_own_requests_only(start_stub, stub_server, tmp_path, pool):
    start_stub(0, "--delay-s", "60", "--max-num-seqs", "2")
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    server = stub_server(1, "--num-front-ends", "2", "--api-key-file", str(keys))

    def begin(key: str, name: str, **fields: Any) -> Future[requests.Response]:
        return pool.submit(
            requests.post, server.url + "/generate", json=fields, timeout=60,
            headers={**bearer(key), "X-Request-Id": name},
        )  # fmt: skip

    def abort(key: str, *names: str) -> None:
        path = "/inference/v1/abort_requests"
        answer = requests.post(
            server.url + path, json={"request_ids": names}, headers=bearer(key), timeout=20
        )
        assert answer.status_code == 200, answer.text

    def in_flight(phase: str) -> list[tuple[str, str]]:
        found = listed(server, headers=bearer("root"))["requests"]
        return sorted((one["key"], one["id"]) for one in found if one["phase"] == phase)

    prompts = {"prompts": [[1, 2]], "max_tokens": 2}
    first, of_bob = begin("alice", "step-7", **prompts), begin("bob", "step-7", **prompts)
    wait_until(lambda: in_flight("running") == [("alice", "step-7"), ("bob", "step-7")], 10)
    waits = begin("alice", "step-8", **prompts)
    # By the id of its prompt, as SGLang has it.
    rid = begin("alice", "step-9", input_ids=[1, 2], rid="rid-9")
    late = begin("alice", "step-10", **prompts, min_weight_version=1)
    # Two of them wait, in a front end or at the worker, which then counts as running.
    wait_until(lambda: len(in_flight("waiting")) + len(in_flight("running")) == 4, 10)
    wait_until(lambda: len(in_flight("checking")) == 1, 10)
    abort("bob", "step-7", "step-8", "rid-9", "step-9", "step-10", "alice\nstep-8")
    assert of_bob.result(10).json()["finish_reasons"] == ["abort"]
    found = listed(server, headers=bearer("root"))["requests"]
    assert [one["key"] for one in found] == ["alice"] * 4
    assert not any(one["is_aborted"] for one in found)
    abort("alice", "step-8", "step-10", "rid-9")
    for one in (waits, late):
        assert one.result(10).json()["finish_reasons"] == ["abort"]
    assert rid.result(10).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert not first.done()
    abort("root", "step-7")
    assert first.result(10).json()["finish_reasons"] == ["abort"]


def test_a_request_whose_body_is_checked_is_aborted_once():
    open_requests, ended = OpenRequests(), list[str]()
    with Flask(__name__).test_request_context("/generate/"):
        one = open_requests.begin("checks", "alice")
    one.on_abort = lambda: ended.append("checks")
    assert open_requests.abort(["checks"]) == (1, [])
    assert open_requests.abort(["checks"]) == (0, [])
    assert ended == ["checks"]


def test_a_worker_knows_whose_id_is_meant():
    versions = Versions()
    with versions.request(1, "step-7", "alice") as first, versions.request(1, "step-7", "bob"):
        assert len(versions.named(["step-7"])) == 2
        assert versions.named([owned_id("alice", "step-7")]) == [first]
        assert versions.named([owned_id("", "step-7")]) == []
    assert versions.named(["step-7"]) == []
