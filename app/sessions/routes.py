"""`POST /sessions`, `GET` and `DELETE /sessions/{id}`, and what trainers read of a session."""

import json
from functools import partial
from typing import Any

import msgspec
import numpy as np
from flask import Blueprint, Response
from flask import request as http_request

from app.call.jobs import encode_sent
from app.call.service import current_service
from app.control.pool_commands import end_requests
from app.conversations.access import session_of
from app.conversations.session_samples import SessionSample, ends_of, sample_of
from app.conversations.store import Maker, Turn, TurnHead
from app.http.auth import SESSION_KEY, current_key
from app.http.connections import current_client
from app.http.responses import respond_in_parts
from app.outputs.json_parts import Base64, json_parts
from app.outputs.msgpack_parts import msgpack_of_list
from app.outputs.replay import experts_json
from app.outputs.token_arrays import JSON, MSGPACK, is_binary
from app.route.operation import BOOLEAN, Example, Operation, Query
from app.route.query import query_count, query_flag, query_time
from app.sessions.bodies import SamplesBody, SessionBody
from app.sessions.exchanges import as_json, exchanges, record_of, session_metadata, trace_of
from app.sessions.miles_samples import safetensors_of
from titopool.answers.sessions import (
    BinarySamples,
    Bytes,
    Samples,
    SessionAnswer,
    SessionEndedAnswer,
    SessionMade,
    SessionUsage,
    TraceAnswer,
    TurnAnswer,
)
from titopool.errors import (
    InvalidRequest,
    NoReadyWorker,
    QueueFull,
    SessionEnded,
    SessionNotFound,
)

blueprint = Blueprint("sessions", __name__)
MAX_METADATA_BYTES = 64 * 1024
MAX_TRACES = 100_000
# As miles' session server says it.
SAFETENSORS = "application/octet-stream"
GONE = (SessionNotFound, SessionEnded)
SHOWN = {*TurnHead.__struct_fields__} & {*TurnAnswer.__struct_fields__}
NAME = {"session_id": "the id that `POST /sessions` gave"}


@blueprint.post("/sessions/")
@Operation(
    is_body_optional=True,
    errors=(QueueFull,),
    examples={
        "empty": Example("A session", {}),
        "named": Example("With what a trainer wants to read with it", {"metadata": {"task": 17}}),
    },
)
def make(body: SessionBody) -> SessionMade:
    """Makes a session, whose turns the server remembers as token ids.

    `/sessions/{id}/v1` is a base URL with `/chat/completions`, `/completions`, `/messages`,
    `/messages/count_tokens`, `/responses` and `/models`, which take and answer what they do at `/v1`. A
    prompt there begins with the ids that the turns before were sent and sampled with. The key
    `session:{id}` opens these routes and no others, also without the id in the path.

    Raises:
        InvalidRequest: `metadata` is too long or has a number of more than 64 bits, or the server has no
            run_dir.
        QueueFull: there are too many sessions, or their file is full.
    """
    service = current_service()
    if not service.config.run_dir:
        raise InvalidRequest(
            "expected a server with a run_dir, which holds its sessions, got one without; start it with --run-dir"
        )
    length = len(msgspec.json.encode(body.metadata))
    if length > MAX_METADATA_BYTES:
        raise InvalidRequest(
            f"metadata: expected at most {MAX_METADATA_BYTES} bytes of JSON, got {length}; keep it elsewhere",
            param="metadata",
        )
    encode_sent(msgspec.msgpack.encode, body.metadata, "metadata", "metadata")
    key = current_key()
    name = service.sessions.make(Maker(key.name, key.weight), body.metadata)
    return SessionMade(
        session_id=name, path=f"/sessions/{name}/v1", key=SESSION_KEY.decode() + name
    )


@blueprint.get("/sessions/<session_id>/")
@Operation(
    answer=SessionAnswer,
    query=(Query("records", {**BOOLEAN, "default": True}, "false: none, as they are long"),),
    errors=GONE,
    path_parts=NAME,
)
def read(session_id: str) -> Response:
    """The turns of a session: a tree, in which a turn goes on from its parent or begins a branch.

    Raises:
        SessionNotFound: there is none, or another key has made it.
        SessionEnded: it was deleted, or had no call for too long.
    """
    service, session = current_service(), session_of(session_id)
    turns = service.sessions.turns(session, "added")
    heads = [turn.head for turn in turns]
    usage = SessionUsage(
        prompt_tokens=sum(head.num_prompt for head in heads),
        completion_tokens=sum(head.num_sampled for head in heads),
        cached_tokens=sum(head.num_cached for head in heads),
    )
    answer = {
        "session_id": session_id,
        "metadata": session.metadata,
        "made_s": session.made_s,
        "used_s": session.at_s,
        "num_branches": sum(bool(head.reason) for head in heads),
        "num_mismatches": sum(head.mismatch is not None for head in heads),
        "usage": msgspec.to_builtins(usage),
        "turns": (as_json(_shown(turn)) for turn in turns),
        "records": (),
    }
    if query_flag("records", default=True):
        answer["metadata"] = session.metadata | session_metadata(service.sessions, session, turns)
        found = exchanges(service.sessions, session, turns)
        answer["records"] = (record_of(one, service.link.label_of) for one in found)
    return respond_in_parts(json_parts(answer), JSON)


