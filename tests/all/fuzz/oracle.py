"""What must hold of every response, and of the server after all of them."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import msgspec
import psutil

from tests.all.fuzz.bodies import BY_PATH
from tests.all.fuzz.exploring import ServerGone
from tests.all.fuzz.hints import VOCAB_SIZE
from tests.all.fuzz.wire_http import Answer, Sent

# Statuses that a request may get. 501 and 505 refuse the method and the HTTP version; other 5xx
# would mean a lost engine or worker, and none is lost here.
STATUSES = {200, 400, 404, 405, 408, 409, 413, 414, 415, 417, 431, 501, 505}
# Its errors have SGLang's fields too.
DISK = "/update_weights_from_disk/"
# Matches the location in a message: `prompts[3][17]: expected …`.
_LOCATION = re.compile(r"(\w+)((?:\[\d+\]|\.\w+)*): ")


# Of what is read: data, metrics, and the pages with their files.
KINDS = {
    "application/json", "text/plain", "text/html", "text/css", "text/javascript", "image/svg+xml",
    "image/png",
}  # fmt: skip


def path_of(sent: Sent) -> str:
    """The path as in `BY_PATH`: slashes may be repeated or encoded, and the last one missing."""
    return re.sub("/+", "/", unquote(sent.path.partition("?")[0]) + "/")


def check_answer(sent: Sent, answer: Answer) -> None:
    """Any response has a known status and the body that belongs to this status."""
    assert answer.status in STATUSES, str(answer)
    if answer.status >= 400:
        if sent.method != "HEAD":
            check_error(sent, answer)
    elif sent.method == "POST":
        check_good(sent, answer)
    elif sent.method == "GET":
        assert answer.kind in KINDS, str(answer)


def check_error(sent: Sent, answer: Answer) -> None:
    """An error is `{"error": {…}}`; its `param` is a field of the body or of the route's schema."""
    assert answer.kind == "application/json", str(answer)
    body = answer.json()
    path, others = path_of(sent), set[str]()
    if path == DISK:
        others = {"success", "message", "num_paused_requests"}
    # Errors that stand for no route have the server's own shape.
    elif path.startswith("/v1/messages/") and "type" in body:
        others = {"type", "request_id"}
    assert set(body) - others == {"error"}, str(answer)
    error = body["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}, str(answer)
    for name in ("message", "type", "code", "request_id"):
        assert isinstance(error[name], str), str(answer)
    assert error["message"], str(answer)
    assert "<html" not in error["message"].lower(), str(answer)
    if error["param"] is not None:
        check_param(sent, error["param"], error["message"])


def check_param(sent: Sent, param: Any, message: str) -> None:
    route = BY_PATH.get(path_of(sent))
    body = sent.json()
    assert isinstance(param, str), message
    assert route is not None, message
    # A body that cannot be decoded to its end may be refused for a field before the error.
    is_known = param in route.fields or param in _names(body) or param.encode() in sent.body
    assert is_known, f"param {param!r} is in neither body nor schema: {message}"
    location = _LOCATION.match(message)
    if location and isinstance(body, dict) and location[1] in body:
        _check_location(body, location[0], message)


def _check_location(body: Any, location: str, message: str) -> None:
    """The location `messages[1].content: …` exists in the body, except perhaps its last step."""
    steps = re.findall(r"\w+", location)
    for step in steps[:-1]:
        if isinstance(body, list):
            assert int(step) < len(body), f"no such place in the body: {message}"
            body = body[int(step)]
        elif isinstance(body, dict) and step in body:
            body = body[step]
        else:
            return


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _names(inner)


# ---- good answers ----------------------------------------------------------------------


def check_good(sent: Sent, answer: Answer) -> None:
    """A response of status 200 has the fields that its route promises."""
    path = path_of(sent)
    if answer.kind == "text/event-stream":
        _check_stream(answer)
    elif path == "/generate/" and sent.json().get("prompts") is None:
        _check_sglang(answer)
    elif path in ("/generate/", "/chat/"):
        _check_completions(sent, answer)
    elif path == "/inference/v1/abort_requests/":
        assert not answer.body, str(answer)
    elif path == "/v1/completions/render/":
        assert all(one["token_ids"] for one in answer.json()), str(answer)
    else:
        body = answer.json()
        assert isinstance(body, dict), str(answer)
        assert body.get("error") is None, str(answer)
        if "choices" in body:
            _check_choices(body, str(answer))


def _check_completions(sent: Sent, answer: Answer) -> None:
    is_binary = answer.kind == "application/msgpack"
    body = msgspec.msgpack.decode(answer.body) if is_binary else answer.json()
    request_body = sent.json()
    prompts = request_body.get("prompts") or request_body.get("messages")
    assert len(body["prompt_ids"]) == len(prompts) == len(body["num_cached_tokens"]), str(answer)
    n = request_body.get("generation_kwargs", {}).get("n", request_body.get("n", 1))
    for key in ("completion_ids", "finish_reasons", "weight_versions"):
        assert len(body[key]) == n * len(prompts), f"{key}: {answer}"
    assert set(body["finish_reasons"]) <= {"stop", "length", "repetition"}, str(answer)
    if is_binary:
        assert all(len(ids) % 4 == 0 for ids in body["completion_ids"])
        return
    for ids in (*body["prompt_ids"], *body["completion_ids"]):
        assert all(type(one) is int and 0 <= one < VOCAB_SIZE for one in ids), str(answer)
    if body["logprobs"] is not None:
        for name in ("logprobs", "logprob_token_ids"):
            sizes = [[len(entries) for entries in one] for one in body[name]]
            assert list(map(len, sizes)) == list(map(len, body["completion_ids"])), str(answer)
            assert all(size >= 1 for one in sizes for size in one), str(answer)


def _check_sglang(answer: Answer) -> None:
    found = answer.json()
    for one in found if isinstance(found, list) else [found]:
        meta = one["meta_info"]
        assert len(one["output_ids"]) == meta["completion_tokens"], str(answer)
        assert meta["finish_reason"]["type"] in ("stop", "length"), str(answer)
        rows = meta.get("output_token_logprobs")
        assert rows is None or [row[1] for row in rows] == one["output_ids"], str(answer)


def _check_choices(body: dict[str, Any], shown: str) -> None:
    for index, choice in enumerate(body["choices"]):
        assert choice["index"] == index, shown
        assert choice["finish_reason"] in ("stop", "length", "tool_calls", "repetition"), shown
        if "output_mode" not in body:
            assert isinstance(choice.get("text", choice.get("message")), str | dict), shown
    assert body["usage"]["total_tokens"] >= 1, shown


def _check_stream(answer: Answer) -> None:
    events = answer.body.decode().split("\n\n")
    ends = [""] if events[0].startswith("event: ") else ["data: [DONE]", ""]
    assert events[-len(ends) :] == ends, str(answer)
    data = [event.rpartition("data: ")[2] for event in events[: -len(ends)]]
    chunks = [msgspec.json.decode(one) for one in data]
    assert chunks, str(answer)
    assert not any("error" in chunk for chunk in chunks), str(answer)
    assert chunks[-1].get("type") != "response.failed", str(answer)


# ---- the server ------------------------------------------------------------------------


class Processes:
    """All processes of a server, which must stay the same."""

    def __init__(self, pid: int):
        self._root = psutil.Process(pid)
        self._known = self._now()

    def _now(self) -> set[psutil.Process]:
        return {
            one for one in (self._root, *self._root.children(recursive=True))
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
        }  # fmt: skip

    def check(self) -> None:
        """Raises ServerGone if a process has ended."""
        gone = [one for one in self._known if not _is_alive(one)]
        if gone:
            raise ServerGone(f"processes have ended: {gone}")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
