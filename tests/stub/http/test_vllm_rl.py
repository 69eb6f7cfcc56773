"""vLLM's routes for reinforcement learning over HTTP, with stub engines: bodies, orders, statuses."""

import json
import random
import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import requests

from harness.servers import Server, forked_server, stub_worker, wait_until
from harness.stub_worker import Fault
from tests.conftest import StartServer, StartStub
from tests.kit.peers.connections import connections_by_front_end, send_json

TENSORS = {"names": ["w"], "dtype_names": ["torch.float32"], "shapes": [[2, 2]]}


@pytest.fixture(scope="module")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two stub workers behind two gunicorn processes."""
    folder = tmp_path_factory.mktemp("pool")
    endpoints = [f"ipc://{folder}/worker-{index}" for index in range(2)]
    with ExitStack() as stack:
        for one in endpoints:
            timeout = {"TITOPOOL_WEIGHT_UPDATE_TIMEOUT_S": "3"}
            stack.enter_context(stub_worker(one, "--worker-id", one[-1], **timeout))
        yield stack.enter_context(
            forked_server(
                "--endpoints", ",".join(endpoints), "--num-front-ends", "2",
                "--weight-update-timeout-s", "3", log=folder / "log", num_workers=2,
            )
        )  # fmt: skip


@pytest.fixture
def pool(shared_pool: Server) -> Server:
    """The shared pool without a group, an update or a pause."""
    shared_pool.post("/resume", {})
    for path in ("/finish_weight_update", "/shutdown_weight_transfer_engine"):
        shared_pool.post(path, {})
    shared_pool.post("/close_communicator", {})
    wait_until(lambda: states(shared_pool) == ["closed", "closed"], 10)
    return shared_pool


def init_info(port: int, **fields: Any) -> dict[str, Any]:
    info = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3,
        "backend": "gloo",
    }  # fmt: skip
    return {"init_info": {key: one for key, one in {**info, **fields}.items() if one is not None}}


def good(server: Server, path: str, body: Any = None) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 200, f"{path}: {answer.text}"
    result: dict[str, Any] = answer.json()
    return result


def init(server: Server, port: int, **fields: Any) -> None:
    answer = good(server, "/init_weight_transfer_engine", init_info(port, **fields))
    assert answer == {"message": "Weight transfer initialized"}


def send(server: Server, **fields: Any) -> None:
    answer = good(server, "/update_weights", {"update_info": {**TENSORS, **fields}})
    assert answer == {"message": "Weights updated"}


def update(server: Server, body: Any = None) -> dict[str, Any]:
    started = good(server, "/start_weight_update", {"is_checkpoint_format": True})
    assert started == {"message": "Weight update started"}
    send(server)
    return good(server, "/finish_weight_update", body)


def error_of(answer: requests.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def states(server: Server) -> list[str]:
    return [one["state"] for one in server.get("/weights").json()["workers"]]


def label(server: Server) -> str:
    return str(server.get("/weight_info").json()["weight_version"])


def version(server: Server) -> int:
    """The version that all workers serve."""
    (found,) = {one["weight_version"] for one in server.get("/weights").json()["workers"]}
    return int(found)


# ---- what a trainer reads ----------------------------------------------------------------


def test_server_info_has_what_trl_reads_and_nothing_else(pool: Server):
    expected = {
        "weight_transfer_config": {"backend": "gloo"},
        "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"},
        "lora_config": {"max_lora_rank": 16, "max_loras": 8},
        "parallel_config": {"data_parallel_size": 1},
    }
    for path in ("/server_info?config_format=json", "/server_info/?config_format=json"):
        assert pool.get(path).json() == {"vllm_config": expected}
    for path in ("/server_info", "/server_info?config_format=text"):
        (text,) = pool.get(path).json().values()
        assert isinstance(text, str)
        assert '"backend":"gloo"' in text
    assert error_of(pool.get("/server_info?config_format=yaml"))[0] == 400


def test_the_pool_looks_like_one_server_with_all_ranks(pool: Server):
    assert pool.get("/get_world_size").json() == {"world_size": 2}
    assert pool.get("/get_world_size/?include_dp=true").json() == {"world_size": 2}
    assert pool.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    assert pool.get("/get_world_size?include_dp=maybe").status_code == 400
    assert pool.get("/liveness").status_code == 200


@pytest.mark.parametrize(
    "method, path",
    [("POST", "/sleep?level=1"), ("POST", "/wake_up/"), ("GET", "/is_sleeping"),
     ("POST", "/collective_rpc"), ("POST", "/start_draft_weight_update")],
)  # fmt: skip
def test_routes_that_do_not_exist_here_are_refused_by_name(pool: Server, method: str, path: str):
    answer = requests.request(method, pool.url + path, timeout=10)
    status, text = error_of(answer)
    assert (status, path.partition("?")[0].strip("/") in text) == (400, True)
    assert answer.headers["Content-Type"] == "application/json"


# ---- updates -----------------------------------------------------------------------------


def test_updates_with_labels_and_the_integers_behind_them(pool: Server, port: int):
    before = version(pool)
    init(pool, port, packed=True, packed_num_buffers=2)
    answer = update(pool)
    assert (answer["message"], answer["lost"]) == ("Weight update finished", [])
    assert answer["version"] == before + 1
    assert label(pool) == str(before + 1)
    assert update(pool, {"weight_version": "step-7"})["version"] == before + 2
    assert label(pool) == "step-7"
    renamed = good(pool, "/update_weight_version/", {"new_version": "final"})
    assert renamed == {"success": True, "new_version": "final"}
    # Every front end says so at once.
    assert {label(pool) for _ in range(8)} == {"final"}
    assert version(pool) == before + 2
    assert pool.generate([[1, 2]], max_tokens=2)["weight_versions"] == [[[before + 2, 0]]]
    # Without tensors only the label changes.
    good(pool, "/start_weight_update")
    assert good(pool, "/finish_weight_update", {"weight_version": "same"}) == {
        "message": "Weight update finished"
    }
    assert label(pool) == "same"
    assert version(pool) == before + 2


def test_lists_append_and_an_empty_list_repeats_the_last(pool: Server, port: int):
    before = version(pool)
    init(pool, port)
    good(pool, "/start_weight_update/", {})
    for name in ("a", "b", "c"):
        send(pool, names=[name])
    good(pool, "/finish_weight_update/")
    good(pool, "/start_weight_update")
    send(pool, names=[], dtype_names=[], shapes=[])
    good(pool, "/finish_weight_update")
    assert version(pool) == before + 2
    init(pool, port)
    good(pool, "/start_weight_update")
    empty = {"names": [], "dtype_names": [], "shapes": []}
    status, text = error_of(pool.post("/update_weights", {"update_info": empty}))
    assert (status, "send the names" in text) == (400, True)


def test_the_calls_of_trl_after_an_update(pool: Server, port: int):
    init(pool, port)
    update(pool)
    for path in ("/reset_prefix_cache", "/reset_prefix_cache/?reset_running_requests=true"):
        assert good(pool, path)["success"] is True
    # SkyRL sends the flags as JSON too.
    assert good(pool, "/reset_prefix_cache", {"reset_external": False})["success"] is True
    assert error_of(pool.post("/reset_prefix_cache?reset_external=perhaps", None))[0] == 400
    for path in ("/reset_mm_cache", "/reset_encoder_cache/"):
        assert good(pool, path) == {"success": True}
    assert good(pool, "/shutdown_weight_transfer_engine") == {
        "message": "Weight transfer shut down"
    }
    assert states(pool) == ["closed", "closed"]
    good(pool, "/shutdown_weight_transfer_engine")


def test_checksums_name_each_engine(pool: Server):
    found = good(pool, "/weight_checker", {"action": "checksum"})["checksums"]
    assert set(found) == {"dp0:pp0:pcp0:tp0:w", "dp1:pp0:pcp0:tp0:w"}
    same = good(pool, "/weight_checker", {"action": "compare", "baseline": found})
    assert same == {"match": True, "mismatches": []}
    baseline = {**found, "dp1:pp0:pcp0:tp0:w": "other", "gone": "x"}
    other = good(pool, "/weight_checker", {"action": "compare", "baseline": baseline})
    assert other == {"match": False, "mismatches": ["dp1:pp0:pcp0:tp0:w", "gone"]}
    assert error_of(pool.post("/weight_checker", {"action": "compare"}))[0] == 400
    status, text = error_of(pool.post("/weight_checker", {"action": "reset"}))
    assert (status, "writes zeros" in text) == (400, True)


def test_a_stock_trainer_is_told_why_a_cpu_server_refuses_it(pool: Server, port: int):
    answer = pool.post("/init_weight_transfer_engine", init_info(port, backend=None))
    status, text = error_of(answer)
    assert (status, "workers run on CPUs" in text) == (400, True)
    assert states(pool) == ["closed", "closed"]


def test_malformed_bodies_are_refused_before_anything_happens(pool: Server, port: int):
    before = version(pool)
    init(pool, port)
    good(pool, "/start_weight_update")
    nccl_id = "A" * 172
    for path, body, text in [
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/init_weight_transfer_engine", init_info(port, world_size=4), "expected 3 (2 workers"),
        ("/init_weight_transfer_engine", init_info(port, rank_offset=2), "expected 4 (2 workers"),
        ("/init_weight_transfer_engine", init_info(port, rank_offset=0), "rank_offset"),
        ("/init_weight_transfer_engine", init_info(port, master_port=None), "half an address"),
        ("/init_weight_transfer_engine", init_info(port, nccl_unique_id_b64=nccl_id), "an address and an id"),
        ("/init_weight_transfer_engine", init_info(port, backend="mpi"), "backend"),
        ("/init_weight_transfer_engine", init_info(port, m2n_layout={}), "m2n_layout"),
        ("/update_weights", {"update_info": [TENSORS, TENSORS]}, "one object"),
        ("/update_weights", {"update_info": {**TENSORS, "shapes": []}}, "of one length"),
        ("/update_weights", {"update_info": {"names": ["w", "w"], "dtype_names": ["f", "f"], "shapes": [[1], [1]]}}, "twice"),
        ("/update_weights", {"update_info": {**TENSORS, "indices": []}}, "indices"),
        ("/update_weights", {"update_info": {**TENSORS, "packed_buffer_size_bytes": 0}}, "packed_buffer_size_bytes"),
        ("/update_weights", {"update_info": None}, "update_info"),
        ("/update_weights", {"policy": "keep"}, "expected a folder"),
        ("/finish_weight_update", {"weight_version": 7}, "weight_version"),
        ("/update_weight_version", {}, "new_version"),
        ("/abort_requests", [], "expected `object`"),
        ("/pause?mode=gently", None, "abort, wait, keep"),
    ]:  # fmt: skip
        status, message = error_of(pool.post(path, body))
        assert status == 400, (path, body, message)
        assert text in message, path
    # The update that had started goes on.
    send(pool)
    assert good(pool, "/finish_weight_update")["version"] == before + 1


def test_calls_in_a_wrong_order_are_conflicts_that_say_the_state(pool: Server, port: int):
    sending, before = {"update_info": TENSORS}, version(pool)

    def refused(path: str, body: Any, text: str) -> None:
        status, message = error_of(pool.post(path, body))
        assert (status, text in message) == (409, True), (path, message)

    refused("/start_weight_update", None, "call init_weight_transfer_engine first")
    refused("/update_weights", sending, "call start_weight_update first")
    refused("/finish_weight_update", None, "call start_weight_update first")
    init(pool, port)
    refused("/update_weights", sending, "call start_weight_update first")
    good(pool, "/start_weight_update")
    refused("/start_weight_update", None, "call finish_weight_update first")
    refused("/shutdown_weight_transfer_engine", None, "no update")
    send(pool)
    # A repeated list is not received twice.
    send(pool)
    good(pool, "/finish_weight_update")
    # As TRL's asynchronous client does after an error.
    refused("/finish_weight_update", None, "call start_weight_update first")
    assert version(pool) == before + 1


def test_two_workers_receive_or_none(start_stub: StartStub, stub_server: StartServer, port: int):
    start_stub(0, TITOPOOL_WEIGHT_UPDATE_TIMEOUT_S="2")
    start_stub(1, "--slow", "take=9", TITOPOOL_WEIGHT_UPDATE_TIMEOUT_S="2")
    server = stub_server(2, "--weight-update-timeout-s", "2")
    init(server, port)
    good(server, "/start_weight_update")
    answer = server.post("/update_weights", {"update_info": TENSORS})
    assert answer.status_code == 504, answer.text
    # A worker that had not begun to receive keeps its side of the group.
    wait_until(
        lambda: "closed" in states(server) and set(states(server)) <= {"closed", "open"},
        20, lambda: str(states(server)),
    )  # fmt: skip
    assert label(server) == "0"
    assert server.generate([[1, 2]], max_tokens=2)["completion_ids"] == [[2, 1]]


def test_a_group_that_does_not_form_is_a_504(
    start_stub: StartStub, stub_server: StartServer, port: int
):
    start_stub(0, "--slow", "status=9", TITOPOOL_WEIGHT_UPDATE_TIMEOUT_S="1")
    server = stub_server(1, "--weight-update-timeout-s", "1")
    body = init_info(port, world_size=2)
    status, text = error_of(server.post("/init_weight_transfer_engine", body))
    assert (status, "did not form" in text) == (504, True)


def test_a_worker_that_is_absent_is_named_and_nothing_is_repeated(
    start_stub: StartStub, stub_server: StartServer, port: int
):
    start_stub(0)
    gone = start_stub(1)
    server = stub_server(2)
    init(server, port)
    good(server, "/start_weight_update")
    gone.kill()
    gone.wait()
    wait_until(lambda: "unreachable" in states(server), 10)
    for path, body in [
        ("/init_weight_transfer_engine", init_info(port)),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": TENSORS}),
        ("/finish_weight_update", None),
        ("/reset_prefix_cache", None),
        ("/weight_checker", {"action": "checksum"}),
    ]:
        status, text = error_of(server.post(path, body))
        assert (status, "worker-1 does not answer" in text) == (409, True), (path, text)
    # Once it is back, the trainer begins anew; the old weights served all the time.
    start_stub(1)
    server.wait_until_ready(2)
    status, text = error_of(server.post("/finish_weight_update", None))
    assert status == 409
    init(server, port)
    assert update(server)["version"] == 1


def test_a_worker_that_fails_to_apply_is_named(
    start_stub: StartStub, stub_server: StartServer, port: int
):
    start_stub(0)
    start_stub(1, "--bad-weights")
    server = stub_server(2)
    init(server, port)
    answer = update(server)
    assert answer["version"] == 1
    ((lost),) = answer["lost"]
    assert "half loaded" in lost["error"]


def test_no_worker_with_the_new_weights_is_a_conflict(
    start_stub: StartStub, stub_server: StartServer, port: int
):
    start_stub(0, "--bad-weights")
    server = stub_server(1)
    init(server, port, world_size=2)
    good(server, "/start_weight_update")
    send(server)
    answer = server.post("/finish_weight_update", None)
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "weight_update_failed"
    assert "Retry-After" not in answer.headers


@pytest.mark.parametrize("seed", range(3))
def test_routes_in_any_order_do_a_stock_trainer_no_harm(pool: Server, port: int, seed: int):
    chance = random.Random(seed)
    paths = [
        ("/init_weight_transfer_engine", init_info(port)),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": TENSORS}),
        ("/update_weights", {"update_info": {"names": [], "dtype_names": [], "shapes": []}}),
        ("/finish_weight_update", {"weight_version": "step"}),
        ("/shutdown_weight_transfer_engine", None),
        ("/reset_prefix_cache", None),
        ("/reset_mm_cache", None),
        ("/update_weight_version", {"new_version": "v"}),
        ("/weight_checker", {"action": "checksum"}),
        ("/abort_requests", {"request_ids": ["none"]}),
        ("/pause?mode=keep", None),
        ("/resume", None),
        ("/init_communicator", {"host": "0.0.0.0", "port": port, "world_size": 3}),
        ("/update_named_param", {"name": "w", "dtype": "float32", "shape": [1]}),
        ("/close_communicator", None),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
        ("/unload_lora_adapter", {"lora_name": "a"}),
        ("/update_weights", {"weight_dir": "/nowhere"}),
        ("/weights/close", {"session": "none"}),
        ("/sleep", None),
    ]
    # Whole updates too, which chance alone seldom makes.
    plan = [paths[0], paths[1], paths[2], paths[4]]
    for turn in range(60):
        path, body = plan[turn % 4] if chance.random() < 0.4 else chance.choice(paths)
        answer = pool.post(path, body)
        # An adapter that does not exist is a 404, as in vLLM.
        assert answer.status_code in (200, 400, 404, 409), f"{path}: {answer.text}"
        assert isinstance(answer.json(), dict)
    good(pool, "/resume")
    assert pool.generate([[1, 2, 3]], max_tokens=3)["completion_ids"] == [[3, 2, 1]]
    wait_until(
        lambda: len({one["weight_version"] for one in pool.get("/weights").json()["workers"]}) < 2,
        20,
        lambda: pool.get("/weights").text,
    )


# ---- pauses, aborts, adapters ------------------------------------------------------------


def test_vllm_s_pause_has_a_lease_and_waits_for_no_body(pool: Server):
    for path, body in [
        ("/pause?mode=keep", None),
        ("/pause?mode=wait&clear_cache=false", {}),
        ("/pause", None),
    ]:
        answer = good(pool, path, body)
        assert answer == {"status": "paused", "is_paused": True, "lease_s": 3.0}
        assert pool.get("/is_paused").json()["is_paused"] is True
        resumed = good(pool, "/resume/")
        assert (resumed["status"], resumed["was_paused"]) == ("resumed", True)
    own = good(pool, "/pause", {"mode": "drain", "lease_s": 2})
    assert own["lease_s"] == 2
    good(pool, "/resume", {})
    good(pool, "/pause?mode=keep")
    # A trainer that never resumes.
    wait_until(lambda: not pool.get("/is_paused").json()["is_paused"], 10)


def test_an_update_within_a_pause_leaves_it_and_renews_vllm_s_lease(pool: Server, port: int):
    def left_s() -> float:
        return float(pool.get("/is_paused").json()["lease_left_s"])

    init(pool, port)
    good(pool, "/pause?mode=keep")
    for _ in range(2):
        # Half of the lease.
        wait_until(lambda: left_s() < 1.5, 10)
        update(pool)
        assert left_s() > 1.5
    # A client that knows leases has asked for this one.
    good(pool, "/pause", {"mode": "keep", "lease_s": 20})
    wait_until(lambda: left_s() < 19, 10)
    update(pool)
    assert left_s() < 19
    good(pool, "/resume")
    assert pool.get("/is_paused").json()["is_paused"] is False


def test_requests_are_aborted_by_id_or_all(start_stub: StartStub, stub_server: StartServer):
    for index in range(2):
        start_stub(index, "--delay-s", "60")
    server = stub_server(2, "--num-front-ends", "2")
    answers: dict[str, Any] = {}

    def ask(name: str) -> None:
        headers = {"X-Request-Id": name}
        answers[name] = server.post("/generate/", {"prompts": [[1, 2]]}, headers=headers).json()

    names = ["r0", "r1", "cmpl-own", "r3"]
    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(server.metrics("sequences").values()) == 4, 20)
    assert good(server, "/abort_requests", {"request_ids": ["unknown"]})["aborted"] == 0
    # With the prefix of the id that OpenAI's routes answer with.
    assert good(server, "/abort_requests", {"request_ids": ["r0", "cmpl-r1"]}) == {
        "status": "aborted",
        "aborted": 2,
    }
    wait_until(lambda: answers.keys() == {"r0", "r1"}, 10)
    # A header may begin like such an id.
    assert good(server, "/abort_requests", {"request_ids": ["cmpl-own"]})["aborted"] == 1
    wait_until(lambda: "cmpl-own" in answers, 10)
    assert good(server, "/abort_requests/", {})["aborted"] == 1
    for thread in threads:
        thread.join(10)
    assert {one["finish_reasons"][0] for one in answers.values()} == {"abort"}
    assert len(answers) == 4


def test_aborts_reach_prompts_that_wait_in_any_front_end(
    start_stub: StartStub, stub_server: StartServer
):
    start_stub(0, "--delay-s", "60", "--max-num-seqs", "1")
    server = stub_server(1, "--num-front-ends", "2")
    sides = connections_by_front_end(server, 4)

    def send(name: str, connection: HTTPConnection, path: str = "/generate/", **body: Any) -> None:
        send_json(connection, path, body, {"X-Request-Id": name})

    def abort(*names: str) -> int:
        return int(good(server, "/abort_requests", {"request_ids": names})["aborted"])

    # A job of each front end is at the worker; the others wait.
    for number, side in enumerate(sides):
        send(f"running-{number}", side[0], prompts=[[1, 2]])
    wait_until(lambda: sum(server.metrics("sequences").values()) == 2, 20)
    for number, side in enumerate(sides):
        send(f"one-{number}", side[1], prompts=[[1, 2], [3, 4]], n=2)
        send(f"stream-{number}", side[2], "/v1/completions", prompt=[1, 2], stream=True)
        send(f"last-{number}", side[3], prompts=[[1, 2]])
    for number, side in enumerate(sides):
        # 0 until the request has arrived.
        wait_until(lambda name=f"one-{number}": abort(name) == 2, 20)  # type: ignore[misc]
        assert abort(f"one-{number}") == 0
        answer = json.loads(side[1].getresponse().read())
        assert answer["finish_reasons"] == ["abort"] * 4
        assert answer["completion_ids"] == [[]] * 4
        wait_until(lambda name=f"cmpl-stream-{number}": abort(name) == 1, 20)  # type: ignore[misc]
        *events, done = side[2].getresponse().read().decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        (choice,) = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events]
        assert choice["finish_reason"] == "abort"
    assert sum(server.metrics("sequences").values()) == 2
    rest = [connection for side in sides for connection in (side[0], side[3])]
    wait_until(lambda: abort() >= 0 and all(map(has_answer, rest)), 20)
    for connection in rest:
        answer = connection.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["finish_reasons"] == ["abort"]
    wait_until(lambda: sum(server.metrics("sequences").values()) == 0, 20)
    for side in sides:
        for connection in side:
            connection.close()


def has_answer(connection: HTTPConnection) -> bool:
    return bool(select.select([connection.sock], [], [], 0)[0])


def test_aborts_reach_prompts_that_wait_while_no_worker_is_ready(
    start_stub: StartStub, stub_server: StartServer
):
    first = start_stub(0)
    server = stub_server(1, "--num-front-ends", "2")
    body = {"prompts": [[Fault.HANG, 2]]}
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(server.post, "/generate/", body, headers={"X-Request-Id": "waits"})
        wait_until(lambda: sum(server.metrics("sequences").values()) == 1, 20)
        first.kill()
        first.wait()
        start_stub(0, "--load-s", "60")
        wait_until(lambda: states(server) == ["loading"], 20, lambda: str(states(server)))

        def is_aborted() -> bool:
            answer = server.post("/abort_requests", {"request_ids": ["waits"]})
            # The other front end may not have heard of the worker yet.
            assert answer.status_code in (200, 409), answer.text
            return answer.json().get("aborted") == 1

        wait_until(is_aborted, 20)
        assert waiting.result().json()["finish_reasons"] == ["abort"]


# ---- versions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, body",
    [
        ("/generate/", {"prompts": [[1, 2]]}),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 2, "return_token_ids": True}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}),
    ],
)
def test_a_request_waits_for_its_version(pool: Server, port: int, path: str, body: Any):
    wanted = version(pool) + 2
    connection = HTTPConnection(pool.url.removeprefix("http://"), timeout=30)
    send_json(connection, path, {**body, "min_weight_version": wanted})
    init(pool, port)
    assert update(pool)["version"] == wanted - 1
    assert not has_answer(connection)
    assert update(pool)["version"] == wanted
    answer = connection.getresponse()
    result = json.loads(answer.read())
    connection.close()
    assert answer.status == 200, result
    if path == "/generate/":
        assert result["weight_versions"] == [[[wanted, 0]]]
    elif path == "/v1/completions":
        assert result["choices"][0]["weight_versions"] == [[wanted, 0]]
    # The version is there, or a later one.
    for number in (0, wanted - 1, wanted):
        assert pool.post(path, {**body, "min_weight_version": number}).status_code == 200


def test_a_version_that_does_not_come_is_a_conflict(
    start_stub: StartStub, stub_server: StartServer
):
    start_stub(0)
    server = stub_server(1, "--request-timeout-s", "1")
    began = time.monotonic()
    body = {"prompts": [[1, 2]], "min_weight_version": 5}
    status, text = error_of(server.post("/generate/", body))
    assert (status, "version 5 within 1 s" in text) == (409, True)
    assert 0.9 < time.monotonic() - began < 30
    assert error_of(server.post("/generate/", {**body, "min_weight_version": -1}))[0] == 400


def test_a_request_does_not_wait_for_a_version_of_a_run_that_has_ended(
    start_stub: StartStub, stub_server: StartServer, tmp_path: Path
):
    (tmp_path / "root" / "step").mkdir(parents=True)
    start_stub(0, TITOPOOL_WEIGHTS_ROOT=str(tmp_path / "root"))
    server = stub_server(1, "--num-front-ends", "1")

    def load(number: int) -> dict[str, Any]:
        body = {"path": str(tmp_path / "root" / "step"), "policy": "keep", "version": number}
        answer = server.post("/update_weights", body).json()
        return {name: answer[name] for name in ("version", "previous_version")}

    def wait_for(number: int) -> HTTPConnection:
        connection = HTTPConnection(server.url.removeprefix("http://"), timeout=30)
        body = {"prompts": [[1, 2]], "min_weight_version": number}
        send_json(connection, "/generate/", body)
        phases = lambda: [one["phase"] for one in server.get("/requests").json()["requests"]]  # noqa: E731
        wait_until(lambda: phases() == ["checking"], 20)
        assert not has_answer(connection)
        return connection

    assert load(10) == {"version": 10, "previous_version": 0}
    waiting = wait_for(11)
    # A trainer that starts again from an earlier checkpoint may go back, and is told so.
    assert load(3) == {"version": 3, "previous_version": 10}
    answer = waiting.getresponse()
    text = json.loads(answer.read())["error"]["message"]
    waiting.close()
    assert (answer.status, "went back to version 3" in text) == (409, True)
    waiting = wait_for(4)
    assert load(3) == {"version": 3, "previous_version": 3}
    assert load(4) == {"version": 4, "previous_version": 3}
    assert waiting.getresponse().status == 200
    waiting.close()
    assert "version 3 of the weights follows version 10" in server.log


def test_a_client_that_leaves_while_it_waits_for_a_version_is_let_go(
    start_stub: StartStub, stub_server: StartServer
):
    start_stub(0)
    server = stub_server(1, "--num-front-ends", "1", "--max-open-requests", "1")
    body = {"prompts": [[1, 2]]}
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    send_json(connection, "/generate/", {**body, "min_weight_version": 1})
    # It has the only place.
    wait_until(lambda: server.post("/generate/", body).status_code == 429, 20)
    connection.close()
    wait_until(lambda: server.post("/generate/", body).status_code == 200, 20)


def test_a_label_survives_the_restart_of_all_workers(
    start_stub: StartStub, stub_server: StartServer, port: int, tmp_path: Any
):
    run_dir = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    first = start_stub(0, TITOPOOL_RUN_DIR=run_dir)
    server = stub_server(1)
    good(server, "/update_weight_version", {"new_version": "step-3"})
    first.kill()
    first.wait()
    start_stub(0, TITOPOOL_RUN_DIR=run_dir)
    wait_until(lambda: server.get("/health").status_code == 200, 20)
    assert label(server) == "step-3"
