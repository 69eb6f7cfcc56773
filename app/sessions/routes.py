"""`POST /sessions`, `GET` and `DELETE /sessions/{id}`, `GET /sessions/{id}/samples`."""

import json
from typing import Any

import msgspec
import numpy as np
from flask import Blueprint, Response
from flask import request as http_request

from app.call.service import current_service
from app.control.pool_commands import end_requests
from app.conversations.access import session_of
from app.conversations.session_samples import all_turns, samples_of
from app.conversations.store import Maker, Turn
from app.http.auth import SESSION_KEY, current_key
from app.http.responses import respond_in_parts
from app.outputs.json_parts import json_parts
from app.outputs.token_arrays import JSON, MSGPACK, is_binary
from app.route.operation import Example, Operation
from app.sessions.bodies import SessionBody
from titopool.answers.sessions import (
    BinarySamples,
    Samples,
    SessionAnswer,
    SessionMade,
    SessionUsage,
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
        InvalidRequest: `metadata` is too long, or the server has no run_dir.
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
    key = current_key()
    name = service.sessions.make(Maker(key.name, key.weight), body.metadata)
    return SessionMade(
        session_id=name, path=f"/sessions/{name}/v1", key=SESSION_KEY.decode() + name
    )


@blueprint.get("/sessions/<session_id>/")
@Operation(errors=(SessionNotFound, SessionEnded), path_parts=NAME)
def read(session_id: str) -> SessionAnswer:
    """The turns of a session: a tree, in which a turn goes on from its parent or begins a branch.

    Raises:
        SessionNotFound: there is none, or another key has made it.
        SessionEnded: it was deleted, or had no call for too long.
    """
    session, store = session_of(session_id), current_service().sessions
    turns = [_shown(turn) for turn in all_turns(store, session)]
    return SessionAnswer(
        session_id=session_id,
        metadata=session.metadata,
        made_s=session.made_s,
        used_s=session.at_s,
        num_branches=sum(bool(turn.reason) for turn in turns),
        num_mismatches=sum(turn.mismatch is not None for turn in turns),
        usage=SessionUsage(
            prompt_tokens=sum(turn.prompt_tokens for turn in turns),
            completion_tokens=sum(turn.completion_tokens for turn in turns),
            cached_tokens=sum(turn.cached_tokens for turn in turns),
        ),
        turns=turns,
    )


def _shown(turn: Turn) -> TurnAnswer:
    head = turn.head
    return TurnAnswer(
        number=turn.number,
        parent=turn.parent,
        reason=head.reason,
        messages=json.loads(turn.added),
        message=head.message,
        finish_reason=head.finish_reason,
        prompt_tokens=head.num_prompt,
        completion_tokens=len(turn.ids) // 4,
        cached_tokens=head.num_cached,
        weight_versions=head.weight_versions,
        model=head.model,
        lora_version=head.lora_version,
        request_id=head.request_id,
        path=head.path,
        began_s=head.began_s,
        ended_s=head.ended_s,
        mismatch=head.mismatch,
    )


@blueprint.get("/sessions/<session_id>/samples/")
@Operation(
    answer=Samples,
    other_media={MSGPACK: BinarySamples},
    errors=(SessionNotFound, SessionEnded),
    path_parts=NAME,
)
def samples(session_id: str) -> Response:
    """What was sent and sampled, as a trainer takes it: a sample for each end of the session's tree.

    As MessagePack (`Accept`), `ids` (int32), `loss_mask` (uint8) and `logprobs` (float32) are the bytes of
    little-endian arrays.

    Raises:
        SessionNotFound: there is none, or another key has made it.
        SessionEnded: it was deleted, or had no call for too long.
    """
    session, store = session_of(session_id), current_service().sessions
    found = samples_of(all_turns(store, session))
    answer = {"session_id": session_id, "metadata": session.metadata}
    if is_binary(http_request.environ.get("HTTP_ACCEPT", "")):
        whole = answer | {"samples": [one.fields() for one in found]}
        encoded = msgspec.msgpack.encode(whole, enc_hook=_bytes_of)
        return respond_in_parts([encoded], MSGPACK)
    return respond_in_parts(json_parts(answer | {"samples": (one.fields() for one in found)}), JSON)


def _bytes_of(array: Any) -> bytes:
    assert isinstance(array, np.ndarray)
    return array.tobytes()


@blueprint.delete("/sessions/<session_id>/")
@Operation(status=204, errors=(SessionNotFound, SessionEnded, NoReadyWorker), path_parts=NAME)
def end(session_id: str) -> Response:
    """Ends a session and the requests in it that run, and forgets its turns.

    Raises:
        SessionNotFound: there is none, or another key has made it.
        SessionEnded: it was deleted before, or had no call for too long.
        TitopoolError: a worker did not end its requests.
    """
    running = current_service().sessions.end(session_of(session_id))
    if running:
        end_requests(running)
    return Response(status=204)
