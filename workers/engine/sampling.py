"""Sampling options as vLLM's SamplingParams, and vLLM's errors as ours."""

from typing import Any

import msgspec

from titopool.errors import GenerationFailed, InvalidRequest
from titopool.settings.sampling import SamplingOptions


def to_vllm_params(options: SamplingOptions, *, is_streamed: bool = False) -> Any:
    """vLLM's SamplingParams.

    Args:
        is_streamed: asks vLLM for an output at each step. CUMULATIVE hands out its own growing
            lists; DELTA would cut them, and vLLM 0.25 cuts an empty one wrong.

    Raises:
        InvalidRequest: vLLM refuses them.
    """
    from vllm import SamplingParams
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
    if options.structured_outputs is not None:
        values["structured_outputs"] = StructuredOutputsParams(
            **msgspec.to_builtins(options.structured_outputs)
        )
    if options.repetition_detection is not None:
        values["repetition_detection"] = RepetitionDetectionParams(
            **msgspec.to_builtins(options.repetition_detection)
        )
    if options.logprob_token_ids is not None:
        values["logprobs"] = len(options.logprob_token_ids)
    try:
        return SamplingParams(
            **values,
            flat_logprobs=True,
            output_kind=RequestOutputKind.CUMULATIVE
            if is_streamed
            else RequestOutputKind.FINAL_ONLY,
        )
    except client_errors() as error:
        raise InvalidRequest(f"sampling options: {error}") from error


def client_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for bad input."""
    import vllm.exceptions

    # vLLM 0.32's validation errors are no ValueError any more.
    newer = getattr(vllm.exceptions, "VLLMClientError", ValueError)
    return (ValueError, TypeError, newer)


def refusal_or_failure(error: BaseException) -> InvalidRequest | GenerationFailed:
    """One of ours for what vLLM raised."""
    if isinstance(error, client_errors()):
        return InvalidRequest(f"the engine refused the prompt: {error}")
    return GenerationFailed(f"the engine failed on this prompt: {type(error).__name__}: {error}")


def failed_inside(params: Any, *, num_tokens: int) -> InvalidRequest | GenerationFailed:
    """Why the engine core ended a request with "error"; it raises nothing and gives no reason."""
    if params.structured_outputs is not None and num_tokens == 0:
        # What passes vLLM's check of a grammar can still fail when it is compiled.
        return InvalidRequest(
            "the engine could not use structured_outputs; check the grammar in it"
        )
    return GenerationFailed("the engine ended this prompt with finish_reason 'error'")
