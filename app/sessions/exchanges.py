"""Turns with all messages and ids of their prompts, in the forms of other gateways: records of miles'
session server (radixark/miles, `rollout/session/types.py`), traces of rLLM's (rllm-model-gateway 0.1.0)."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from app.conversations.store import Session, SessionStore, Turn, engine_ids_along
from app.time_slices import sharing_time

COLUMNS = ("prompt", "ids", "logprobs", "engine_prompt", "added")
# Of an answer's id, which ends with the request's.
PREFIXES = {
    "chat/completions": "chatcmpl-",
    "completions": "cmpl-",
    "responses": "resp_",
    "messages": "msg_",
}
# Of a version of the weights.
LabelOf = Callable[[int], str]


class Exchange(NamedTuple):
    """One request of a session, and its answer."""

    turn: Turn
    # Those of the turns before as they were sampled.
    messages: list[orjson.Fragment]
    # As the engine got it, int32.
    prompt_ids: np.ndarray
    # int32, float32.
    ids: np.ndarray
    logprobs: np.ndarray


def exchanges(store: SessionStore, session: Session, turns: Sequence[Turn]) -> Iterator[Exchange]:
    """The exchanges of `turns`, each of which is read when it is its turn.

    Raises:
        SessionEnded: the session was deleted meanwhile.
    """
    for turn in sharing_time(turns):
        path = store.path_to(session, turn.number, COLUMNS)
        *before, last = path
        messages = [one for turn in before for one in (*json.loads(turn.added), turn.head.message)]
        messages += json.loads(last.added)
        prompt = engine_ids_along(path)[: last.head.num_prompt]
        yield Exchange(
            last, list(map(as_json, messages)), prompt,
            np.frombuffer(last.ids, np.int32), np.frombuffer(last.logprobs, np.float32),
        )  # fmt: skip


def as_json(value: Any) -> orjson.Fragment:
    """A value that may have integers of more than 64 bits, which agents send and orjson refuses."""
    return orjson.Fragment(msgspec.json.encode(value))


def answer_id(turn: Turn) -> str:
    """The id that the agent saw in the answer."""
    return PREFIXES.get(turn.head.path.partition("/v1/")[2], "") + turn.head.request_id


def record_of(one: Exchange, label_of: LabelOf) -> dict[str, Any]:
    """As miles' `SessionRecord`, with the fields that its assembly of samples reads."""
    head = one.turn.head
    sampled = zip(one.logprobs.tolist(), one.ids.tolist(), strict=True)
    versions = [label_of(version) for version, _ in head.weight_versions]
    meta = {
        "output_token_logprobs": [[logprob, token, None] for logprob, token in sampled],
        "prompt_tokens": head.num_prompt,
        "completion_tokens": head.num_sampled,
        "cached_tokens": head.num_cached,
        "weight_version": versions[-1] if versions else None,
    }
    choice = {
        "index": 0,
        "message": head.message,
        "finish_reason": head.finish_reason,
        "meta_info": meta,
    }
    return {
        "timestamp": head.ended_s,
        "request_timestamp": head.began_s,
        "method": "POST",
        "path": head.path,
        "status_code": 200,
        "request": {"model": head.model, "messages": one.messages, "input_ids": one.prompt_ids},
        "response": {"id": answer_id(one.turn), "model": head.model, "choices": [choice]},
    }


def session_metadata(
    store: SessionStore, session: Session, turns: Sequence[Turn]
) -> dict[str, Any]:
    """As the metadata of miles' sessions: the ids of the last turn with those before, and where the template
    would write them in another way. Nothing is ever cut off."""
    path = store.path_to(session, turns[-1].number, COLUMNS) if turns else []
    return {
        "tito_session_mismatch": mismatches(path),
        "accumulated_token_ids": engine_ids_along(path) if path else [],
        "max_trim_tokens": 0,
    }


def mismatches(path: Sequence[Turn]) -> list[dict[str, str]]:
    """As miles' comparator says it, of answers that the template would write with other ids."""
    found = [turn.head.mismatch for turn in path]
    return [{"type": "assistant_text", "detail": one} for one in found if one]


def trace_of(one: Exchange, session_id: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """As `titopool.answers.sessions.TraceAnswer`."""
    head = one.turn.head
    return {
        "trace_id": f"{session_id}-{one.turn.number}",
        "session_id": session_id,
        "model": head.model,
        "messages": one.messages,
        "prompt_token_ids": one.prompt_ids,
        "response_message": head.message,
        "completion_token_ids": one.ids,
        "logprobs": one.logprobs,
        "finish_reason": head.finish_reason,
        "latency_ms": (head.ended_s - head.began_s) * 1000,
        "token_counts": {"prompt": head.num_prompt, "completion": head.num_sampled},
        "timestamp": head.ended_s,
        "metadata": metadata,
        "raw_request": None,
        "raw_response": None,
    }
