"""Sampling options: the fields of vLLM's SamplingParams, under vLLM's names, with their ranges.

The front end checks the options, because some values out of range end an engine. The worker turns
them into vLLM's SamplingParams by name (`workers/engine/sampling.py`). To add an option, add a field
with its type and range.
"""

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from titopool.errors import InvalidRequest
from titopool.settings.grammars import (
    MAX_JSON_DEPTH,
    NonEmptyStr,
    StructuredOutputs,
    check_grammar,
    encoded_size,
    is_deeper_than,
)
from titopool.wire.messages import Job, WorkerFacts, decode_chat_parsing

# Below this temperature vLLM samples greedily (vllm/sampling_params.py, _SAMPLING_EPS).
GREEDY_BELOW = 1e-5

Penalty = Annotated[float, Meta(ge=-2, le=2)]
# The engine computes in float32: a logit that these make infinite makes NaN of all probabilities.
RepetitionPenalty = Annotated[float, Meta(ge=1e-6, le=1e6)]
Bias = Annotated[float, Meta(ge=-1e30, le=1e30)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
# Entries that an option may have. vLLM reads the options of all completions at each of their tokens,
# so one request's options hold up all others: 128 stop strings take 15 µs a token of the worker's
# event loop, 32 bad words 170 µs and 512 biases 100 µs of the engine's step (`benchmarks/options.py`). vLLM's
# GPU sampler keeps ids in tables of fixed width (vllm/v1/worker/gpu/sample/), and a request with
# more entries ends its engine: 1,024 allowed ids, 128 bad words (each with and without a leading
# space), and 128 stop tokens with the model's own.
MAX_ENTRIES = {
    "stop": 128,
    "stop_token_ids": 96,
    "bad_words": 32,
    "logit_bias": 512,
    "allowed_token_ids": 1024,
}
# Of the text of these options. A long stop string takes 0.7 µs a token for each KiB.
MAX_TEXT_BYTES = {"stop": 8 * 1024, "bad_words": 512}
# vLLM compares the last tokens with each other for each size of a pattern: 0.5 µs a size.
MAX_PATTERN_SIZE = 256
# Of the longest pattern in all its repetitions.
MAX_PATTERN_TOKENS = 2048
# Of the options without the grammar, as they are encoded.
MAX_OPTIONS_BYTES = 64 * 1024


def _at_most(name: str) -> Meta:
    """Shows the bound of an option in the API's description; `check_sampling` says what came."""
    kind = "maxProperties" if name == "logit_bias" else "maxItems"
    return Meta(extra_json_schema={kind: MAX_ENTRIES[name]})


LogprobTokenIds = Annotated[list[int], Meta(max_length=128)]

# Fields of SamplingParams that a client may not set, with the reason for the error message.
SERVER_SET_FIELDS = {
    "detokenize": "the server sets it: completions are detokenized only where text is needed",
    "flat_logprobs": "the server sets it: the format of log-probabilities is fixed",
    "output_text_buffer_length": "the server sets it: it depends on the stop strings",
    "output_kind": "the server sets it: it depends on the route and on `stream`",
    "skip_clone": "the server sets it",
    "stream_interval": "the server sets it: it depends on the route and on `stream`",
}
UNSUPPORTED_FIELDS = {
    "prompt_logprobs": "this route does not return them; use /get_sequence_logprobs/",
    "prompt_logprob_start": "this route does not return prompt log-probabilities",
    "prompt_logprob_token_ids": "this route does not return prompt log-probabilities",
    "routed_experts_prompt_start": "this route does not return them; use /inference/v1/generate",
    "trace_decode_token_ids": "it would replace sampling",
}


class RepetitionDetection(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """vLLM's RepetitionDetectionParams."""

    max_pattern_size: Count = 0
    min_pattern_size: Count = 0
    min_count: Count = 0


class SamplingOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Options of one job, with vLLM's defaults. Lengths and counts are in tokens."""

    n: PositiveCount = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # 0 and -1: the whole vocabulary.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: NonEmptyStr | Annotated[list[NonEmptyStr], _at_most("stop")] | None = None
    stop_token_ids: Annotated[list[int], _at_most("stop_token_ids")] | None = None
    ignore_eos: bool = False
    max_tokens: PositiveCount | None = 16
    min_tokens: Count = 0
    # None: no log-probabilities; 0: the sampled token's; k: also the k best; -1: all.
    logprobs: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    logprob_token_ids: LogprobTokenIds | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    logit_bias: Annotated[dict[int, Bias], _at_most("logit_bias")] | None = None
    allowed_token_ids: Annotated[list[int], _at_most("allowed_token_ids")] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: Annotated[list[NonEmptyStr], _at_most("bad_words")] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    repetition_detection: RepetitionDetection | None = None
    watermarking: bool | None = None
    # The first prompt token whose routed experts are returned, at /inference/v1/generate. None:
    # neither routed experts nor sampling masks are.
    routed_experts_prompt_start: Count | None = None
    # Set by routes, not by clients: /get_sequence_logprobs/, and routes that return text.
    prompt_logprobs: Count | None = None
    detokenize: bool = False

    def num_logprobs(self, vocab_size: int) -> int:
        """The most log-probabilities of a sampled token: its own, and the best or chosen ones."""
        if self.logprob_token_ids is not None:
            # Also where `logprobs` is null.
            return 1 + len(self.logprob_token_ids)
        if self.logprobs is None:
            return 0
        return vocab_size if self.logprobs == -1 else 1 + self.logprobs


# Created at import, so that two threads never use the Struct for the first time at once (see
# app/trl/bodies.py).
encode_options = msgspec.msgpack.Encoder().encode
decode_options = msgspec.msgpack.Decoder(SamplingOptions).decode


def check_sampling(options: SamplingOptions, facts: WorkerFacts) -> None:
    """Checks what the ranges of single fields cannot express.

    Raises:
        InvalidRequest: an option contradicts another option, or the engine's vocabulary, version or
            limits.
    """
    _check_names(options, facts)
    _check_combinations(options, facts)
    _check_entries(options)
    _check_size(options)
    if options.structured_outputs is not None:
        check_grammar(options.structured_outputs)
    if options.extra_args and is_deeper_than(MAX_JSON_DEPTH, options.extra_args):
        raise InvalidRequest(
            f"extra_args: expected at most {MAX_JSON_DEPTH} levels, got a deeper object; send a flat one",
            param="extra_args",
        )
    _check_logprobs(options, facts)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
        ids = getattr(options, name)
        if ids is not None:
            check_token_ids(name, ids, facts.vocab_size)
    if options.allowed_token_ids == []:
        raise InvalidRequest(
            "allowed_token_ids: expected at least one token id, got an empty list; leave it out to "
            "allow all tokens",
            param="allowed_token_ids",
        )


_DEFAULTS = SamplingOptions()
_FIELDS = frozenset(SamplingOptions.__struct_fields__)


def _check_names(options: SamplingOptions, facts: WorkerFacts) -> None:
    lacking = _FIELDS.difference(facts.sampling_fields)
    for name in SamplingOptions.__struct_fields__:
        if name in lacking and getattr(options, name) != getattr(_DEFAULTS, name):
            raise InvalidRequest(
                f"{name}: the workers run vLLM {facts.vllm_version}, which lacks this option; leave it "
                "out",
                param=name,
            )


def _check_entries(options: SamplingOptions) -> None:
    for name, most in MAX_ENTRIES.items():
        value = getattr(options, name)
        if not value:
            continue
        entries = [value] if isinstance(value, str) else value
        if len(entries) > most:
            raise InvalidRequest(
                f"{name}: expected at most {most} entries, as the engine reads all of them at each "
                f"token, got {len(entries)}; send fewer",
                param=name,
            )
        if name in MAX_TEXT_BYTES and (num_bytes := encoded_size(entries)) > MAX_TEXT_BYTES[name]:
            raise InvalidRequest(
                f"{name}: expected at most {MAX_TEXT_BYTES[name]} bytes together, as the engine "
                f"reads all of them at each token, got {num_bytes}; send fewer or shorter ones",
                param=name,
            )


def _check_size(options: SamplingOptions) -> None:
    """The options are kept for as long as a job is open, and sent with each completion."""
    is_large = encoded_size(options) > MAX_OPTIONS_BYTES
    sizes = {
        name: encoded_size(getattr(options, name))
        for name in (SamplingOptions.__struct_fields__ if is_large else ())
        if name != "structured_outputs"
    }
    if sum(sizes.values()) > MAX_OPTIONS_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise InvalidRequest(
            f"{largest}: expected at most {MAX_OPTIONS_BYTES} bytes of sampling options besides "
            f"structured_outputs, got {sum(sizes.values())}, of which {largest} has {sizes[largest]}; "
            "send less",
            param=largest,
        )


def _check_combinations(options: SamplingOptions, facts: WorkerFacts) -> None:
    if options.n > 1 and options.temperature < GREEDY_BELOW:
        raise InvalidRequest(
            f"n: expected 1 with temperature 0, which makes all completions equal, got {options.n}; "
            "set n to 1 or a temperature above 0",
            param="n",
        )
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise InvalidRequest(
            f"min_tokens: expected at most max_tokens ({options.max_tokens}), got {options.min_tokens}",
            param="min_tokens",
        )
    if options.min_tokens >= facts.max_model_len:
        raise InvalidRequest(
            f"min_tokens: expected less than max_model_len ({facts.max_model_len}), "
            f"got {options.min_tokens}",
            param="min_tokens",
        )
    if options.seed is not None and options.seed + options.n > 2**63:
        # vLLM samples completion i with the 64-bit number seed + i.
        raise InvalidRequest(
            f"seed: expected at most 2**63 - n ({2**63 - options.n}), got {options.seed}",
            param="seed",
        )
    _check_repetition(options.repetition_detection or RepetitionDetection())


def _check_repetition(options: RepetitionDetection) -> None:
    if options.min_pattern_size > options.max_pattern_size:
        raise InvalidRequest(
            "repetition_detection: expected min_pattern_size of at most max_pattern_size "
            f"({options.max_pattern_size}), got {options.min_pattern_size}",
            param="repetition_detection",
        )
    if options.max_pattern_size and options.min_count < 2:
        raise InvalidRequest(
            f"repetition_detection: expected min_count of at least 2, got {options.min_count}; set "
            "max_pattern_size to 0 to detect nothing",
            param="repetition_detection",
        )
    size, num_tokens = options.max_pattern_size, options.max_pattern_size * options.min_count
    if size > MAX_PATTERN_SIZE or num_tokens > MAX_PATTERN_TOKENS:
        raise InvalidRequest(
            f"repetition_detection: expected max_pattern_size of at most {MAX_PATTERN_SIZE}, and at "
            f"most {MAX_PATTERN_TOKENS} with min_count times as many, as the engine compares so many "
            f"tokens at each token, got {size} and {num_tokens}; look for shorter patterns, or fewer "
            "repetitions",
            param="repetition_detection",
        )


def _check_logprobs(options: SamplingOptions, facts: WorkerFacts) -> None:
    limit = facts.vocab_size if facts.max_logprobs == -1 else facts.max_logprobs
    num_logprobs = options.logprobs
    for name, number in (("logprobs", num_logprobs), ("prompt_logprobs", options.prompt_logprobs)):
        if number is not None and (facts.vocab_size if number == -1 else number) > limit:
            raise InvalidRequest(
                f"{name}: expected at most {limit}, got {number}; "
                "ask for fewer, or start the server with a greater --max-logprobs",
                param=name,
            )
    chosen = options.logprob_token_ids
    if chosen is not None and num_logprobs not in (None, 0, len(chosen)):
        raise InvalidRequest(
            f"logprobs: expected {len(chosen)} (the length of logprob_token_ids), 0 or null, got "
            f"{num_logprobs}",
            param="logprobs",
        )


def check_token_ids(location: str, ids: Collection[int] | np.ndarray, vocab_size: int) -> None:
    """Raises InvalidRequest for an id outside the vocabulary; `location` is that of `ids`."""
    if not len(ids):
        return
    least, most = (ids.min(), ids.max()) if isinstance(ids, np.ndarray) else (min(ids), max(ids))
    if least >= 0 and most < vocab_size:
        return
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{location}[{index}]: expected a token id in [0, {vocab_size}), got {token_id}",
                param=location.partition("[")[0],
            )


def is_scored(job: Job) -> bool:
    """Whether the log-probabilities of the prompt are wanted: also after an abort."""
    return _is_scored(bytes(job.sampling))


def scored_once() -> Callable[[Job], bool]:
    """`is_scored` for jobs that stay meanwhile: options that they share, as objects, are read once."""
    known: dict[int, bool] = {}

    def find(job: Job) -> bool:
        options = id(job.sampling)
        if options not in known:
            known[options] = is_scored(job)
        return known[options]

    return find


# The jobs of a request share their options.
@lru_cache(maxsize=256)
def _is_scored(sampling: bytes) -> bool:
    return bool(sampling) and decode_options(sampling).prompt_logprobs is not None


def has_grammar(job: Job) -> bool:
    """Whether the engine reads a grammar at each token of `job`."""
    return _has_grammar(bytes(job.sampling), bytes(job.chat))


@lru_cache(maxsize=256)
def _has_grammar(sampling: bytes, chat: bytes) -> bool:
    if chat and decode_chat_parsing(chat).tools:
        return True
    return bool(sampling) and decode_options(sampling).structured_outputs is not None
