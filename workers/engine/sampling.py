"""Converts sampling options to vLLM's SamplingParams, and vLLM's errors to titopool's."""

import copy
from functools import cache
from typing import Any

import msgspec

from titopool.errors import GenerationFailed, InvalidRequest
from titopool.settings.sampling import SamplingOptions

# Lists of bad words whose token ids are kept.
MAX_BAD_WORDS_KEPT = 256


def to_vllm_params(options: SamplingOptions, *, is_streamed: bool = False) -> Any:
    """vLLM's SamplingParams of one completion, checked for all `n` of them.

    Args:
        is_streamed: asks vLLM for an output of each completion, as CUMULATIVE does: `OpenStreams`
            leaves out those before its end.

    Raises:
        InvalidRequest: vLLM refuses the options.
    """
    from vllm.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        StructuredOutputsParams,
    )

    defaults = SamplingOptions()
    values = {
        name: getattr(options, name)
        for name in SamplingOptions.__struct_fields__
        if getattr(options, name) != getattr(defaults, name)
    }
    values["detokenize"] = options.detokenize or bool(options.stop)
    if options.logprob_token_ids is not None:
        values["logprobs"] = len(options.logprob_token_ids)
    try:
        for name, kind in (
            ("structured_outputs", StructuredOutputsParams),
            ("repetition_detection", RepetitionDetectionParams),
        ):
            if name in values:
                values[name] = kind(**msgspec.to_builtins(values[name]))
        params = params_class()(
            **values,
            flat_logprobs=True,
            output_kind=RequestOutputKind.CUMULATIVE
            if is_streamed
            else RequestOutputKind.FINAL_ONLY,
        )
    except client_errors() as error:
        raise InvalidRequest(f"sampling options: {error}") from error
    params.n = 1
    return params


def params_of_other(params: Any, index: int) -> Any:
    """`params` of a job's first completion for another one, as vLLM derives them.

    The prompt is scored once.
    """
    params = params.clone()
    if params.seed is not None:
        params.seed += index
    if params.prompt_logprobs is not None:
        params.prompt_logprobs, params.skip_reading_prefix_cache = None, False
    return params


@cache
def params_class() -> Any:
    """vLLM's SamplingParams, of which vLLM reads long options once for all completions.

    For each completion anew, vLLM copies all options, tokenizes bad words and parses the grammar, on
    the worker's event loop: 32 bad words take 1.3 ms. Here a trial has passed
    (`workers/engine/grammars/`).
    """
    from vllm import SamplingParams

    # By the words.
    token_ids_of_words: dict[tuple[str, ...], list[list[int]]] = {}

    class TriedParams(SamplingParams):  # type: ignore[misc]
        def _validate_structured_outputs(self, *arguments: Any) -> None:
            assert self.structured_outputs is None or self.structured_outputs._backend

        def clone(self) -> Any:
            # Inside of options, vLLM only adds the model's own stop tokens, which all jobs have.
            return copy.copy(self)

        def update_from_tokenizer(self, tokenizer: Any) -> None:
            words = tuple(self.bad_words or ())
            if words not in token_ids_of_words:
                super().update_from_tokenizer(tokenizer)
                if len(token_ids_of_words) >= MAX_BAD_WORDS_KEPT:
                    token_ids_of_words.clear()
                token_ids_of_words[words] = self.bad_words_token_ids
            self._bad_words_token_ids = token_ids_of_words[words]

    return TriedParams


def check_replay_start(start: int | None, num_prompt_tokens: int) -> None:
    """Raises InvalidRequest for routed experts from a token on that the prompt does not have.

    The engine of vLLM 0.25 dies of it.
    """
    if start is not None and start >= num_prompt_tokens:
        raise InvalidRequest(
            "sampling_params.routed_experts_prompt_start: expected less than the prompt's "
            f"{num_prompt_tokens} tokens, got {start}",
            param="sampling_params",
        )


def client_errors() -> tuple[type[Exception], ...]:
    """The exceptions that vLLM raises for bad input."""
    import vllm.exceptions

    # vLLM 0.32's validation errors are not ValueErrors.
    newer = getattr(vllm.exceptions, "VLLMClientError", ValueError)
    return (ValueError, TypeError, newer)


def refusal_or_failure(error: BaseException) -> InvalidRequest | GenerationFailed:
    """titopool's error for vLLM's `error`: the client's fault, or the engine's."""
    if isinstance(error, client_errors()):
        return InvalidRequest(f"the engine refused the prompt: {error}")
    return GenerationFailed(f"the engine failed on this prompt: {type(error).__name__}: {error}")


def failed_inside(params: Any, *, num_tokens: int) -> InvalidRequest | GenerationFailed:
    """The error for vLLM's finish_reason "error", for which vLLM gives no cause."""
    if params.structured_outputs is not None and num_tokens == 0:
        # A grammar that passes vLLM's check can still fail to compile.
        return InvalidRequest(
            "the engine could not use structured_outputs; check the grammar in it"
        )
    if params.structured_outputs is not None:
        # vLLM samples some token where a grammar and other options leave none, and refuses it.
        restricting = ("allowed_token_ids", "bad_words")
        given = [name for name in restricting if getattr(params, name)]
        if given:
            return InvalidRequest(
                f"{', '.join(given)}: expected options that leave a token which the grammar of "
                f"structured_outputs allows, got none after {num_tokens} tokens; change one of them",
                param=given[0],
            )
    return GenerationFailed("the engine ended this prompt with finish_reason 'error'")
