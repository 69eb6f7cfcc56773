"""Answers without what differs from run to run: ids, times, ports, pids, folders and the release."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import requests

EVENTS = "text/event-stream"
# A longer text that is no JSON stands as its digest.
MAX_TEXT = 2_000
# Headers that are another server's or another day's.
DROPPED = {"date", "content-length"}
MASKED_HEADERS = {"x-request-id", "x-titopool-version", "etag", "last-modified"}
# Fields of JSON whose value is another one in each run.
MASKED = {
    "created", "created_at", "sequence_number", "pid", "request_id", "uptime_s", "age_s", "last_seen_s", "started_at", "time", "times",
    "taken_s", "waited_s", "port", "host", "seconds", "now", "began_at", "ended_at", "update",
    "last_heartbeat_s", "engine_s", "duration_s", "elapsed_s", "run_s", "e2e_latency", "vllm_version",
    "version", "titopool_version", "figures", "timestamp", "request_timestamp", "latency_ms",
}  # fmt: skip


class Masks:
    """Replaces texts that are this run's, e.g. its folders, and the fields and patterns above."""

    def __init__(self, texts: Mapping[str, str]):
        """`texts`: what replaces each text, the longest first."""
        self._texts = dict(sorted(texts.items(), key=lambda one: -len(one[0])))

    def answer(self, answer: requests.Response) -> dict[str, Any]:
        """Status, headers and body."""
        headers = {
            name: "…" if name.lower() in MASKED_HEADERS else self._text(value)
            for name, value in sorted(answer.headers.items())
            if name.lower() not in DROPPED
        }
        return {"status": answer.status_code, "headers": headers, "body": self._body(answer)}

    def _body(self, answer: requests.Response) -> Any:
        kind = answer.headers.get("Content-Type", "")
        if kind.startswith(EVENTS):
            return self._value(joined(events_of(answer.text)))
        if kind.startswith("application/json"):
            body = answer.json()
            # A snapshot of its own.
            return "the document" if "openapi" in body else self._value(body)
        if kind.startswith("text/plain") and "# HELP" in answer.text:
            # The figures are those of this moment, and their lines come and go with the clients.
            return sorted(re.findall(r"^# (?:HELP|TYPE) (?!python|process).*$", answer.text, re.M))
        text = self._text(answer.content.decode("utf-8", "backslashreplace"))
        if len(text) > MAX_TEXT:
            return f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"
        return text

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                self._text(key): "…" if _is_masked(key, one) else self._value(one)
                for key, one in value.items()
            }
        if isinstance(value, list):
            return [self._value(one) for one in value]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        for old, new in self._texts.items():
            text = text.replace(old, new)
        # Answers have some behind a prefix, as `msg_…`, and before a number.
        text = re.sub(r"(?<![^\W_])[0-9a-f]{32}(?![^\W_])", "ID", text)
        text = re.sub(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "ID", text)
        text = re.sub(r"(?<![^\W_])[0-9a-f]{12}([0-9a-f]{4})?(?![^\W_])", "ID", text)
        # A front end may hear of a closed connection before it answers, or after.
        text = text.replace(" (its connection is closed)", "")
        return re.sub(r"\b\d+\.\d+ s\b", "N s", text)


def _is_masked(key: str, value: Any) -> bool:
    # What is measured in seconds is a float or has several values; settings are integers.
    measured = key.endswith("_s") and isinstance(value, float | list | dict)
    # A worker that drains may have gone when the answer is made.
    is_leaving = key == "phase" and value in ("draining", "unreachable")
    return measured or is_leaving or (key in MASKED and value is not None)


def events_of(text: str) -> list[Any]:
    """The data of a stream's events; JSON as its value."""
    found = []
    for one in re.findall(r"^data: ?(.*)$", text, re.M):
        try:
            found.append(json.loads(one))
        except ValueError:
            found.append(one)
    return found


def joined(events: Iterable[Any]) -> list[Any]:
    """Events with the same fields as the one before are one: how tokens fall into chunks may differ."""
    found: list[Any] = []
    for one in events:
        if (
            found
            and isinstance(one, dict)
            and isinstance(found[-1], dict)
            and found[-1].get("type") == one.get("type")
            and _alike(found[-1], one)
        ):
            # Each event of SGLang's has all so far.
            found[-1] = one if "meta_info" in one else _added(found[-1], one)
        else:
            found.append(one)
    return found


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _alike(first[key], second[key]) for key in first
        )
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second) == 1:
        return _alike(first[0], second[0])
    # A field that only the last of them has, such as the reason why it ended.
    return first is None or second is None or type(first) is type(second)


# Parts of a text and of a list of tokens; other fields repeat.
PARTS = {
    "delta",
    "text",
    "content",
    "tokens",
    "token_ids",
    "output_ids",
    "token_logprobs",
    "top_logprobs",
    "text_offset",
}


def _added(first: Any, second: Any, name: str = "") -> Any:
    if isinstance(first, dict):
        return {key: _added(first[key], second[key], key) for key in first}
    if second is None:
        return first
    if name in PARTS and isinstance(first, str | list):
        return first + second
    if isinstance(first, list) and len(first) == len(second) == 1:
        return [_added(first[0], second[0], name)]
    return second
