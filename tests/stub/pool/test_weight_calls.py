"""Weight update calls over HTTP with stub engines: wrong orders, two trainers, workers that die."""

import random
import threading

import pytest
import requests

from harness.servers import Server, free_port, wait_until
from tests.conftest import StartServer, StartStub
from tests.kit.trainers.weight_calls import TENSORS, begin, init_body
from workers.process import EXIT_WEIGHTS_UNKNOWN


@pytest.fixture
def pool(start_stub: StartStub, stub_server: StartServer) -> Server:
    """Two stub workers behind two gunicorn processes."""
    for index in range(2):
        start_stub(index, TITOPOOL_WEIGHT_UPDATE_TIMEOUT_S="3")
    return stub_server(2, "--num-front-ends", "2", "--weight-update-timeout-s", "3")


def error_of(answer: requests.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def versions(server: Server) -> list[int]:
    return [one["weight_version"] for one in server.get("/weights").json()["workers"]]


def test_a_complete_update_succeeds_and_every_wrong_order_is_refused(pool: Server, port: int):
    commit = {"update": "none", "policy": "keep"}
    for path, body in [
        ("/weights/begin", {"session": "one", **TENSORS}),
        ("/weights/commit", commit),
        ("/weights/abort", {"update": "none"}),
        ("/weights/close", {"session": "one"}),
    ]:
        status, text = error_of(pool.post(path, body))
        assert (status, "the state is closed" in text) == (409, True), (path, text)
    assert pool.post("/weights/init", init_body(port)).status_code == 200
    assert error_of(pool.post("/weights/init", init_body(port)))[0] == 409
    update = begin(pool).json()["update"]
    status, text = error_of(begin(pool))
    assert status == 409
    assert "the state is receiving, session one, update " in text
    assert pool.post("/weights/commit", {**commit, "update": update}).json()["version"] == 1
    assert error_of(pool.post("/weights/commit", {**commit, "update": update}))[0] == 409
    assert versions(pool) == [1, 1]
    assert pool.post("/weights/close", {"session": "one"}).status_code == 200
    assert error_of(pool.post("/weights/close", {"session": "one"}))[0] == 409
    assert pool.generate([[1, 2]], max_tokens=2)["completion_ids"] == [[2, 1]]


def test_a_group_that_a_worker_has_left_unnoticed_begins_no_update(pool: Server, port: int):
    assert pool.post("/weights/init", init_body(port)).status_code == 200
    assert pool.post("/workers/1/drain", {}).status_code == 202
    # Both front ends.
    wait_until(lambda: all(phases(pool) == ["ready", "unreachable"] for _ in range(8)), 20)
    status, text = error_of(begin(pool))
    assert (status, "workers have left or restarted; form a new group" in text) == (409, True)


def test_the_first_update_of_a_pool_may_be_a_part(pool: Server, port: int):
    pool.post("/weights/init", init_body(port))
    answer = begin(pool, partial=True)
    assert answer.status_code == 200, answer.text
    commit = {"update": answer.json()["update"], "policy": "keep"}
    assert pool.post("/weights/commit", commit).json()["version"] == 1


def test_one_of_two_trainers_is_refused_at_any_front_end(pool: Server, port: int):
    answers: list[int] = []

    def ask(session: str) -> None:
        answer = pool.post("/weights/init", init_body(port, session))
        answers.append(answer.status_code)

    for turn in range(5):
        threads = [threading.Thread(target=ask, args=(f"{turn}-{k}",)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (session,) = {one["session"] for one in pool.get("/weights").json()["workers"]}
        assert session.startswith(f"{turn}-")
        assert sorted(answers) == [200, 409, 409, 409]
        answers.clear()
        assert pool.post("/weights/close", {"session": session}).status_code == 200


def test_malformed_updates_are_refused(pool: Server, port: int):
    for path, body, text in [
        ("/weights/init", init_body(port, world_size=2), "expected 3 (2 workers"),
        ("/weights/init", init_body(port) | {"backend": "mpi"}, "backend"),
        ("/weights/init", init_body(0), "port"),
        ("/weights/init", init_body(free_port()), "nothing answers"),
        ("/weights/begin", {"session": "one", "names": ["w"], "dtypes": [], "shapes": []}, "one entry of each"),
        ("/weights/begin", {"session": "one", "names": [], "dtypes": [], "shapes": []}, "one entry of each"),
        ("/weights/begin", {"session": "one", **TENSORS, "shapes": [[-1]]}, "shapes[0][0]"),
        ("/weights/commit", {"update": "u"}, "policy"),
        ("/weights/commit", {"update": "u", "policy": "hope"}, "policy"),
        ("/pause", {"mode": "keep", "lease_s": 0}, "lease_s"),
        ("/update_weights", {"path": "/tmp", "policy": "keep"}, "no weights_root"),
        ("/update_weights", {"policy": "keep"}, "expected a folder"),
        ("/init_communicator", {"host": "0.0.0.0", "port": port, "world_size": 9}, "expected 3"),
    ]:  # fmt: skip
        status, message = error_of(pool.post(path, body))
        assert status == 400, message
        assert text in message, path
    assert (
        pool.post(
            "/update_named_param", {"name": "w", "dtype": "float32", "shape": [1]}
        ).status_code
        == 409
    )
    assert pool.post("/close_communicator", {}).status_code == 200
    assert pool.post("/reset_prefix_cache", {}).status_code == 200


def test_a_missing_step_ends_the_update_at_its_deadline(pool: Server, port: int):
    pool.post("/weights/init", init_body(port))
    update = begin(pool).json()["update"]
    wait_until(
        lambda: {one["state"] for one in pool.get("/weights").json()["workers"]} == {"closed"}, 8
    )
    status, text = error_of(pool.post("/weights/commit", {"update": update, "policy": "keep"}))
    assert status == 409
    assert "receiving for more than 3 s (weight_update_timeout_s)" in text
    assert pool.post("/weights/init", init_body(port, "two")).status_code == 200


def test_a_worker_that_fails_to_apply_ends_and_the_others_serve(
    start_stub: StartStub, stub_server: StartServer, port: int
):
    good, bad = start_stub(0), start_stub(1, "--bad-weights")
    server = stub_server(2)
    server.post("/weights/init", init_body(port))
    update = begin(server).json()["update"]
    answer = server.post("/weights/commit", {"update": update, "policy": "keep"}).json()
    # The pool has the new weights: the trainer continues, and learns which worker lacks them.
    assert answer["version"] == 1
    ((lost),) = answer["lost"]
    assert lost["endpoint"].endswith("worker-1")
    assert "half loaded" in lost["error"]
    # The worker's own exit code tells its supervisor the reason.
    assert bad.wait(10) == EXIT_WEIGHTS_UNKNOWN
    assert good.poll() is None
    answer = server.generate([[1, 2]], max_tokens=2)
    assert answer["completion_ids"] == [[2, 1]]
    # It restarts with its initial weights, which are not the pool's: it gets no jobs.
    start_stub(1)
    wait_until(lambda: phases(server) == ["ready", "waiting_for_weights"], 30)
    assert server.get("/ready").json()["num_ready"] == 1
    # The group has lost a member; the next group has both workers.
    assert begin(server).status_code in (409, 500)
    server.post("/weights/close", {"session": "one"})
    assert server.post("/weights/init", init_body(port, "two")).status_code == 200
    update = begin(server, "two").json()["update"]
    assert server.post("/weights/commit", {"update": update, "policy": "keep"}).status_code == 200
    wait_until(lambda: phases(server) == ["ready", "ready"], 20)
    assert len(set(versions(server))) == 1


@pytest.mark.parametrize("bad", [True, False], ids=["load-fails", "trainer-aborts"])
def test_workers_that_were_written_in_place_restart_and_the_others_keep_their_weights(
    start_stub: StartStub, stub_server: StartServer, port: int, bad: bool
):
    options = ["--staging", "in_place", *(["--bad-weights"] if bad else [])]
    good, written = start_stub(0), start_stub(1, *options)
    server = stub_server(2)
    server.post("/weights/init", init_body(port))
    update = begin(server).json()["update"]
    if bad:
        answer = server.post("/weights/commit", {"update": update, "policy": "keep"})
        status, text = error_of(answer)
        # The worker may have ended before the call came.
        assert status in (409, 500, 503), text
        assert "worker-1" in text
    else:
        written_now = lambda: server.get("/weights").json()["workers"][1]["is_written_in_place"]  # noqa: E731
        wait_until(written_now, 10)
        answer = server.post("/weights/abort", {"update": update, "reason": "staged"})
        assert [one[-8:] for one in answer.json()["restarting"]] == ["worker-1"]
    assert written.wait(10) == EXIT_WEIGHTS_UNKNOWN
    assert good.poll() is None
    # One version serves: that of before.
    assert server.generate([[1, 2]], max_tokens=2)["weight_versions"] == [[[0, 0]]]
    start_stub(1)
    wait_until(lambda: phases(server) == ["ready", "ready"], 30)
    assert versions(server) == [0, 0]


def phases(server: Server) -> list[str]:
    return sorted(one["phase"] for one in server.get("/ready").json()["workers"])


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(one, marks=pytest.mark.variant) for one in (0, 2))]
)
def test_random_calls_give_conflicts_but_no_server_error(pool: Server, port: int, seed: int):
    chance = random.Random(seed)
    updates = ["none"]
    for _ in range(60):
        session, update = chance.choice(["one", "two"]), chance.choice(updates[-2:])
        path, body = chance.choice(
            [
                ("/weights/init", init_body(port, session)),
                ("/weights/begin", {"session": session, **TENSORS}),
                ("/weights/commit", {"update": update, "policy": chance.choice(["keep", "drain"])}),
                ("/weights/abort", {"update": update}),
                ("/weights/close", {"session": session}),
                ("/pause", {"mode": "abort", "lease_s": 5}),
                ("/resume", {}),
                ("/init_communicator", {"host": "0.0.0.0", "port": port, "world_size": 3}),
                ("/update_named_param", {"name": "w", "dtype": "float32", "shape": [1]}),
                ("/reset_prefix_cache", {}),
                ("/close_communicator", {}),
            ]
        )
        answer = pool.post(path, body)
        assert answer.status_code in (200, 409), answer.text
        updates += [answer.json()["update"]] if path == "/weights/begin" and answer.ok else []
        assert pool.generate([[1, 2, 3]], max_tokens=3)["completion_ids"] == [[3, 2, 1]]
    # Each worker ends an update of TRL's client separately.
    wait_until(lambda: len(set(versions(pool))) == 1, 20, lambda: pool.get("/weights").text)
