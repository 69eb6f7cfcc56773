"""Sampling options: vLLM's SamplingParams fields, under vLLM's names, with their ranges.

The front end checks them here, so that nothing out of range reaches an engine; the engine
adapter turns them into vLLM's own object. To add an option, add a field: its type and
range are the check, `workers/engine/sampling.py` passes it on by name.
"""

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from titopool.errors import InvalidRequest
from titopool.wire.messages import WorkerFacts

# Below this temperature vLLM samples greedily (vllm/sampling_params.py, _SAMPLING_EPS).
GREEDY_BELOW = 1e-5

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonEmptyStr = Annotated[str, Meta(min_length=1)]
# The V2 model runner (the one on GPUs) keeps these in tables of fixed width and raises, which
# ends the engine, when a request has more (vllm/v1/worker/gpu/sample/). Stop tokens share
# theirs, of 128, with the model's own; each bad word takes two places, with and without a
# space before it.
TokenIds = Annotated[list[int], Meta(max_length=1024)]
StopTokenIds = Annotated[list[int], Meta(max_length=96)]
LogprobTokenIds = Annotated[list[int], Meta(max_length=128)]
BadWords = Annotated[list[NonEmptyStr], Meta(max_length=64)]
MAX_BAD_WORDS_BYTES = 1024
# vLLM 0.32 refuses more; older versions walk the schema recursively.
MAX_JSON_DEPTH = 64

# Fields of SamplingParams that are not the client's to set, and why.
SERVER_SET_FIELDS = {
    "detokenize": "the server sets it: text is made only where a stop string needs it",
    "flat_logprobs": "the server sets it: the answer has one shape",
    "output_kind": "the server sets it: an answer is sent when it is complete",
    "skip_clone": "the server sets it",
    "stream_interval": "the server sets it: an answer is sent when it is complete",
}
UNSUPPORTED_FIELDS = {
    "prompt_logprobs": "the answer of this route has no place for them; see /get_sequence_logprobs/",
    "prompt_logprob_start": "the answer of this route has no place for them",
    "prompt_logprob_token_ids": "the answer of this route has no place for them",
    "routed_experts_prompt_start": "routed experts are not returned",
    "trace_decode_token_ids": "it replaces sampling",
}


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """vLLM's StructuredOutputsParams: exactly one of the first six."""

    json: NonEmptyStr | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: NonEmptyStr | None = None
    json_object: bool | None = None
    structural_tag: NonEmptyStr | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class RepetitionDetection(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """vLLM's RepetitionDetectionParams."""

    max_pattern_size: Count = 0
    min_pattern_size: Count = 0
    min_count: Count = 0


class SamplingOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Options of one job; defaults are vLLM's. Units are tokens where nothing else is said."""

    n: PositiveCount = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # 0 and -1 both mean the whole vocabulary.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: NonEmptyStr | list[NonEmptyStr] | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool = False
    max_tokens: PositiveCount | None = 16
    min_tokens: Count = 0
    # None: none; 0: the sampled token's; k: the k best and the sampled one; -1: all.
    logprobs: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    logprob_token_ids: LogprobTokenIds | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=1024)] | None = None
    allowed_token_ids: TokenIds | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: BadWords | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    repetition_detection: RepetitionDetection | None = None
    watermarking: bool | None = None
    # Set by the routes: /get_sequence_logprobs/, and those that answer with text.
    prompt_logprobs: Count | None = None
    detokenize: bool = False


# Made at import, so that no two threads use the Struct for the first time at once (see
# app/schemas/generation.py).
encode_options = msgspec.msgpack.Encoder().encode
decode_options = msgspec.msgpack.Decoder(SamplingOptions).decode


