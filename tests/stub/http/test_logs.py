"""Log lines: their requests' ids, and log_format json in every process of a server."""

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import pytest

from harness.servers import Server, running_server, wait_until
from harness.stub_worker import Fault
from titopool.settings.logs import current_request, formatter_of, line_of, note_request
from workers.supervisor.worker_log import WorkerLog, error_text

KEYS = {"time", "level", "logger", "message", "request_id", "worker", "process"}


def record(message: str, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("app.x", logging.ERROR, "f", 1, message, None, fields.pop("exc", None))
    vars(made).update(fields)
    note_request(made)
    return made


@pytest.mark.parametrize(
    "message, name, shown",
    [
        ("it failed", "a-1", "it failed (request a-1)"),
        ("a-1 failed", "a-1", "a-1 failed"),
        ("x", "", "x"),
    ],
)
def test_a_line_of_text_names_its_request_once(message, name, shown):
    line = formatter_of("text").format(record(message, request_id=name))
    assert line.partition(" ERROR app.x: ")[2] == shown


FORGED = "x\n2026-11-21 22:15:55,123 ERROR app: forged\x1b[31m\x9b2J\r\u2028\u202e\udc80 ü"
SHOWN = r"x\n2026-11-21 22:15:55,123 ERROR app: forged\x1b[31m\x9b2J\r\u2028\u202e\udc80 ü"


def test_no_text_of_a_client_begins_a_line_or_moves_a_cursor():
    try:
        raise ValueError(FORGED)
    except ValueError:
        made = record(FORGED, request_id=FORGED, exc=sys.exc_info())
    made.stack_info = FORGED
    first, *others = formatter_of("text").format(made).split("\n")
    assert first.endswith(f" ERROR app.x: {SHOWN}")
    assert all(line.startswith("  ") and line.isprintable() for line in others)
    assert others[0] == "  Traceback (most recent call last):"
    made = record("short", request_id=FORGED)
    assert formatter_of("text").format(made).endswith(f"short (request {SHOWN})")


def test_the_id_of_a_line_is_that_of_its_greenlet_or_task():
    token = current_request.set("mine")
    try:
        assert record("x").request_id == "mine"
        assert record("x", request_id="given").request_id == "given"
    finally:
        current_request.reset(token)
    assert record("x").request_id == ""


def test_a_json_line_has_all_fields_and_any_text():
    try:
        raise ValueError("staged")
    except ValueError:
        made = record("line\none \udcff", request_id="a", exc=sys.exc_info())
    line = formatter_of("json", "3").format(made)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.keys() == KEYS | {"exception"}
    assert (fields["level"], fields["logger"], fields["worker"]) == ("ERROR", "app.x", "3")
    assert fields["message"] == "line\none \udcff"
    assert fields["process"] == os.getpid()
    assert "ValueError: staged" in fields["exception"]
    at = datetime.fromisoformat(fields["time"])
    assert at.utcoffset() == UTC.utcoffset(None)
    assert abs(at.timestamp() - made.created) < 0.001


def test_output_of_libraries_becomes_json_and_objects_stay(tmp_path):
    log = WorkerLog(str(tmp_path), 3, is_kept=True, log_format="json")
    own = line_of("own", formatter_of("json", "3"), level=logging.ERROR)
    error = "ERROR 11-21 22:15:55 [core.py:123] bad"
    for line in (own, error, "plain", '{"a": 1}'):
        log.write(line)
    lines = log.path.read_text().splitlines()
    assert lines[0] == own
    found = [json.loads(line) for line in lines]
    assert [one["message"] for one in found] == ["own", error, "plain", '{"a": 1}']
    assert [one["level"] for one in found] == ["ERROR", "ERROR", "INFO", "INFO"]
    assert {one["worker"] for one in found} == {"3"}
    assert (error_text(own), error_text(own.replace("ERROR", "INFO"))) == ("own", "")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("logs")
    command = f"{sys.executable} -m harness.stub_worker --delay-s 0.2"
    with running_server(
        "--num-workers", "1", "--num-front-ends", "1", "--worker-command", command,
        "--log-format", "json", "--run-dir", str(root / "run"), log=root / "log",
    ) as running:  # fmt: skip
        yield running


def lines_of(server: Server) -> list[dict[str, Any]]:
    """The lines of the server's log; every one is an object."""
    return [json.loads(line) for line in server.log.splitlines()]


def test_front_ends_gunicorn_supervisor_and_worker_write_objects(server):
    headers = {"X-Request-Id": "of-a-client"}
    for _ in range(2):
        assert server.post("/generate/", {"prompts": [[-1]]}, headers=headers).status_code == 400
    answer = server.post("/generate/", {"prompts": [[int(Fault.RAISE)]]}, headers=headers)
    error = answer.json()["error"]
    assert (error["code"], error["request_id"]) == ("generation_failed", "of-a-client")
    wait_until(lambda: "staged surprise" in server.log, 10)
    lines = lines_of(server)
    for one in lines:
        assert one.keys() - {"exception"} == KEYS, one
    loggers = {one["logger"] for one in lines}
    assert {"gunicorn.error", "workers.supervisor", "app.http.request_ids"} <= loggers
    refused = [one for one in lines if one["logger"] == "app.http.request_ids"]
    assert {one["request_id"] for one in refused} == {"of-a-client"}
    (failed,) = [one for one in lines if "staged surprise" in one.get("exception", "")]
    assert (failed["request_id"], failed["worker"]) == ("of-a-client", "0")
    assert failed["message"].startswith("job ")
    # The greeting, too.
    assert any("titopool serves" in one["message"] for one in lines)
    file = server.log_file.parent / "run" / "worker-0.log"
    assert all(json.loads(line).keys() >= KEYS for line in file.read_text().splitlines())


def test_a_path_forges_no_line(stub_server, start_stub):
    start_stub(0)
    server = stub_server(1, "--num-front-ends", "1")
    path = "/x%0a2026-11-21%2022:15:55,123%20ERROR%20app:%20forged%1b%5b31m"
    assert server.get(path).status_code == 404
    wait_until(lambda: "forged" in server.log, 10)
    (line,) = [one for one in server.log.splitlines() if "forged" in one]
    assert r"/x\n2026-11-21 22:15:55,123 ERROR app: forged\x1b[31m" in line


@pytest.mark.parametrize("head", [b"GET / HTTP/9.9\r\n\r\n", b"nonsense\r\n\r\n"])
def test_what_cannot_be_parsed_has_an_id_that_the_log_names(server, head):
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), timeout=10) as client:
        client.sendall(head)
        answer = b""
        while piece := client.recv(65_536):
            answer += piece
    top, _, body = answer.partition(b"\r\n\r\n")
    names = dict(line.split(b": ", 1) for line in top.split(b"\r\n")[1:])
    name = json.loads(body)["error"]["request_id"]
    assert names[b"X-Request-Id"].decode() == name
    wait_until(lambda: name in server.log, 10)


def test_an_error_in_a_stream_has_the_id(server):
    body = {
        "token_ids": [1, int(Fault.DIE_MID_STREAM), 3], "stream": True,
        "sampling_params": {"max_tokens": 3},
    }  # fmt: skip
    answer = server.post("/inference/v1/generate", body, headers={"X-Request-Id": "streamed"})
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    assert json.loads(events[-1])["error"]["request_id"] == "streamed"
    server.wait_until_ready()
