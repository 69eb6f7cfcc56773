"""Bodies of SGLang's native routes, with the fields of SGLang 0.5.23.

`POST /generate` is a route of TRL's too: `prompts` in the body makes it TRL's, `input_ids` or `text`
SGLang's. Null means left out, but for `max_new_tokens`.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from app.route.components import Components, Schema
from app.route.decoding import convert
from app.route.field_schemas import (
    NULL,
    fields_of,
    nullable,
    object_of,
    or_null,
    unused_fields,
    without_default,
)
from app.route.fields import CacheSalt, Label, NumLogprobs, WeightVersion
from app.route.unused_fields import used_fields
from app.sglang.sglang_unused_fields import UNUSED, UNUSED_SAMPLING
from app.time_slices import sharing_time
from titopool.errors import InvalidRequest
from titopool.settings.grammars import StructuredOutputs
from titopool.settings.sampling import LogprobTokenIds, SamplingOptions

# As `app.http.request_ids`: printable ASCII without blanks.
RequestId = Annotated[str, Meta(pattern=r"^[!-~]{1,256}\Z")]


class RequestFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of `POST /generate` that hold for all of its prompts."""

    stream: bool = False
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    # Routed experts of the tokens from this one on, to the last but one of the completion.
    return_routed_experts: bool = False
    routed_experts_start_len: Annotated[int, Meta(ge=0)] = 0
    mm_processor_kwargs: dict[str, Any] = {}
    session_id: str | None = None
    # Not a field of SGLang's: wait until the pool serves this version of the weights.
    min_weight_version: WeightVersion | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """Fields of `POST /generate` for one prompt: in a batch, one value for all or a list of them."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: dict[str, Any] = {}
    rid: RequestId | None = None
    return_logprob: bool = False
    # From which token on the prompt's log-probabilities are returned; -1: none.
    logprob_start_len: Annotated[int, Meta(ge=-1)] = -1
    top_logprobs_num: NumLogprobs = 0
    token_ids_logprob: LogprobTokenIds | None = None
    # The name of a LoRA adapter.
    lora_path: str | None = None
    image_data: list[str] | str | None = None
    cache_salt: CacheSalt | None = None


class SGLangPrompt(NamedTuple):
    """One prompt of `POST /generate`."""

    # Where the prompt and its images stand in the body, e.g. `input_ids[3]`.
    location: str
    images: str
    fields: PromptFields
    # Of all prompts with the same options; not to be changed.
    options: SamplingOptions
    # `max_new_tokens` is 0: the completion is dropped.
    is_scored_only: bool


class SGLangBody(NamedTuple):
    """SGLang's form of `POST /generate`."""

    fields: RequestFields
    # Of `input_ids` and `text` the one that was sent.
    source: str
    # Fields of `PromptFields` as they were sent.
    values: dict[str, Any]
    # None: one prompt outside a list.
    batch_size: int | None


class PauseGenerationBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGenerationBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /continue_generation`."""

    # Without effect.
    torch_empty_cache: bool = True


class DiskBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /update_weights_from_disk`."""

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    weight_version: Label | None = None
    abort_all_requests: bool = False
    keep_pause: bool = False
    # Without effect. An update empties the caches in any case.
    flush_cache: bool = True
    is_async: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0

    def __post_init__(self) -> None:
        if self.keep_pause:
            raise ValueError(
                "keep_pause: expected false, got true; call /pause_generation before, which the "
                "update does not end"
            )


class SglangAbortBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /abort_request`."""

    rid: str | None = None
    abort_all: bool = False

    def __post_init__(self) -> None:
        if bool(self.rid) == self.abort_all:
            came = "both" if self.rid else "neither"
            raise ValueError(f"rid: expected either a rid or abort_all, got {came}")


SOURCES = ("input_ids", "text")
PROMPT_TYPES = {one.name: one.type for one in msgspec.structs.fields(PromptFields)}
DISK_BODY = msgspec.json.Decoder(DiskBody)


