"""The header X-Request-Id, without workers."""

import logging

import pytest
from flask import g, request

from app import create_app
from app.call.call import Call
from app.http.request_ids import adopt
from app.pool.link import Link
from app.route.decoding import decode_body
from app.trl.bodies import GENERATE_BODY
from app.vllm_rl.statuses import never_repeated
from tests.kit.workers.pools import FACTS
from titopool.errors import NoReadyWorker
from titopool.settings.config import ServerConfig

POSTS = ("/generate/", "/chat", "/v1/completions", "/v1/chat/completions", "/v1/responses",
         "/inference/v1/generate", "/none")  # fmt: skip


@pytest.fixture
def client():
    return create_app(ServerConfig()).test_client()


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("name", ["a", "trl-0a1b", "x" * 256, "a/b:c;d=\"e'~"])
def test_an_error_repeats_the_id(client, path, name):
    answer = client.post(path, data=b"{", headers={"X-Request-Id": name})
    assert answer.status_code >= 400
    assert answer.headers.getlist("X-Request-Id") == [name]


@pytest.mark.parametrize("name", ["", "a b", "x" * 257, "é", "a\tb", None])
def test_an_unusable_id_is_replaced(client, name):
    headers = {} if name is None else {"X-Request-Id": name}
    made = [client.post("/generate/", headers=headers).headers["X-Request-Id"] for _ in range(2)]
    assert len(set(made)) == 2
    assert all(len(one) == 32 and one != name for one in made)


def test_a_wrong_key_does_not_hide_the_id():
    client = create_app(ServerConfig(api_key="secret")).test_client()
    answer = client.post("/v1/completions", headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["X-Request-Id"]) == (401, "mine")


@pytest.mark.parametrize(
    "header, body, expected",
    [("h", "b", "h"), (None, "b", "b"), ("h", None, "h"), (None, "a b", None), ("a b", "b", "b")],
)
def test_the_headers_id_wins_over_the_bodys(header, body, expected):
    app = create_app(ServerConfig())
    with app.test_request_context(headers={"X-Request-Id": header} if header else {}):
        app.preprocess_request()
        made = g.request_id
        assert adopt(body) == (expected or made)
        # The response has it.
        assert app.process_response(app.response_class()).headers["X-Request-Id"] == adopt(None)


@pytest.mark.parametrize(
    "header, body, session",
    [("h", "b", "b"), ("h", None, "h"), ("h", "", "h"), ("", "b", "b"), ("", "b" * 999, "b" * 256)],
)
def test_the_bodys_session_wins_over_the_headers(header, body, session, monkeypatch):
    monkeypatch.setattr(Link, "facts", FACTS)
    app = create_app(ServerConfig())
    with app.test_request_context(headers={"X-Session-ID": header}):
        app.preprocess_request()
        with Call(app.extensions["titopool"]) as call:
            call.identify(None, body)
            assert call.session == session


@pytest.mark.parametrize(
    "method, path, code",
    [
        ("GET", "/none", "not_found"),
        ("GET", "/generate/", "method_not_allowed"),
        ("POST", "/sleep", "invalid_request"),
        ("POST", "/weights/begin", "invalid_request"),
        ("POST", "/update_weights", "invalid_request"),
        ("POST", "/v1/load_lora_adapter", "invalid_request"),
        ("POST", "/init_weight_transfer_engine", "invalid_request"),
        ("POST", "/update_weights_from_disk", "invalid_request"),
        ("POST", "/pause_generation", "invalid_request"),
    ],
)
def test_a_failure_is_logged_once_with_its_id(client, caplog, method, path, code):
    with caplog.at_level(logging.INFO, "app"):
        headers = {"X-Request-Id": "mine"}
        answer = client.open(path, method=method, data=b"{", headers=headers)
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    error = answer.json["error"]
    assert error["code"] == code
    # Of a message about the body, the part behind "expected" only: the rest may repeat the body.
    shown = error["message"]
    if code == "invalid_request":
        shown = "expected a JSON body" if path != "/sleep" else "log_level debug shows the message"
    assert line.getMessage() == f"request mine failed with {answer.status_code} {code}: {shown}"


@pytest.mark.parametrize(
    "body, shown",
    [
        ({"prompts": "a-marked-text"}, "prompts: expected `array`"),
        ({"prompts": [], "temperature": "a-marked-text"}, "temperature: expected `float"),
        ({"expected a-marked-text": 1}, "log_level debug shows the message"),
    ],
)
def test_the_log_does_not_repeat_the_body(caplog, body, shown):
    app = create_app(ServerConfig())

    def convert_body() -> str:
        decode_body(request.get_data(), GENERATE_BODY)
        return ""

    app.add_url_rule("/decodes", "decodes", convert_body, methods=["POST"])
    for level in (logging.INFO, logging.DEBUG):
        caplog.clear()
        with caplog.at_level(level, "app"):
            answer = app.test_client().post("/decodes", json=body)
        (line,) = caplog.messages
        assert answer.status_code == 400
        if level == logging.DEBUG:
            assert answer.json["error"]["message"] in line
        else:
            assert shown in line
            assert "a-marked-text" not in line


def test_a_wrong_key_and_a_long_body_are_logged(caplog):
    client = create_app(ServerConfig(api_key="secret", max_body_bytes=10)).test_client()
    with caplog.at_level(logging.INFO, "app"):
        client.post("/generate/")
        client.post("/pause", data=b"x" * 11, headers={"Authorization": "Bearer secret"})
    assert [one.getMessage().split()[4] for one in caplog.records] == ["401", "413"]


@pytest.mark.parametrize("wrap", [lambda handler: handler, never_repeated])
def test_an_unexpected_error_is_logged_once_with_its_traceback(caplog, wrap):
    app = create_app(ServerConfig())

    def fail() -> None:
        raise RuntimeError("staged")

    app.add_url_rule("/fails", "fails", wrap(fail))
    answer = app.test_client().get("/fails", headers={"X-Request-Id": "mine"})
    assert answer.json["error"]["code"] == "internal_error"
    (line,) = caplog.records
    assert "mine" in line.getMessage()
    assert line.exc_info


def test_what_is_nested_too_deep_for_a_handler_is_refused():
    app = create_app(ServerConfig())

    def nest() -> None:
        nest()

    app.add_url_rule("/nests", "nests", nest)
    answer = app.test_client().get("/nests")
    assert (answer.status_code, answer.json["error"]["code"]) == (400, "invalid_request")


def test_answers_to_probes_are_not_logged(caplog):
    app = create_app(ServerConfig())

    def no_worker() -> None:
        raise NoReadyWorker("staged")

    app.view_functions["health.health"] = no_worker
    assert app.test_client().get("/health").status_code == 503
    assert not caplog.records
