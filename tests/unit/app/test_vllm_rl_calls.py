"""Statuses and keys of vLLM's routes, without workers."""

from collections.abc import Callable
from typing import Any

import gevent
import pytest
from flask import Flask

from app import create_app
from app.http import auth, errors, request_ids
from app.http.responses import json_response
from app.route.query import query_choice, query_flag
from app.vllm_rl import weight_transfer
from app.vllm_rl.statuses import never_repeated
from tests.kit.workers.pools import FakePool
from titopool.errors import (
    Conflict,
    DeadlinePassed,
    InvalidRequest,
    NoReadyWorker,
    QueueFull,
    WeightUpdateFailed,
)
from titopool.settings.config import ServerConfig
from titopool.wire.commands import AbortUpdate, Command, CommandDone, EndTensors


def answer_of(handler: Callable[[], Any]) -> Any:
    app = Flask(__name__)
    request_ids.init_app(app)
    errors.init_app(app)
    app.post("/x")(never_repeated(handler))
    return app.test_client().post("/x")


@pytest.mark.parametrize(
    "error, status, code",
    [
        (NoReadyWorker("gone", retry_after_s=2), 409, "no_ready_worker"),
        (WeightUpdateFailed("failed"), 409, "weight_update_failed"),
        (QueueFull("full", retry_after_s=1), 409, "queue_full"),
        (RuntimeError("a fault"), 409, "internal_error"),
        (OSError("a fault"), 409, "internal_error"),
        (Conflict("order"), 409, "conflict"),
        (InvalidRequest("names"), 400, "invalid_request"),
        (DeadlinePassed("late"), 504, "deadline_passed"),
    ],
)
def test_an_error_never_asks_for_another_call(error: Exception, status: int, code: str):
    def handler() -> Any:
        raise error

    answer = answer_of(handler)
    assert (answer.status_code, answer.json["error"]["code"]) == (status, code)
    assert "Retry-After" not in answer.headers
    assert "a fault" not in answer.text


def test_an_end_that_another_worker_refuses_leaves_the_trainer_s_group(
    monkeypatch: pytest.MonkeyPatch,
):
    def on_command(fake: FakePool, index: int, command: Command) -> None:
        code = "invalid_request" if index and isinstance(command.action, EndTensors) else ""
        done = CommandDone(command.command_id, {"update_id": "u"}, code, "they do not fit")
        gevent.spawn(fake.commands.on_done, f"w{index}", done)

    fake = FakePool(2, on_command)
    monkeypatch.setattr(weight_transfer, "commit_timeout_s", lambda: 10.0)
    with pytest.raises(InvalidRequest, match="they do not fit"):
        weight_transfer.end_tensors(fake.commands, fake.commands.all_workers(), EndTensors())
    undone = [(one, action) for one, action in fake.sent if isinstance(action, AbortUpdate)]
    assert {(one, action.leaves) for one, action in undone} == {("w0", False), ("w1", False)}


def test_all_routes_that_change_something_need_the_admin_key():
    app = create_app(ServerConfig(admin_key="secret"))
    client = app.test_client()
    open_posts = {
        "/generate/", "/chat/", "/get_sequence_logprobs/", "/tokenize/", "/detokenize/",
        "/v1/completions/", "/v1/chat/completions/", "/v1/chat/completions/tokens/",
        "/inference/v1/generate/", "/inference/v1/abort_requests/",
        "/v1/responses/", "/v1/messages/", "/v1/messages/count_tokens/",
        "/v1/completions/render/", "/v1/chat/completions/render/", "/mismatch/", "/sessions/",
        "/sessions/<session_id>/samples/",
    }  # fmt: skip
    for rule in app.url_map.iter_rules():
        if "POST" in (rule.methods or ()) and rule.rule not in open_posts:
            assert client.post(rule.rule).status_code == 401, rule.rule
    assert {
        rule.endpoint.partition(".")[0] for rule in app.url_map.iter_rules()
    } >= auth.ADMIN_BLUEPRINTS


@pytest.mark.parametrize(
    "query, value",
    [("", True), ("?flag=false", False), ("?flag=FALSE", False), ("?flag=1", True), ("?flag=", None),
     ("?flag=2", None)],
)  # fmt: skip
def test_a_flag_of_a_query(query: str, value: bool | None):
    app = Flask(__name__)
    errors.init_app(app)
    app.get("/x")(lambda: json_response({"flag": query_flag("flag", default=True)}))
    answer = app.test_client().get(f"/x{query}")
    if value is None:
        assert answer.status_code == 400
        assert "flag: expected true or false" in answer.json["error"]["message"]
    else:
        assert answer.json == {"flag": value}


def test_a_choice_of_a_query_names_the_choices():
    app = Flask(__name__)
    errors.init_app(app)
    app.get("/x")(lambda: json_response({"x": query_choice("x", {"a": 1, "b": 2}, default=1)}))
    answer = app.test_client().get("/x?x=c")
    assert "x: expected a, b in the query, got 'c'" in answer.json["error"]["message"]
