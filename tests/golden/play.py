"""Sends the exchanges to a server and keeps the answers: `make golden` writes what they are now."""

import concurrent.futures
import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import requests

from tests.golden.exchanges import (
    MAX_OPEN_REQUESTS,
    MODEL,
    PORT,
    ROOT,
    SESSION,
    UPDATE,
    Exchange,
)
from tests.golden.masks import Masks

FOLDER = Path(__file__).parent / "answers"
# /openapi.json without a server.
DOCUMENT = Path(__file__).parent / "openapi.json"
TIMEOUT_S = 30.0
RUNS_AFTER_S = 0.2


def play(
    exchanges: Iterable[Exchange], url: str, model: str, root: str
) -> dict[str, dict[str, Any]]:
    """The answers by rule and name, in order.

    Args:
        model: the folder of the served model.
        root: a folder with the adapter `math-1`.
    """
    found: dict[str, dict[str, Any]] = {}
    with (
        socket.create_server(("127.0.0.1", 0), backlog=64) as trainer,
        requests.Session() as session,
    ):
        port = trainer.getsockname()[1]
        names = {url: "URL", model: MODEL, root: ROOT, str(port): PORT}
        here: dict[str, Any] = {
            MODEL: model,
            ROOT: root,
            PORT: port,
            UPDATE: "none",
            SESSION: "none",
        }
        masks = Masks({**names, url.partition("//")[2]: "HOST"})
        for one in exchanges:
            answer = _send(session, url, one, here)
            if one.rule == "/weights/begin/" and answer.status_code == 200:
                here[UPDATE] = answer.json()["update"]
            if one.rule == "/sessions/" and answer.status_code == 200:
                here[SESSION] = answer.json()["session_id"]
            answers = found.setdefault(one.rule, {})
            assert one.name not in answers, f"two requests of {one.rule} have the name {one.name}"
            answers[one.name] = {"request": _shown(one), **masks.answer(answer)}
    return found


def _send(
    session: requests.Session, url: str, one: Exchange, here: Mapping[str, Any]
) -> requests.Response:
    body = _filled(one.body, here)
    headers = _filled(one.headers, here)
    if one.key:
        headers["Authorization"] = f"Bearer {_filled(one.key, here)}"
    sent: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
    # A connection for each request, so that both front ends get some.
    headers["Connection"] = "close"
    send = partial(
        session.request,
        one.method,
        url + _filled(one.path, here),
        headers=headers,
        timeout=TIMEOUT_S,
        **sent,
    )
    match one.way:
        case "as always":
            return send()
        case "crowd":
            return _refused(send)
        case "half" | "shut":
            return _in_part(url, one, json.dumps(body).encode(), headers)


def _refused(send: Callable[[], requests.Response]) -> requests.Response:
    """The first answer of a refusal, when both front ends together get one more than they take."""
    num = 2 * MAX_OPEN_REQUESTS + 1
    with concurrent.futures.ThreadPoolExecutor(num) as threads:
        answers = [one.result() for one in [threads.submit(send) for _ in range(num)]]
    return next(one for one in answers if one.status_code == 429)


def _in_part(url: str, one: Exchange, body: bytes, headers: Mapping[str, str]) -> requests.Response:
    host = url.partition("//")[2]
    with closing(http.client.HTTPConnection(host, timeout=TIMEOUT_S)) as connection:
        connection.putrequest(one.method, one.path)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders(body[: len(body) // 2] if one.way == "half" else body)
        if one.way == "shut":
            # Once its job runs: a client that leaves before it is another case.
            time.sleep(RUNS_AFTER_S)
            connection.sock.shutdown(socket.SHUT_WR)
        got = connection.getresponse()
        answer = requests.Response()
        answer.status_code, answer._content = got.status, got.read()
        answer.headers.update(got.headers.items())
        return answer


def _filled(value: Any, here: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(one, here) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, here) for one in value]
    if isinstance(value, str):
        if value in here:
            return here[value]
        for name, one in here.items():
            value = value.replace(name, str(one))
    return value


def _shown(one: Exchange) -> dict[str, Any]:
    body = one.body
    if isinstance(body, bytes):
        body = body[:40].decode()
    way = {} if one.way == "as always" else {"way": one.way}
    return {"method": one.method, "path": one.path, "body": body, **way}


def file_of(rule: str) -> Path:
    """The file with the answers of a rule."""
    name = re.sub(r"\W+", "_", rule).strip("_") or "root"
    return FOLDER / f"{name}.json"


def read(rule: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file_of(rule).read_text())
    return found


def write(answers: Mapping[str, Any]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for rule, one in answers.items():
        file_of(rule).write_text(json.dumps(one, indent=1, ensure_ascii=False) + "\n")