def check_sampling(options: SamplingOptions, facts: WorkerFacts) -> None:
    """Checks what depends on other fields or on the engine.

    Raises:
        InvalidRequest: an option contradicts another, or the engine's vocabulary,
            version or limits.
    """
    _check_names(options, facts)
    _check_combinations(options, facts)
    if options.structured_outputs is not None:
        _check_structured_outputs(options.structured_outputs)
    _check_logprobs(options, facts)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
        ids = getattr(options, name)
        if ids is not None:
            _check_ids(name, ids, facts.vocab_size)
    if options.allowed_token_ids == []:
        raise InvalidRequest(
            "allowed_token_ids: expected at least one id, got an empty list; leave it out to allow all",
            param="allowed_token_ids",
        )


def _check_names(options: SamplingOptions, facts: WorkerFacts) -> None:
    defaults = SamplingOptions()
    for name in SamplingOptions.__struct_fields__:
        if name not in facts.sampling_fields and getattr(options, name) != getattr(defaults, name):
            raise InvalidRequest(
                f"{name}: the workers run vLLM {facts.vllm_version}, which does not have this option; "
                "leave it out",
                param=name,
            )


def _check_combinations(options: SamplingOptions, facts: WorkerFacts) -> None:
    if options.n > 1 and options.temperature < GREEDY_BELOW:
        raise InvalidRequest(
            f"n: expected 1 with temperature 0, where all completions are the same, got {options.n}; "
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
            f"min_tokens: expected less than the model's {facts.max_model_len} (max_model_len), "
            f"got {options.min_tokens}",
            param="min_tokens",
        )
    if options.seed is not None and options.seed + options.n > 2**63:
        # Completion i is sampled with seed + i, a 64-bit number.
        raise InvalidRequest(
            f"seed: expected at most 2**63 - n ({2**63 - options.n}), got {options.seed}",
            param="seed",
        )
    num_bytes = sum(2 * len(word.encode()) + 1 for word in options.bad_words or ())
    if num_bytes > MAX_BAD_WORDS_BYTES:
        raise InvalidRequest(
            f"bad_words: expected words of {MAX_BAD_WORDS_BYTES} bytes at most, with and without a "
            f"space before them, got {num_bytes}; give fewer or shorter ones",
            param="bad_words",
        )


def _check_structured_outputs(structured: StructuredOutputs) -> None:
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    given = [kind for kind in kinds if getattr(structured, kind) is not None]
    came = ""
    if len(given) != 1:
        came = f"exactly one of {', '.join(kinds)}, got {', '.join(given) or 'none'}"
    elif structured.json_object is False:
        came = "json_object to be true or left out, got false"
    elif "\0" in (structured.regex or ""):
        came = "a regex without NUL characters, got one with them"
    elif is_deeper_than(MAX_JSON_DEPTH, structured.json):
        came = f"a JSON schema of {MAX_JSON_DEPTH} levels at most, got a deeper one"
    if came:
        raise InvalidRequest(f"structured_outputs: expected {came}", param="structured_outputs")


def is_deeper_than(limit: int, schema: str | dict[str, Any] | None) -> bool:
    """Whether a schema nests deeper than `limit`; a text that is no JSON is left to vLLM."""
    if isinstance(schema, str):
        try:
            level = [msgspec.json.decode(schema)]
        except msgspec.DecodeError:
            return False
        except RecursionError:
            return True
    else:
        level = [schema]
    for _ in range(limit):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return any(isinstance(node, dict | list) for node in level)


def _check_logprobs(options: SamplingOptions, facts: WorkerFacts) -> None:
    limit = facts.vocab_size if facts.max_logprobs == -1 else facts.max_logprobs
    asked = options.logprobs
    for name, number in (("logprobs", asked), ("prompt_logprobs", options.prompt_logprobs)):
        if number is not None and (facts.vocab_size if number == -1 else number) > limit:
            raise InvalidRequest(
                f"{name}: expected at most {limit}, got {number}; "
                "start the server with a greater --max-logprobs",
                param=name,
            )
    chosen = options.logprob_token_ids
    if chosen is not None and asked not in (None, 0, len(chosen)):
        raise InvalidRequest(
            f"logprobs: expected {len(chosen)}, the length of logprob_token_ids, or none, got {asked}",
            param="logprobs",
        )


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name}[{index}]: expected a token id in [0, {vocab_size}), got {token_id}",
                param=name,
            )
