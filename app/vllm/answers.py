"""Answers of vLLM's routes for token ids, whole and as events of streams, and how they are made."""

import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from app.call import openai_logprobs
from app.call.call import Call
from app.call.jobs import Prompt, expanded_ids
from app.inputs.features import Placeholders, placeholders_object
from app.outputs import replay
from app.outputs.answer_parts import PromptLogprobs, Usage, WeightSpan
from app.outputs.json_parts import json_parts
from app.outputs.token_arrays import given_up, weight_spans
from app.outputs.usage import usage
from app.vllm.bodies import GenerateFields
from titopool.answers.generation import FinishReason
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions
from titopool.wire.messages import Completed, Completion, WorkerFacts


class TopToken(msgspec.Struct, kw_only=True):
    """A token by its id; `token` is `token_id:<id>`."""

    token: str
    token_id: int
    logprob: float
    rank: int | None
    bytes: None


class Token(TopToken, kw_only=True):
    """A sampled token, with the best or the chosen ones."""

    top_logprobs: list[TopToken]


class TokensLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities by sampled token."""

    content: list[Token]


class RoutedExperts(msgspec.Struct, kw_only=True):
    """The experts of each token: base64 of an array in C order."""

    data: str
    # [rows, layers, experts of a token]
    shape: list[int]
    start: int
    dtype: str


class TokensChoice(msgspec.Struct, kw_only=True):
    """A completion, or what it has gained."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: TokensLogprobs | None
    weight_versions: list[WeightSpan]
    # With the format `npy`: base64 of an .npy file.
    routed_experts: RoutedExperts | str | None
    # [tokens][ids]
    sampling_mask: list[list[int]] | None
    lora_version: int | UnsetType | None = UNSET


class TokensEvent(msgspec.Struct, kw_only=True):
    """An event of a stream."""

    request_id: str
    output_mode: Literal["tokens"]
    choices: list[TokensChoice]
    usage: Usage | None
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    mm_placeholders: Placeholders | UnsetType | None = UNSET


class TokensAnswer(msgspec.Struct, kw_only=True):
    """The completions of one prompt."""

    request_id: str
    output_mode: Literal["tokens"]
    model: str
    # Seconds since 1970.
    created: int
    choices: list[TokensChoice]
    usage: Usage
    prompt_token_ids: list[int] | None
    mm_placeholders: Placeholders | None
    prompt_logprobs: PromptLogprobs | None


# ---- how they are made ----------------------------------------------------------------------


class TokensRequest(NamedTuple):
    """A checked request for the completions of one prompt."""

    call: Call
    fields: GenerateFields
    options: SamplingOptions
    prompt: Prompt
    # The name of a LoRA adapter; "": the base model.
    adapter: str

    def head(self) -> dict[str, Any]:
        """The first fields of a whole response and of each event of a stream."""
        return {"request_id": self.call.id, "output_mode": "tokens"}

    def prompt_fields(self, ids: np.ndarray, image_ranges: list[tuple[int, int]]) -> dict[str, Any]:
        """The expanded prompt and the places of its images, null unless the client requests them.

        Null too if the job was aborted before a worker placed the images.
        """
        num_images = len(self.prompt.images.images)
        if not self.fields.shows_prompt or len(image_ranges) != num_images:
            return {"prompt_token_ids": None, "mm_placeholders": None}
        return {
            "prompt_token_ids": ids.tolist(),
            "mm_placeholders": placeholders_object(image_ranges) if num_images else None,
        }

    def choice(
        self,
        index: int,
        completion: Completion,
        adapter_version: int | None,
        num_tokens: int,
    ) -> dict[str, Any]:
        """A choice of a response, or what a choice has gained.

        Args:
            adapter_version: the version of the LoRA adapter that the job ran with.
            num_tokens: of the choice so far.
        """
        choice = {
            "index": index,
            "token_ids": np.frombuffer(completion.token_ids, np.int32),
            "finish_reason": completion.finish_reason or None,
            "stop_reason": completion.stop_reason,
            "logprobs": self._logprobs(completion),
            "weight_versions": weight_spans(completion, num_tokens, self.call.link.label_of),
            "routed_experts": replay.experts_json(
                completion.routed_experts, self.fields.routed_experts_format
            ),
            "sampling_mask": replay.mask_lists(completion.sampling_mask),
        }
        if self.adapter:
            choice["lora_version"] = adapter_version
        return choice

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        options = self.options
        if options.logprob_token_ids is not None:
            return openai_logprobs.of_ids(completion, None)
        if options.logprobs is not None:
            return openai_logprobs.of_ids(completion, options.logprobs)
        return None


def check_format(fields: GenerateFields, facts: WorkerFacts) -> None:
    """Raises InvalidRequest for a form of routed experts if the server does not return them."""
    if fields.routed_experts_format and not facts.routed_expert_bytes:
        raise InvalidRequest(
            "routed_experts_format: this server does not return routed experts; start it with a "
            "mixture of experts and --enable-return-routed-experts, or leave the field out",
            param="routed_experts_format",
        )


def whole_answer(request: TokensRequest, results: list[Completed]) -> Iterator[bytes]:
    """The response body of a request that is not streamed, as JSON in parts: its one prompt's result.

    Empties the result's completions.
    """
    (result,) = results
    (ids,) = expanded_ids([request.prompt], [result])
    num_generated = sum(len(one.token_ids) // 4 for one in result.completions)
    choices = (
        request.choice(index, one, result.adapter_version, len(one.token_ids) // 4)
        for index, one in enumerate(given_up(result.completions))
    )
    k = request.options.prompt_logprobs
    answer = request.head() | {
        "model": request.adapter or request.call.facts.model,
        "created": int(time.time()),
        "choices": choices,
        "usage": usage(len(ids), num_generated, result.num_cached_tokens),
        **request.prompt_fields(ids, result.image_ranges),
        "prompt_logprobs": None
        if k is None
        else openai_logprobs.of_prompt(result, ids, request.prompt.location, k, None),
    }
    return json_parts(answer)
