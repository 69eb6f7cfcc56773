"""Answers of OpenAI's routes: what the whole ones and the streams write alike."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import gevent
import numpy as np

from app.generation import Prompt, expanded_ids
from app.outputs import openai_logprobs
from app.outputs.token_texts import TokenTexts
from app.schemas.openai import ChatFields, CompletionsFields
from app.service import Admitted
from titopool.settings.sampling import SamplingOptions
from titopool.wire.messages import Completed, Completion


class Asked(NamedTuple):
    """A request to one of the routes, read and checked."""

    admission: Admitted
    fields: CompletionsFields | ChatFields
    options: SamplingOptions
    prompts: Sequence[Prompt]
    # None: no log-probabilities were asked for.
    texts: TokenTexts | None
    # Whether the answer shows the ids of its prompt.
    shows_prompt_ids: bool = False
    # Name of the LoRA adapter, if one is asked for.
    adapter: str = ""

    @property
    def is_chat(self) -> bool:
        return isinstance(self.fields, ChatFields)

    @property
    def role(self) -> str:
        """Of the message that a chat generates, or goes on with."""
        assert isinstance(self.fields, ChatFields)
        if self.fields.add_generation_prompt:
            return "assistant"
        last = self.fields.messages[-1] if self.fields.messages else {}
        return str(last.get("role", "assistant"))

    def head(self, *, is_stream: bool) -> dict[str, Any]:
        """What an answer, or each chunk of one, begins with."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if is_stream and self.is_chat else kind,
            "created": int(time.time()),
            "model": self.adapter or self.admission.facts.model,
        }

    def choice(
        self,
        index: int,
        one: Completion,
        adapter_version: int | None,
        *,
        before: Sequence[int] = (),
        offset: int = 0,
    ) -> dict[str, Any]:
        """All of a choice but its text.

        Args:
            adapter_version: of the LoRA adapter that it ran with.
            before, offset: of a piece, the last ids before it and where its tokens' text begins.
        """
        logprobs = None
        if self.texts is not None and self.options.logprobs is not None:
            k = self.options.logprobs
            if self.is_chat:
                logprobs = openai_logprobs.of_chat(one, self.texts, k, before)
            else:
                logprobs = openai_logprobs.of_completion(one, self.texts, k, before, offset)
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": logprobs,
            "finish_reason": one.finish_reason or None,
            "stop_reason": one.stop_reason,
        }
        if self.fields.return_token_ids:
            choice["token_ids"] = np.frombuffer(one.token_ids, np.int32).tolist()
            choice["weight_versions"] = one.weight_versions
            if self.adapter:
                choice["lora_version"] = adapter_version
        return choice


def usage(num_prompt: int, num_made: int, num_cached: int) -> dict[str, Any]:
    """OpenAI's `usage`; all in tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_made,
        "total_tokens": num_prompt + num_made,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def whole_answer(asked: Asked, results: Sequence[Completed]) -> dict[str, Any]:
    """The answer of a request that is not streamed."""
    all_ids = expanded_ids(asked.prompts, results)
    answer = asked.head(is_stream=False) | {"choices": []}
    for prompt, ids, result in zip(asked.prompts, all_ids, results, strict=True):
        of_prompt = _of_prompt(asked, prompt.location, ids, result)
        for one in result.completions:
            choice = asked.choice(len(answer["choices"]), one, result.adapter_version)
            if asked.is_chat:
                message = {"content": one.text} if one.message is None else one.message
                choice["message"] = {"role": asked.role, **message}
            else:
                choice |= {"text": one.text, **of_prompt}
            answer["choices"].append(choice)
            # Others take their turn between long lists of log-probabilities.
            gevent.sleep(0)
        if asked.is_chat:
            answer |= of_prompt
    answer["usage"] = usage(
        sum(map(len, all_ids)),
        sum(len(one.token_ids) // 4 for result in results for one in result.completions),
        sum(result.num_cached_tokens for result in results),
    )
    return answer


def _of_prompt(asked: Asked, location: str, ids: np.ndarray, result: Completed) -> dict[str, Any]:
    """What an answer says of a prompt: a chat at the top, completions in each choice."""
    said: dict[str, Any] = {}
    if asked.shows_prompt_ids:
        said["prompt_token_ids"] = ids.tolist()
    k = asked.options.prompt_logprobs
    if k is not None and asked.texts is not None:
        said["prompt_logprobs"] = openai_logprobs.of_prompt(result, ids, location, k, asked.texts)
    return said