def sglang_body(values: dict[str, Any], source: str) -> SGLangBody:
    of_all: dict[str, Any] = {}
    of_prompts: dict[str, Any] = {}
    for name, value in used_fields(values, UNUSED).items():
        (of_prompts if name in PROMPT_TYPES else of_all)[name] = value
    fields, sent = convert(of_all, RequestFields), values[source]
    is_batch = isinstance(sent, list) and (source == "text" or _has_lists(sent))
    if is_batch and not sent:
        raise InvalidRequest(f"{source}: expected at least one prompt, got none", param=source)
    return SGLangBody(fields, source, of_prompts, len(sent) if is_batch else None)


def split_prompts(body: SGLangBody) -> list[SGLangPrompt]:
    """The prompts of a body whose number is within the server's limit.

    Options are made once for all prompts that share them: a grammar may be long.

    Raises:
        InvalidRequest: a field has another type or range, or not one entry for each prompt.
    """
    columns = {name: _column(name, one, body.batch_size) for name, one in body.values.items()}
    shared: dict[Any, tuple[SamplingOptions, bool]] = {}
    prompts = []
    for index in sharing_time(range(body.batch_size or 1)):
        located = {name: column[index] for name, column in columns.items()}
        given = {name: value for name, (value, _) in located.items() if value is not None}
        fields = PromptFields(**given)
        key = (
            id(given.get("sampling_params")), fields.return_logprob, fields.top_logprobs_num,
            tuple(fields.token_ids_logprob or ()), fields.logprob_start_len >= 0,
        )  # fmt: skip
        if key not in shared:
            location = located.get("sampling_params", (None, "sampling_params"))[1]
            shared[key] = _options(fields, location)
            if body.fields.stream:
                _check_streamed(shared[key][0])
        images = located.get("image_data", (None, ""))[1]
        prompts.append(SGLangPrompt(located[body.source][1], images, fields, *shared[key]))
    return prompts


def _check_streamed(options: SamplingOptions) -> None:
    """Raises InvalidRequest for log-probabilities that the events of a stream do not have.

    Each event repeats its completion: k at each token would grow with the square of its length.
    """
    for name, is_given in (
        ("logprob_start_len", options.prompt_logprobs is not None),
        ("top_logprobs_num", options.logprobs),
        ("token_ids_logprob", options.logprob_token_ids),
    ):
        if is_given:
            raise InvalidRequest(
                f"{name}: expected none with stream, whose events have log-probabilities of the "
                "sampled tokens only; leave one of the two out",
                param=name,
            )


def _has_lists(value: list[Any]) -> bool:
    # Without a step in Python for each of millions of ids.
    return list in map(type, value)


def _column(name: str, value: Any, num: int | None) -> Sequence[tuple[Any, str]]:
    """The value of a field for each prompt, and where the value stands.

    Args:
        num: of prompts; None: the body has one prompt outside a list.
    """
    has_one_for_each = num is not None and isinstance(value, list)
    if name == "token_ids_logprob":
        has_one_for_each = has_one_for_each and _has_lists(value)
    if not has_one_for_each:
        if name == "image_data" and num is not None:
            # Each prompt's job would have the files.
            raise InvalidRequest(
                f"image_data: expected a list with one entry for each of the {num} prompts, got "
                f"{type(value).__name__}",
                param=name,
            )
        return [(convert(value, PROMPT_TYPES[name], name), name)] * (num or 1)
    if len(value) != num:
        raise InvalidRequest(
            f"{name}: expected one entry for each of the {num} prompts, got {len(value)}",
            param=name,
        )
    column: list[tuple[Any, str]] = []
    for index, one in enumerate(value):
        location = f"{name}[{index}]"
        if one is None and name in SOURCES:
            raise InvalidRequest(f"{location}: expected a prompt, got null", param=name)
        is_given = one is not None
        column.append((convert(one, PROMPT_TYPES[name], location) if is_given else None, location))
    return column


# ---- the schema ------------------------------------------------------------------------


def body_schema(components: Components) -> Schema:
    """Fields of prompts have one value, or in a batch a list with one for each prompt."""
    prompt = fields_of(components, PromptFields)
    prompt["sampling_params"] = _sglang_options(components)
    fields = {
        **unused_fields(UNUSED),
        **nullable(fields_of(components, RequestFields)),
        **{
            name: {"anyOf": [without_default(one), {"type": "array", "items": or_null(one)}, NULL]}
            for name, one in prompt.items()
        },
    }
    about = (
        "`POST /generate` as SGLang has it: with one of `input_ids` and `text`. In a batch, where "
        "that is a list of prompts, fields of prompts have one value for all or a list with one for "
        "each. Null means left out."
    )
    return components.add("SGLangGenerateBody", object_of(about, fields))


