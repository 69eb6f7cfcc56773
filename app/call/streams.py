"""Responses of generating routes: whole, or streams of server-sent events, some for each chunk.

As in vLLM's server, `[DONE]` ends the stream, unless events have names. The first chunk decides the HTTP
status, so a later error is an event.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import orjson
from flask import Response

from app.call.call import Call
from app.call.kept_logprobs import StreamedLogprobs
from app.counts.http_requests import HttpRecord, current_record
from app.http.request_bodies import current_reservation
from app.http.request_ids import log_failure
from app.http.responses import PIECE_BYTES, in_pieces, respond_in_parts, watched
from app.outputs.json_parts import UnknownValue, encode_rows, json_parts
from app.outputs.token_arrays import JSON
from app.pool.request import ChunkOfJob, Request
from app.time_slices import give_way
from titopool.errors import ClientGone, TitopoolError
from titopool.wire.messages import Completed

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
MIMETYPE = "text/event-stream"


class EventWriter(ABC):
    """Turns the chunks of one request into a route's event objects."""

    # Whether the `type` of each object is the name of its event, and the last one ends the stream.
    has_names = False

    @abstractmethod
    def write_chunks(self, chunks: Iterable[ChunkOfJob]) -> Iterator[dict[str, Any]]:
        """The events of the chunks since the last call."""

    def write_end(self) -> Iterator[dict[str, Any]]:
        """The events after the last chunk of a request that has not failed; none by default."""
        yield from ()

    def write_failure(self, error: TitopoolError, request_id: str) -> Iterator[dict[str, Any]]:
        """The events of an error after the first chunk: the `error` object of other responses."""
        yield error.to_dict(request_id)


def respond(
    call: Call,
    request: Request,
    *,
    whole: Callable[[list[Completed]], Iterable[bytes | bytearray]],
    events: EventWriter | None,
) -> Response:
    """Runs `request` and returns the response to the call: the parts of a whole answer, made of the
    results, or with `events` a stream.

    Raises:
        TitopoolError: why the request failed; of a stream, before its first chunk.
    """
    if events is None:
        return respond_in_parts(whole(call.run(request)), JSON)
    return _stream(call, request, events)


def _stream(call: Call, request: Request, writer: EventWriter) -> Response:
    """Submits a streamed request, waits for its first chunk and returns the streamed response."""
    with ExitStack() as at_end:
        # Last, after the request's own end.
        at_end.callback(call.hand_over())
        at_end.callback(
            lambda: call.link.cancel(request, ClientGone("the client did not read the response"))
        )
        at_end.enter_context(call.submitted(request))
        call.wait_for_progress(request)
        request.raise_if_failed()
        response = Response(
            watched(_events(call, request, writer, current_record()), current_reservation()),
            mimetype=MIMETYPE,
        )
        # Keep proxies, nginx among them, from buffering the stream.
        response.headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        response.call_on_close(at_end.pop_all().close)
    return response


def _events(
    call: Call, request: Request, writer: EventWriter, record: HttpRecord | None
) -> Iterator[bytes]:
    logprobs = StreamedLogprobs()
    pace = record.pace() if record is not None else None
    try:
        while True:
            # Read before the chunks: a chunk that comes in between is taken in the next round.
            is_done = request.is_done
            if chunks := request.take_chunks():
                if pace is not None:
                    pace.note()
                if call.kept.is_on:
                    logprobs.add(chunks)
                if call.turn is not None:
                    for _, chunk in chunks:
                        call.hold(call.turn.take(chunk))
                    if call.turn.has_ended:
                        # The client may go on as soon as it knows.
                        call.keep_turn()
                yield from _pieces(writer.write_chunks(chunks), has_names=writer.has_names)
                if request.is_behind:
                    give_way()
            elif is_done:
                break
            call.wait_for_progress(request)
        if request.error is None:
            if call.kept.is_on:
                call.keep_logprobs(logprobs.arrays())
            call.keep_turn()
            yield from _pieces(writer.write_end(), has_names=writer.has_names)
        else:
            yield _failure(call, request.error, writer, record)
    except TitopoolError as error:
        # The tokenizer failed to decode tokens for log-probabilities.
        yield _failure(call, error, writer, record)
    except Exception:
        logger.exception("the stream of request %s failed", call.id)
        failure = TitopoolError("the front end failed during the stream")
        yield _failure(call, failure, writer, record)
    finally:
        if pace is not None:
            pace.end()
    if not writer.has_names:
        yield DONE


def _failure(
    call: Call, error: TitopoolError, writer: EventWriter, record: HttpRecord | None
) -> bytes:
    if record is not None:
        record.code = error.code
    log_failure(call.id, error.status, error.to_dict()["error"], call.key.name)
    events = writer.write_failure(error, call.id)
    return b"".join(_pieces(events, has_names=writer.has_names))


def _pieces(events: Iterable[dict[str, Any]], *, has_names: bool) -> Iterator[bytes]:
    """The events as bytes. One with what orjson does not know is made as the client reads."""
    short = bytearray()
    try:
        for event in events:
            if has_names:
                short += b"event: %b\n" % event["type"].encode()
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
    except TitopoolError:
        # The event of the error follows those that were made before it.
        if short:
            yield from in_pieces(short)
        raise
    yield from in_pieces(short)


def _encode(event: dict[str, Any]) -> bytes:
    return (
        b"data: "
        + orjson.dumps(event, default=encode_rows, option=orjson.OPT_SERIALIZE_NUMPY)
        + b"\n\n"
    )
