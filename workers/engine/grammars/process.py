"""What tries a grammar: each is tried by a helper of its own, which ends by its limits.

Runs in: helpers of each worker process, whose fork server is forked after the engine is loaded: vLLM need
not be imported again, and the memory is shared. One mask of a hostile grammar can take minutes inside
xgrammar, which only the end of a process stops.
"""

import json
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from titopool.helpers.fork_server import Limits, Work

# Of one trial, beyond what the worker has.
MAX_MEMORY_BYTES = 2 * 2**30
# CPU time of one token and the next mask. A grammar of honest use takes at most 20 ms with 150,000
# tokens in the vocabulary.
MAX_STEP_S = 0.1
# Of walks through a grammar: their number, the tokens of each, and the CPU time of all. Masks may
# become slow after some tokens only.
NUM_WALKS, NUM_STEPS, WALKS_S = 4, 48, 0.5
NICENESS = 10


class Passed(msgspec.Struct, tag="passed"):
    """The grammar passed; `fields` are vLLM's StructuredOutputsParams as vLLM's checks left them."""

    fields: dict[str, Any]


class Refused(msgspec.Struct, tag="refused"):
    """The grammar is refused, with the reason."""

    reason: str


Outcome = Passed | Refused
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


def limits_of(limit_s: float) -> Limits:
    """Of a trial; `limit_s`: its CPU time."""
    return Limits(limit_s, MAX_MEMORY_BYTES, NICENESS)


def work_of(vllm_config: Any) -> Work:
    """What a helper does, for the one trial that it is started for.

    A trial gets the fields of vLLM's StructuredOutputsParams, encoded, and answers with its outcome.
    """
    manager = _manager(vllm_config)

    def work(request: bytes) -> bytes:
        outcome = _outcome(msgspec.msgpack.decode(request), manager, vllm_config)
        return msgspec.msgpack.encode(outcome)

    return work


def _manager(vllm_config: Any) -> Any:
    """vLLM's StructuredOutputManager with a backend, which reads the tokenizer's vocabulary once."""
    from vllm.v1.structured_output import StructuredOutputManager

    manager = StructuredOutputManager(vllm_config)
    # Threads do not survive a fork.
    manager._use_async_grammar_compilation = False
    with suppress(Exception):
        # If the model takes no grammars, each trial tells why.
        _compiled(manager, _checked({"json_object": True}, manager, vllm_config))
    return manager


def _outcome(fields: dict[str, Any], manager: Any, vllm_config: Any) -> Outcome:
    try:
        params = _checked(fields, manager, vllm_config)
        grammar = _compiled(manager, params)
    except Exception as error:
        return Refused(f"vLLM refused the grammar: {error}"[:500])
    step_s = slowest_step(grammar, manager.backend.allocate_token_bitmask(1))
    if step_s > MAX_STEP_S:
        return Refused(
            f"expected a grammar that takes at most {MAX_STEP_S:g} s for each token, got {step_s:.2g} s "
            "within a few tokens; repeat less inside repetitions"
        )
    fields = vars(params.structured_outputs)
    if isinstance(fields["json"], dict):
        # As the engine reads it. vLLM copies a tree anew for each request.
        fields["json"] = json.dumps(fields["json"])
    return Passed(fields)


def _checked(fields: dict[str, Any], manager: Any, vllm_config: Any) -> Any:
    """vLLM's SamplingParams with a grammar that has passed vLLM's own checks."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    params._validate_structured_outputs(
        vllm_config.model_config,
        vllm_config.structured_outputs_config,
        getattr(manager, "tokenizer", None),
    )
    return params


def _compiled(manager: Any, params: Any) -> Any:
    """The grammar as the engine compiles it."""
    from vllm.v1.structured_output.request import StructuredOutputRequest

    request = SimpleNamespace(
        request_id="trial",
        sampling_params=params,
        structured_output_request=StructuredOutputRequest.from_sampling_params(params),
    )
    manager.grammar_init(request)
    grammar = request.structured_output_request.grammar
    if isinstance(grammar, Exception):
        raise grammar
    return grammar


def slowest_step(grammar: Any, bitmask: Any) -> float:
    """CPU seconds of the slowest step, a token and the next mask, on walks through a grammar.

    Args:
        grammar: vLLM's StructuredOutputGrammar.
        bitmask: int32 [1, vocabulary / 32], written by the call.
    """
    slowest, end_s = 0.0, time.process_time() + WALKS_S
    for walk in range(NUM_WALKS):
        grammar.reset()
        # The first mask fills caches.
        grammar.fill_bitmask(bitmask, 0)
        for step in range(NUM_STEPS):
            token_id = _allowed_token(bitmask[0].numpy(), walk, step)
            began_s = time.process_time()
            if token_id is None or not grammar.accept_tokens("trial", [token_id]):
                break
            is_over = grammar.is_terminated()
            if not is_over:
                grammar.fill_bitmask(bitmask, 0)
            now_s = time.process_time()
            slowest = max(slowest, now_s - began_s)
            if slowest > MAX_STEP_S or now_s > end_s:
                return slowest
            if is_over:
                break
    return slowest


def _allowed_token(mask: np.ndarray, walk: int, step: int) -> int | None:
    """An id whose bit is set in `mask`, int32 [vocabulary / 32]; None if there is none."""
    words = np.flatnonzero(mask)
    if not len(words):
        return None
    # The first walk takes similar tokens; the others hop, the same way each time.
    place = len(words) // 2 if walk == 0 else (walk * 104_729 + step * 7_919) % len(words)
    word = int(mask[words[place]]) & 0xFFFF_FFFF
    lowest = (word & -word).bit_length() - 1
    return int(words[place]) * 32 + lowest