def _sglang_options(components: Components) -> Schema:
    vllm, grammars = (fields_of(components, one) for one in (SamplingOptions, StructuredOutputs))
    options = {
        **{name: vllm[theirs] for name, theirs in NAMES.items()},
        **{name: grammars[theirs] for name, theirs in GRAMMARS.items()},
        "max_new_tokens": {
            "type": ["integer", "null"], "minimum": 0, "default": 128,
            "description": "0 scores the prompt only; null: to the end of the context.",
        },
    }  # fmt: skip
    about = "SGLang's sampling options. Null means left out, but for `max_new_tokens`."
    fields = {**unused_fields(UNUSED_SAMPLING), **nullable(options)}
    return components.add("SGLangSamplingParams", object_of(about, fields))


# ---- sampling options ------------------------------------------------------------------

# SGLang's names of vLLM's options.
NAMES = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    **{one: one for one in (
        "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
        "spaces_between_special_tokens", "logit_bias",
    )},
}  # fmt: skip
# SGLang's names of vLLM's `structured_outputs`.
GRAMMARS = {
    "json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag",
}  # fmt: skip
# Where clients set what vLLM has in its options.
OUTSIDE = {
    "logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
}  # fmt: skip
_SGLANG_NAMES = {vllm: ours for ours, vllm in NAMES.items() if ours != vllm} | OUTSIDE
_VLLM_NAME = re.compile(rf"(?<![\w-])({'|'.join(_SGLANG_NAMES)})\b")


def with_sglang_names(error: InvalidRequest, location: str) -> InvalidRequest:
    """An error about vLLM's options with the names that the client has sent.

    Args:
        location: where the client's sampling options stand.
    """
    message = _VLLM_NAME.sub(lambda found: _SGLANG_NAMES[found[0]], error.message)
    if error.param in OUTSIDE:
        return InvalidRequest(message, param=OUTSIDE[error.param])
    message = message if message.startswith("sampling_params") else f"{location}: {message}"
    return InvalidRequest(message, param="sampling_params")


def _options(fields: PromptFields, location: str) -> tuple[SamplingOptions, bool]:
    """vLLM's options of a prompt, and whether the client wants no token.

    Args:
        location: where the prompt's sampling options stand in the body.
    """
    values: dict[str, Any] = {"max_tokens": 128}
    structured: dict[str, Any] = {}
    used = used_fields(
        fields.sampling_params, UNUSED_SAMPLING, f"{location}.", nullable=("max_new_tokens",)
    )
    for name, value in used.items():
        if name in NAMES:
            values[NAMES[name]] = value
        elif name not in GRAMMARS:
            raise InvalidRequest(
                f"{location}: object contains unknown field `{name}`",
                param="sampling_params",
            )
        elif value != "":
            structured[GRAMMARS[name]] = value
    if structured:
        values["structured_outputs"] = structured
    # vLLM generates at least one token.
    is_scored_only = type(values["max_tokens"]) is int and values["max_tokens"] == 0
    if is_scored_only:
        values["max_tokens"] = 1
    try:
        options = convert(values, SamplingOptions, location)
    except InvalidRequest as error:
        raise with_sglang_names(error, location) from None
    options.detokenize = True
    if fields.token_ids_logprob and (fields.top_logprobs_num or fields.logprob_start_len >= 0):
        raise InvalidRequest(
            "token_ids_logprob: expected none with top_logprobs_num or logprob_start_len, which the "
            "engine cannot return at once; send two requests",
            param="token_ids_logprob",
        )
    if fields.return_logprob:
        options.logprobs = fields.top_logprobs_num
        options.logprob_token_ids = fields.token_ids_logprob or None
        if fields.logprob_start_len >= 0:
            options.prompt_logprobs = fields.top_logprobs_num
    return options, is_scored_only
