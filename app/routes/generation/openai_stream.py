"""Streams of OpenAI's routes: server-sent events, one chunk for each piece as it comes.

The chunks are those of vLLM's server: a chat begins with the role of each choice, a last one
has the usage where it was asked for, then `[DONE]`. An error during a stream is an event with
the `error` of other answers: the status has been sent by then.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import orjson
from flask import Response

from app.generation import checked_jobs, deadline_passed, submitted
from app.http.responses import in_pieces
from app.outputs.token_texts import MAX_BEFORE
from app.pool.pending import ChunkOfJob, StreamedRequest
from app.routes.generation.openai_answers import Asked, usage
from app.schemas.openai import StreamOptions
from titopool.errors import ClientGone, TitopoolError
from titopool.wire.messages import ChatParsing, Completion

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
MIMETYPE = "text/event-stream"


def stream(asked: Asked, chat: ChatParsing | None, held: ExitStack) -> Response:
    """Generates and answers at once; what fails before the first piece is raised.

    Args:
        held: what the request holds while it is open; it is given back when the answer ends.

    Raises:
        TitopoolError: why the request failed.
    """
    service = asked.admission.service
    jobs = checked_jobs(
        asked.admission,
        asked.prompts,
        asked.options,
        chat=chat,
        is_streamed=True,
        adapter=asked.adapter,
    )
    places = [prompt.place for prompt in asked.prompts]
    request = StreamedRequest(jobs, places, facts=asked.admission.facts)
    held.callback(lambda: service.link.cancel(request, ClientGone("the answer was not read")))
    held.enter_context(submitted(service, request))
    _wait(asked, request)
    if request.error is not None:
        raise request.error
    response = Response(_events(asked, request), mimetype=MIMETYPE)
    # Proxies hold back what they may cache, and nginx everything.
    response.headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    response.call_on_close(held.pop_all().close)
    return response


def _wait(asked: Asked, request: StreamedRequest) -> None:
    service = asked.admission.service
    if not request.wait_for_news(asked.admission.left_s):
        service.link.cancel(request, deadline_passed(service))


def _events(asked: Asked, request: StreamedRequest) -> Iterator[bytes]:
    chunks = Chunks(asked)
    try:
        while True:
            is_done = request.is_done
            parts = request.take_chunks()
            if parts:
                yield from in_pieces(b"".join(map(_event, chunks.of_chunks(parts))))
            elif is_done:
                break
            _wait(asked, request)
        if request.error is None:
            yield b"".join(_event(chunk) for chunk in chunks.at_end())
        else:
            yield _event(request.error.to_dict())
    except TitopoolError as error:
        # Of the tokenizer, for log-probabilities.
        yield _event(error.to_dict())
    except Exception:
        logger.exception("a stream failed")
        yield _event(TitopoolError("the front end failed during the stream").to_dict())
    yield DONE


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


class Chunks:
    """The chunks of one stream; each goes on where the one before ended."""

    def __init__(self, asked: Asked):
        self._asked = asked
        self._head = asked.head(is_stream=True)
        self._n = asked.options.n
        options = asked.fields.stream_options or StreamOptions()
        self._has_usage = options.include_usage
        self._has_usage_always = options.include_usage and options.continuous_usage_stats
        self._prompt_ids = [prompt.token_ids for prompt in asked.prompts]
        self._num_cached = [0] * len(asked.prompts)
        self._adapter_versions: list[int | None] = [None] * len(asked.prompts)
        self._begun: set[int] = set()
        # Of each choice so far: its tokens, the characters of their texts, the last ids.
        self._num_tokens: dict[int, int] = {}
        self._num_characters: dict[int, int] = {}
        self._last_ids: dict[int, list[int]] = {}

    def of_chunks(self, parts: Iterable[ChunkOfJob]) -> Iterator[dict[str, Any]]:
        """A chunk for each piece that says something."""
        for job, part in parts:
            if job not in self._begun:
                self._begun.add(job)
                if part.prompt_token_ids:
                    self._prompt_ids[job] = np.frombuffer(part.prompt_token_ids, np.int32)
                self._num_cached[job] = part.num_cached_tokens
                self._adapter_versions[job] = part.adapter_version
                if self._asked.is_chat:
                    yield from self._roles()
            for index, piece in part.pieces:
                choice = self._choice(job, job * self._n + index, piece)
                if choice is not None:
                    yield self._chunk(choice)

    def at_end(self) -> Iterator[dict[str, Any]]:
        """The chunk with the usage, if it was asked for."""
        if self._has_usage:
            num_prompt, num_made = sum(map(len, self._prompt_ids)), sum(self._num_tokens.values())
            total = usage(num_prompt, num_made, sum(self._num_cached))
            yield self._head | {"choices": [], "usage": total}

    def _roles(self) -> Iterator[dict[str, Any]]:
        for index in range(self._n):
            delta = {"role": self._asked.role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = self._chunk(choice)
            if self._asked.shows_prompt_ids:
                chunk["prompt_token_ids"] = self._prompt_ids[0].tolist()
            yield chunk

    def _choice(self, job: int, index: int, piece: Completion) -> dict[str, Any] | None:
        asked = self._asked
        is_first = index not in self._num_tokens
        before, offset = self._last_ids.get(index, []), self._num_characters.get(index, 0)
        version = self._adapter_versions[job]
        choice = asked.choice(index, piece, version, before=before, offset=offset)
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(piece.token_ids) // 4
        ids = [*before, *np.frombuffer(piece.token_ids, np.int32).tolist()]
        self._last_ids[index] = ids[-MAX_BEFORE:]
        if not asked.is_chat and choice["logprobs"]:
            # Not by the text that is sent: some of it may wait behind a stop string.
            length = sum(map(len, choice["logprobs"]["tokens"]))
            self._num_characters[index] = offset + length
        if not asked.is_chat:
            if is_first and asked.shows_prompt_ids:
                choice["prompt_token_ids"] = self._prompt_ids[job].tolist()
            return choice | {"text": piece.text}
        choice["delta"] = {"content": piece.text} if piece.message is None else piece.message
        says_something = choice["delta"] or piece.finish_reason or choice["logprobs"]
        return choice if says_something or asked.fields.return_token_ids else None

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head | {"choices": [choice]}
        if self._has_usage_always:
            job, num_made = choice["index"] // self._n, self._num_tokens.get(choice["index"], 0)
            chunk["usage"] = usage(len(self._prompt_ids[job]), num_made, self._num_cached[job])
        return chunk