def _shown(turn: Turn) -> TurnAnswer:
    head = turn.head
    return TurnAnswer(
        number=turn.number,
        parent=turn.parent,
        messages=json.loads(turn.added),
        prompt_tokens=head.num_prompt,
        completion_tokens=head.num_sampled,
        cached_tokens=head.num_cached,
        **{name: getattr(head, name) for name in SHOWN},
    )


@blueprint.get("/sessions/<session_id>/traces/")
@Operation(
    answer=list[TraceAnswer],
    query=(
        Query("since", {"type": "number"}, "only turns that ended at this Unix time or later"),
        Query(
            "limit", {"type": "integer", "minimum": 1, "maximum": MAX_TRACES}, "the first of them"
        ),
    ),
    errors=GONE,
    path_parts=NAME,
)
def traces(session_id: str) -> Response:
    """The turns of a session as rLLM's gateway has them, with all messages and ids of each.

    Raises:
        InvalidRequest: a value of the query is not usable.
        SessionNotFound: there is none, or another key has made it.
        SessionEnded: it was deleted, or had no call for too long.
    """
    session, store = session_of(session_id), current_service().sessions
    since_s, limit = query_time("since"), query_count("limit", default=MAX_TRACES, most=MAX_TRACES)
    turns = [turn for turn in store.turns(session) if turn.head.ended_s >= since_s][:limit]
    found = exchanges(store, session, turns)
    return respond_in_parts(
        json_parts(trace_of(one, session_id, session.metadata) for one in found), JSON
    )


@blueprint.get("/sessions/<session_id>/samples/")
@Operation(answer=Samples, other_media={MSGPACK: BinarySamples}, errors=GONE, path_parts=NAME)
def samples(session_id: str) -> Response:
    """What was sent and sampled, as a trainer takes it: a sample for each end of the session's tree.

    As MessagePack (`Accept`), `ids` (int32), `loss_mask` (uint8) and `logprobs` (float32) are the bytes of
    little-endian arrays; images and routed experts are bytes too.

    Raises:
        SessionNotFound: there is none, or another key has made it.
        SessionEnded: it was deleted, or had no call for too long.
    """
    session, store = session_of(session_id), current_service().sessions
    ends, read_sample = ends_of(store.turns(session)), partial(sample_of, store, session)
    answer = {"session_id": session_id, "metadata": session.metadata}
    if is_binary(http_request.environ.get("HTTP_ACCEPT", "")):
        fields = (_binary_fields(read_sample(end)) for end in ends)
        return respond_in_parts(msgpack_of_list(answer, "samples", fields, len(ends)), MSGPACK)
    found = (_json_fields(read_sample(end)) for end in ends)
    return respond_in_parts(json_parts(answer | {"samples": found}), JSON)


def _json_fields(sample: SessionSample) -> dict[str, Any]:
    return sample.fields() | {
        "images": iter([Base64([file]) for file in sample.images]),
        "routed_experts": experts_json(sample.routed_experts, None),
    }


def _binary_fields(sample: SessionSample) -> dict[str, Any]:
    experts = sample.routed_experts
    return sample.fields() | {"routed_experts": experts and msgspec.structs.asdict(experts)}


@blueprint.post("/sessions/<session_id>/samples/")
@Operation(
    answer=Bytes,
    media_type=SAFETENSORS,
    is_body_optional=True,
    errors=(NoReadyWorker, *GONE),
    path_parts=NAME,
    examples={"cut off": Example("At most 64 tokens of a sample", {"max_seq_len": 64})},
)
def miles_samples(session_id: str, body: SamplesBody) -> Response:
    """The samples that were not retried, as miles' trainer takes them: a safetensors file.

    Raises:
        InvalidRequest: `metadata` has a number of more than 64 bits.
        SessionNotFound: there is none, or another key has made it.
        SessionEnded: it was deleted, or had no call for too long.
        NoReadyWorker: the tokenizer cannot be loaded, or is busy.
    """
    encode_sent(msgspec.msgpack.encode, body.metadata, "metadata", "metadata")
    service, session = current_service(), session_of(session_id)
    store, facts, client = service.sessions, service.link.facts, current_client()
    turns = store.turns(session)
    ends = [one for one in ends_of(turns) if not one.was_retried]

    def decode(ids: np.ndarray) -> str:
        text: str = service.tokenizer.use(
            lambda tokenizer: tokenizer.decode(ids.tolist()),
            facts=facts, timeout_s=service.config.request_timeout_s, size=len(ids), client=client,
        )  # fmt: skip
        return text

    parts = safetensors_of(
        lambda: (sample_of(store, session, end, with_images=False) for end in ends),
        body,
        session_metadata(store, session, turns),
        decode,
        service.link.label_of,
    )
    return respond_in_parts(parts, SAFETENSORS)


@blueprint.delete("/sessions/<session_id>/")
@Operation(errors=(*GONE, NoReadyWorker), path_parts=NAME)
def end(session_id: str) -> SessionEndedAnswer:
    """Ends a session and the requests in it that run, and forgets its turns.

    Raises:
        SessionNotFound: there is none, or another key has made it.
        SessionEnded: it was deleted before, or had no call for too long.
        TitopoolError: a worker did not end its requests.
    """
    num_turns, running = current_service().sessions.end(session_of(session_id))
    if running:
        end_requests(running)
    return SessionEndedAnswer(deleted=num_turns)
