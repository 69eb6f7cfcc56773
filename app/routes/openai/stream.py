"""Streams of OpenAI's routes: server-sent events, one for each chunk of a choice.

The events follow vLLM's server: a chat begins with the role of each choice, the last event has
the usage if the client requests it, and `[DONE]` ends the stream. The first chunk decides the HTTP
status, so a later error is an event with the `error` object of other responses.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from flask import Response

from app.generation import cancel_overdue, make_request, submitted
from app.http.responses import in_pieces
from app.outputs.token_texts import MAX_BEFORE
from app.pool.request import ChunkOfJob, Request
from app.routes.openai.answer import OpenAIRequest, usage
from app.schemas.openai import StreamOptions
from titopool.errors import ClientGone, TitopoolError
from titopool.wire.messages import Completion

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
MIMETYPE = "text/event-stream"


def stream(request: OpenAIRequest) -> Response:
    """Starts the generation, waits for the first chunk and returns the streamed response.

    Raises:
        TitopoolError: why the request failed before its first chunk.
    """
    admission = request.admission
    pending = make_request(
        admission,
        request.prompts,
        request.options,
        is_streamed=True,
        adapter=request.adapter,
        chat=request.chat,
        min_weight_version=request.fields.min_weight_version,
    )
    at_end = admission.at_end
    at_end.callback(
        lambda: admission.link.cancel(pending, ClientGone("the client did not read the response"))
    )
    at_end.enter_context(submitted(admission, pending))
    _wait(request, pending)
    pending.raise_if_failed()
    response = Response(_events(request, pending), mimetype=MIMETYPE)
    # Keep proxies, nginx among them, from buffering the stream.
    response.headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response.call_on_close(at_end.pop_all().close)
    return response


def _wait(request: OpenAIRequest, pending: Request) -> None:
    if not pending.wait_for_progress(request.admission.deadline.left_s):
        cancel_overdue(request.admission, pending)


def _events(request: OpenAIRequest, pending: Request) -> Iterator[bytes]:
    writer = EventWriter(request)
    try:
        while True:
            # Read before the chunks: a chunk that comes in between is taken in the next round.
            is_done = pending.is_done
            if chunks := pending.take_chunks():
                yield from in_pieces(b"".join(map(_encode, writer.write_chunks(chunks))))
            elif is_done:
                break
            _wait(request, pending)
        if pending.error is None:
            yield b"".join(map(_encode, writer.write_end()))
        else:
            yield _encode(pending.error.to_dict())
    except TitopoolError as error:
        # The tokenizer failed to decode tokens for log-probabilities.
        yield _encode(error.to_dict())
    except Exception:
        logger.exception("a stream failed")
        yield _encode(TitopoolError("the front end failed during the stream").to_dict())
    yield DONE


def _encode(event: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


@dataclass
class Progress:
    """What has been written of one choice."""

    num_tokens: int = 0
    num_characters: int = 0
    # At most MAX_BEFORE.
    last_ids: list[int] = field(default_factory=list)


class EventWriter:
    """Turns the chunks of one request into OpenAI's event objects."""

    def __init__(self, request: OpenAIRequest):
        self._request = request
        self._head = request.head(is_stream=True)
        self._n = request.options.n
        options = request.fields.stream_options or StreamOptions()
        self._has_usage = options.include_usage
        self._has_running_usage = options.include_usage and options.continuous_usage_stats
        # By job.
        self._prompt_ids = [prompt.token_ids for prompt in request.prompts]
        self._num_cached = [0] * len(request.prompts)
        self._adapter_versions: list[int | None] = [None] * len(request.prompts)
        self._begun: set[int] = set()
        # By the choice's index.
        self._progress: defaultdict[int, Progress] = defaultdict(Progress)

    def write_chunks(self, chunks: Iterable[ChunkOfJob]) -> Iterator[dict[str, Any]]:
        """One event for each piece of a choice, unless the piece is empty."""
        for job, chunk in chunks:
            if job not in self._begun:
                self._begun.add(job)
                if chunk.prompt_token_ids:
                    self._prompt_ids[job] = np.frombuffer(chunk.prompt_token_ids, np.int32)
                self._num_cached[job] = chunk.num_cached_tokens
                self._adapter_versions[job] = chunk.adapter_version
                if self._request.is_chat:
                    yield from self._roles()
            for index, piece in chunk.pieces:
                choice = self._choice(job, job * self._n + index, piece)
                if choice is not None:
                    yield self._event(choice)

    def write_end(self) -> Iterator[dict[str, Any]]:
        """The event with the usage, if the client requests it."""
        if self._has_usage:
            num_prompt = sum(map(len, self._prompt_ids))
            num_generated = sum(one.num_tokens for one in self._progress.values())
            total = usage(num_prompt, num_generated, sum(self._num_cached))
            yield self._head | {"choices": [], "usage": total}

    def _roles(self) -> Iterator[dict[str, Any]]:
        for index in range(self._n):
            delta = {"role": self._request.role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            event = self._event(choice)
            if self._request.shows_prompt_ids:
                event["prompt_token_ids"] = self._prompt_ids[0].tolist()
            yield event

    def _choice(self, job: int, index: int, piece: Completion) -> dict[str, Any] | None:
        request = self._request
        is_first, progress = index not in self._progress, self._progress[index]
        choice = request.choice(
            index,
            piece,
            self._adapter_versions[job],
            before=progress.last_ids,
            offset=progress.num_characters,
        )
        ids = np.frombuffer(piece.token_ids, np.int32).tolist()
        progress.num_tokens += len(ids)
        progress.last_ids = [*progress.last_ids, *ids][-MAX_BEFORE:]
        if request.is_chat:
            choice["delta"] = {"content": piece.text} if piece.message is None else piece.message
            has_content = choice["delta"] or piece.finish_reason or choice["logprobs"]
            return choice if has_content or request.fields.return_token_ids else None
        if choice["logprobs"]:
            # The tokens' texts count, not `piece.text`: a stop string may hold some of it back.
            progress.num_characters += sum(map(len, choice["logprobs"]["tokens"]))
        if is_first and request.shows_prompt_ids:
            choice["prompt_token_ids"] = self._prompt_ids[job].tolist()
        return choice | {"text": piece.text}

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = self._head | {"choices": [choice]}
        if self._has_running_usage:
            index = choice["index"]
            job, num_generated = index // self._n, self._progress[index].num_tokens
            event["usage"] = usage(len(self._prompt_ids[job]), num_generated, self._num_cached[job])
        return event
