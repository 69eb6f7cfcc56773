"""Events of streams of OpenAI's routes.

They follow vLLM's server: a chat begins with the role of each choice, and the last event has the
usage if the client requests it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.call.streams import EventWriter
from app.call.token_texts import MAX_BEFORE
from app.openai.answers import OpenAIRequest
from app.outputs.json_parts import as_lists
from app.outputs.run_facts import RunFacts
from app.outputs.usage import usage
from app.pool.request import ChunkOfJob
from app.route.fields import StreamOptions
from titopool.wire.messages import Completion


@dataclass
class Progress:
    """What has been written of one choice."""

    num_tokens: int = 0
    num_characters: int = 0
    # At most MAX_BEFORE.
    last_ids: list[int] = field(default_factory=list)


class OpenAIEvents(EventWriter):
    """Turns the chunks of one request into OpenAI's event objects."""

    def __init__(self, request: OpenAIRequest):
        self._request = request
        self._head = request.head(is_stream=True)
        self._n = request.options.n
        options = request.fields.stream_options or StreamOptions()
        self._has_usage = options.include_usage
        self._has_running_usage = options.include_usage and options.continuous_usage_stats
        # By job.
        self._facts = [RunFacts(prompt.token_ids) for prompt in request.prompts]
        # By the choice's index.
        self._progress: defaultdict[int, Progress] = defaultdict(Progress)

    def write_chunks(self, chunks: Iterable[ChunkOfJob]) -> Iterator[dict[str, Any]]:
        """One event for each piece of a choice, unless the piece is empty."""
        for job, chunk in chunks:
            if self._facts[job].begin(chunk) and self._request.is_chat:
                yield from self._roles()
            for index, piece in chunk.pieces:
                choice = self._choice(job, job * self._n + index, piece)
                if choice is not None:
                    yield self._event(choice)

    def write_end(self) -> Iterator[dict[str, Any]]:
        """The event with the usage, if the client requests it."""
        if self._has_usage:
            num_prompt = sum(len(one.prompt_ids) for one in self._facts)
            num_generated = sum(one.num_tokens for one in self._progress.values())
            total = usage(num_prompt, num_generated, sum(one.num_cached for one in self._facts))
            yield self._head | {"choices": [], "usage": total}

    def _roles(self) -> Iterator[dict[str, Any]]:
        for index in range(self._n):
            delta = {"role": self._request.role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            event = self._event(choice)
            if self._request.shows_prompt_ids:
                event["prompt_token_ids"] = self._facts[0].prompt_ids.tolist()
            yield event

    def _choice(self, job: int, index: int, piece: Completion) -> dict[str, Any] | None:
        request = self._request
        is_first, progress = index not in self._progress, self._progress[index]
        choice = request.choice(
            index,
            piece,
            self._facts[job].adapter_version,
            before=progress.last_ids,
            offset=progress.num_characters,
            num_before=progress.num_tokens,
        )
        ids = np.frombuffer(piece.token_ids, np.int32).tolist()
        progress.num_tokens += len(ids)
        progress.last_ids = [*progress.last_ids, *ids][-MAX_BEFORE:]
        if request.is_chat:
            choice["delta"] = {"content": piece.text} if piece.message is None else piece.message
            has_content = choice["delta"] or piece.finish_reason or choice["logprobs"]
            return choice if has_content or request.fields.return_token_ids else None
        if choice["logprobs"]:
            choice["logprobs"] = as_lists(choice["logprobs"])
            # The tokens' texts count, not `piece.text`: a stop string may hold some of it back.
            progress.num_characters += sum(map(len, choice["logprobs"]["tokens"]))
        if is_first and request.shows_prompt_ids:
            choice["prompt_token_ids"] = self._facts[job].prompt_ids.tolist()
        return choice | {"text": piece.text}

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = self._head | {"choices": [choice]}
        if self._has_running_usage:
            index = choice["index"]
            job, num_generated = index // self._n, self._progress[index].num_tokens
            facts = self._facts[job]
            event["usage"] = usage(len(facts.prompt_ids), num_generated, facts.num_cached)
        return event
