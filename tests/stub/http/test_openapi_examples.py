"""The examples of the OpenAPI document are sent, and answers fit the schemas.

Routes that generate go to a real engine. Those for weights and workers go to a worker with a stub
engine, in an order in which they succeed.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from harness.api_schemas import (
    EVENTS,
    MSGPACK,
    Described,
    check_answer,
    operation_of,
    operations,
    problems,
)
from harness.servers import Server
from tests.conftest import StartStub
from tests.kit.models.adapters import make_adapter

# Families whose examples a real engine answers.
GENERATING = {"generate", "openai", "anthropic", "inference", "sessions"}
ALL = [(one, name) for one in operations() for name in one.body.get("examples", {})]
IN_SESSION = operation_of("post", "/sessions/{session_id}/samples")
OF_ENGINE = [
    (one, name)
    for one, name in ALL
    if GENERATING & set(one.operation["tags"]) and one.path != IN_SESSION.path
]
READING = [
    one for one in operations() if one.method == "get" and one.success and "{" not in one.path
]


def examples(pairs: list[tuple[Described, str]]) -> pytest.MarkDecorator:
    ids = [f"{one}-{name}" for one, name in pairs]
    return pytest.mark.parametrize(("described", "name"), pairs, ids=ids)


def body_of(described: Described, name: str) -> Any:
    return described.body["examples"][name]["value"]


@examples(ALL)
def test_an_example_fits_its_schema(described: Described, name: str):
    assert not problems(body_of(described, name), described.body["schema"])


@examples(OF_ENGINE)
def test_an_example_is_answered_as_described(
    single_server: Server, described: Described, name: str
):
    if described.path == "/mismatch":
        asked = {
            "prompts": [[42, 1393]],
            "max_tokens": 2,
            "generation_kwargs": {"ignore_eos": True},
        }
        request_id = body_of(described, name)["request_id"]
        single_server.post("/generate", asked, headers={"X-Request-Id": request_id})
    body = body_of(described, name)
    answer = single_server.post(described.path, body)
    assert answer.status_code == described.success, answer.text
    check_answer(described, answer)
    assert answer.headers["Content-Type"].startswith(EVENTS) == body.get("stream", False)


@examples([(one, name) for one, name in OF_ENGINE if one.path in ("/generate", "/chat")])
def test_the_binary_answer_is_as_described(single_server: Server, described: Described, name: str):
    body = body_of(described, name)
    answer = single_server.post(described.path, body, headers={"Accept": MSGPACK})
    is_trls = "prompts" in body or "messages" in body
    assert (answer.headers["Content-Type"] == MSGPACK) == is_trls
    check_answer(described, answer)


@pytest.mark.parametrize("described", READING, ids=str)
def test_what_is_read_is_as_described(single_server: Server, described: Described):
    answer = single_server.get(described.path)
    assert answer.status_code == described.success, answer.text
    check_answer(described, answer)


def test_what_is_read_of_a_session_is_as_described(single_server: Server):
    made = single_server.post("/sessions", {"metadata": {"task": 17}}).json()
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    base = f"/sessions/{made['session_id']}"
    # The path of an answer in a session is that of its route.
    for path in (f"{base}/v1/chat/completions", f"{base}/v1/messages"):
        answer = single_server.post(path, asked)
        assert answer.status_code == 200, answer.text
        check_answer(operation_of("post", path.removeprefix(base)), answer)
    for path, headers in (
        ("", {}), ("/samples", {}), ("/samples", {"Accept": MSGPACK}), ("/traces", {}),
    ):  # fmt: skip
        answer = single_server.get(base + path, headers=headers)
        assert answer.status_code == 200, answer.text
        check_answer(operation_of("get", "/sessions/{session_id}" + path), answer)
    answer = single_server.post(f"{base}/samples", body_of(IN_SESSION, "cut off"))
    assert answer.status_code == 200, answer.text
    check_answer(IN_SESSION, answer)
    for status in (200, 410):
        answer = requests.delete(single_server.url + base, timeout=30)
        assert answer.status_code == status, answer.text
        check_answer(operation_of("delete", "/sessions/{session_id}"), answer)
    answer = single_server.post(f"{base}/v1/chat/completions", asked)
    check_answer(operation_of("post", "/v1/chat/completions"), answer)


def test_errors_are_as_described(single_server: Server):
    for path, body, status in (
        ("/generate", {"prompts": [[2**20]]}, 400),
        ("/generate", {"prompts": [[1]], "lora_name": "none"}, 404),
        ("/v1/completions", {"prompt": [1] * 2000}, 400),
        ("/v1/responses", {"input": "a", "background": True}, 400),
        ("/sleep", {}, 400),
        ("/finish_weight_update", {}, 409),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, 400),
    ):
        answer = single_server.post(path, body)
        assert answer.status_code == status, answer.text
        check_answer(operation_of("post", path), answer)


# ---- routes that change the pool -----------------------------------------------------------


class Pool:
    """A server with a stub worker; sends examples and compares the answers."""

    def __init__(self, server: Server, port: int, root: Path):
        self.server = server
        self.root = root
        self._port = port
        self.sent: set[tuple[str, str]] = set()

    def send(self, path: str, name: str, **changed: Any) -> dict[str, Any]:
        """The answer to an example with the port and folders that are here."""
        described = operation_of("post", path)
        body = {**body_of(described, name), **changed}
        self.sent.add((path, name))
        return self._checked(described, self.server.post(path, self._here(body)))

    def call(self, path: str, method: str = "post", **options: Any) -> dict[str, Any]:
        """The answer to a call without a body."""
        answer = requests.request(method, self.server.url + path, timeout=60, **options)
        return self._checked(operation_of(method, path), answer)

    def _here(self, value: Any) -> Any:
        if isinstance(value, dict):
            known = {"port": self._port, "master_port": self._port}
            return {key: known.get(key) or self._here(one) for key, one in value.items()}
        if isinstance(value, str) and value.startswith("/weights/"):
            return value.replace("/weights", str(self.root))
        return value

    def _checked(self, described: Described, answer: requests.Response) -> dict[str, Any]:
        assert answer.status_code == described.success, f"{described}: {answer.text}"
        check_answer(described, answer)
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture
def pool(
    start_stub: StartStub,
    stub_server: Callable[..., Server],
    tiny_model: str,
    tmp_path: Path,
) -> Any:
    root = tmp_path / "root"
    root.mkdir()
    make_adapter(tiny_model, root, "math-1", 1)
    (root / "step-7").symlink_to(tiny_model)
    root = root.resolve()
    variables = {"TITOPOOL_WEIGHTS_ROOT": "/", "TITOPOOL_WEIGHT_UPDATE_TIMEOUT_S": "20"}
    start_stub(0, **variables)
    server = stub_server(1, **variables)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as trainer:
        yield Pool(server, trainer.getsockname()[1], root)


def test_examples_for_the_pool_are_answered_as_described(pool: Pool):
    send, call = pool.send, pool.call

    send("/pause", "minute")
    call("/is_paused", "get")
    call("/resume")
    call("/pause", params={"mode": "keep", "clear_cache": "false"})
    call("/pause_generation")
    send("/pause_generation", "in_place")
    send("/continue_generation", "plain")

    send("/weights/init", "gloo")
    update = send("/weights/begin", "partial")["update"]
    call("/weights", "get")
    committed = send("/weights/commit", "keep", update=update, checksum=True)
    assert committed["checksum"]
    update = send("/weights/begin", "partial")["update"]
    send("/weights/abort", "one", update=update)
    send("/weights/init", "gloo")
    send("/weights/close", "one")

    send("/init_weight_transfer_engine", "gloo")
    call("/start_weight_update")
    send("/update_weights", "tensors")
    assert send("/finish_weight_update", "label")["loaded"] == 1
    send("/update_weight_version", "label")
    assert call("/weight_info", "get") == {"weight_version": "step-7"}
    call("/shutdown_weight_transfer_engine")

    send("/init_communicator", "client")
    send("/update_named_param", "tensor")
    call("/reset_prefix_cache", params={"reset_external": "false"})
    call("/close_communicator")

    send("/update_weights", "folder")
    send("/update_weights_from_disk", "folder")
    for prefix in ("/v1", ""):
        send(f"{prefix}/load_lora_adapter", "folder")
        call("/v1/models", "get")
        send(f"{prefix}/unload_lora_adapter", "name")

    send("/weight_checker", "checksum")
    send("/weight_checker", "compare")
    for path in ("/reset_mm_cache", "/reset_encoder_cache", "/flush_cache"):
        call(path)
    call("/flush_cache", "get")
    call("/server_info", "get", params={"config_format": "json"})
    send("/abort_requests", "one")
    send("/abort_request", "one")
    call("/get_world_size", "get", params={"include_dp": "false"})

    call("/workers/connections")

    drain = operation_of("post", "/workers/{name}/drain")
    check_answer(drain, pool.server.post("/workers/none/drain", None))
    drained = pool.server.post("/workers/0/drain", None)
    assert drained.status_code == drain.success
    check_answer(drain, drained)

    rest = {(one.path, name) for one, name in ALL} - pool.sent
    elsewhere = {("/workers/scale", "two"), (IN_SESSION.path, "cut off")}
    assert rest == {(one.path, name) for one, name in OF_ENGINE} | elsewhere


def test_workers_are_scaled_as_described(single_server: Server):
    described = operation_of("post", "/workers/scale")
    answer = single_server.post("/workers/scale", {"num_workers": 1})
    assert answer.status_code == described.success, answer.text
    check_answer(described, answer)
