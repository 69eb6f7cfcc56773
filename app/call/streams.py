"""Streamed responses: server-sent events, one for each chunk of a choice.

As in vLLM's server, `[DONE]` ends the stream. The first chunk decides the HTTP status, so a later
error is an event with the `error` object of other responses.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import orjson
from flask import Response

from app.call.admission import Admission
from app.call.generation import cancel_overdue, submitted
from app.call.kept_logprobs import StreamedLogprobs
from app.counts.http_requests import HttpRecord, current_record
from app.http.request_ids import log_failure
from app.http.responses import PIECE_BYTES, in_pieces, watched
from app.outputs.json_parts import UnknownValue, encode_rows, json_parts
from app.pool.request import ChunkOfJob, Request
from app.time_slices import give_way
from titopool.errors import ClientGone, TitopoolError

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
MIMETYPE = "text/event-stream"


class EventWriter(Protocol):
    """Turns the chunks of one request into a route's event objects."""

    def write_chunks(self, chunks: Iterable[ChunkOfJob]) -> Iterator[dict[str, Any]]:
        """The events of the chunks since the last call."""

    def write_end(self) -> Iterator[dict[str, Any]]:
        """The events after the last chunk of a request that has not failed."""


def stream(admission: Admission, pending: Request, writer: EventWriter) -> Response:
    """Submits a streamed request, waits for its first chunk and returns the streamed response.

    Raises:
        TitopoolError: why the request failed before its first chunk.
    """
    at_end = admission.at_end
    at_end.callback(
        lambda: admission.link.cancel(pending, ClientGone("the client did not read the response"))
    )
    at_end.enter_context(submitted(admission, pending))
    _wait(admission, pending)
    pending.raise_if_failed()
    events = _events(admission, pending, writer, current_record())
    response = Response(watched(events, admission.reservation), mimetype=MIMETYPE)
    # Keep proxies, nginx among them, from buffering the stream.
    response.headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response.call_on_close(at_end.pop_all().close)
    return response


def _wait(admission: Admission, pending: Request) -> None:
    if not pending.wait_for_progress(admission.deadline.left_s):
        cancel_overdue(admission, pending)


def _events(
    admission: Admission, pending: Request, writer: EventWriter, record: HttpRecord | None
) -> Iterator[bytes]:
    logprobs = StreamedLogprobs()
    pace = record.pace() if record is not None else None
    try:
        while True:
            # Read before the chunks: a chunk that comes in between is taken in the next round.
            is_done = pending.is_done
            if chunks := pending.take_chunks():
                if pace is not None:
                    pace.note()
                if admission.keep_logprobs is not None:
                    logprobs.add(chunks)
                yield from _pieces(writer.write_chunks(chunks))
                if pending.is_behind:
                    give_way()
            elif is_done:
                break
            _wait(admission, pending)
        if pending.error is None:
            if admission.keep_logprobs is not None:
                admission.keep_logprobs(admission.kept_name, logprobs.arrays())
            yield from _pieces(writer.write_end())
        else:
            yield _failure(admission, pending.error, record)
    except TitopoolError as error:
        # The tokenizer failed to decode tokens for log-probabilities.
        yield _failure(admission, error, record)
    except Exception:
        logger.exception("the stream of request %s failed", admission.client_id)
        failure = TitopoolError("the front end failed during the stream")
        _note_code(record, failure)
        yield _encode(failure.to_dict(admission.client_id))
    finally:
        if pace is not None:
            pace.end()
    yield DONE


def _note_code(record: HttpRecord | None, error: TitopoolError) -> None:
    if record is not None:
        record.code = error.code


def _failure(admission: Admission, error: TitopoolError, record: HttpRecord | None) -> bytes:
    _note_code(record, error)
    body = error.to_dict(admission.client_id)
    log_failure(admission.client_id, error.status, body["error"], admission.key.name)
    return _encode(body)


def _pieces(events: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """The events as bytes. One with what orjson does not know is made as the client reads."""
    short = bytearray()
    for event in events:
        try:
            short += _encode(event)
        except TypeError as error:
            yield from in_pieces(short)
            short.clear()
            if not isinstance(error.__cause__, UnknownValue):
                # orjson has this type for all errors, also for one while rows were made.
                raise error.__cause__ or error from None
            yield b"data: "
            for part in json_parts(event):
                yield from in_pieces(part)
            # JSON's own final newline comes before.
            yield b"\n"
        if len(short) >= PIECE_BYTES:
            yield from in_pieces(short)
            short.clear()
    yield from in_pieces(short)


def _encode(event: dict[str, Any]) -> bytes:
    return (
        b"data: "
        + orjson.dumps(event, default=encode_rows, option=orjson.OPT_SERIALIZE_NUMPY)
        + b"\n\n"
    )
