"""The bodies of HTTP requests. Decoded once, strictly: an unknown field is refused by name."""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from titopool.errors import InvalidRequest

Body = TypeVar("Body", bound=msgspec.Struct)

# Errors about a field of the whole body, which have no path: msgspec's and those of `__post_init__`.
_NAMED_FIELD = re.compile(
    r"Object (?:missing required|contains unknown) field `(\w{1,64})`$|(\w+): expected "
)
# vLLM asks for a non-empty salt.
CacheSalt = Annotated[str, Meta(min_length=1)]


class MultiModalData(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `multi_modal_data`, with images as base64; one string means one image."""

    image: list[str] | str | None = None


class TokensPrompt(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's TokensPrompt."""

    prompt_token_ids: list[int]
    multi_modal_data: MultiModalData | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None


# As OpenAI has it; what a model's template reads of it is the model's affair.
Message = dict[str, Any]


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both of TRL's generating routes take beside their prompts."""

    mm_processor_kwargs: dict[str, Any] | list[dict[str, Any] | None] | None = None
    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None = 0
    truncate_prompt_tokens: int | None = None
    structured_outputs_regex: str | None = None
    generation_kwargs: dict[str, Any] = {}
    # Name of a LoRA adapter.
    lora_name: str | None = None


class GenerateBody(SamplingBody, forbid_unknown_fields=True, kw_only=True):
    """`POST /generate/`, as TRL's VLLMClient sends it (0.29 to 1.10)."""

    prompts: list[str | list[int] | TokensPrompt]
    images: list[list[str] | str | None] | None = None


class ChatBody(SamplingBody, forbid_unknown_fields=True, kw_only=True):
    """`POST /chat/`, as TRL's VLLMClient sends it (0.29 to 1.10)."""

    messages: list[list[Message]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}


class SequencesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /get_sequence_logprobs/`, as TRL's VLLMClient sends it (1.9 and 1.10)."""

    sequences: list[list[int]]
    prompt_lengths: list[int]
    top_logprobs: Annotated[int, Meta(ge=1)] = 100
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    response_format: Literal["json", "binary"] = "json"


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /tokenize`, as vLLM's server takes it: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    # Default: true for a prompt, false for messages.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /detokenize`, as vLLM's server takes it."""

    tokens: list[int]
    model: str | None = None


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/load_lora_adapter`, as vLLM's server takes it, and a version."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=200)]
    lora_path: str
    # None: one more than there is.
    version: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    # What vLLM's clients say to replace one; here it always is.
    load_inplace: bool = True


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/unload_lora_adapter`, as vLLM's server takes it."""

    lora_name: str
    lora_int_id: int | None = None


# Fields of SamplingBody that are sampling options under the same name.
SAMPLING_FIELDS = (
    "n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs",
)  # fmt: skip


# Decoders are made here, at import: msgspec collects what it must know of a Struct at its
# first use, and crashes when two threads do that at once (seen with 0.22).
GENERATE_BODY = msgspec.json.Decoder(GenerateBody)
CHAT_BODY = msgspec.json.Decoder(ChatBody)
SEQUENCES_BODY = msgspec.json.Decoder(SequencesBody)
TOKENIZE_BODY = msgspec.json.Decoder(TokenizeBody)
LOAD_ADAPTER_BODY = msgspec.json.Decoder(LoadAdapterBody)
UNLOAD_ADAPTER_BODY = msgspec.json.Decoder(UnloadAdapterBody)
DETOKENIZE_BODY = msgspec.json.Decoder(DetokenizeBody)


def decode_body(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """The request's JSON body as `decoder`'s type.

    Raises:
        InvalidRequest: it is no JSON, or a field is unknown, missing or of another type;
            the message says where, e.g. `prompts[3][17]`.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(explain(error), param=field_of(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"expected a body in JSON, got something else: {error}") from None


def explain(error: msgspec.ValidationError, within: str = "") -> str:
    """msgspec's message with the location in front: `prompts[3][17]: expected …`.

    Args:
        within: where the value stands that was converted, if not at the top.
    """
    text, path = _parted(error)
    location = (within + path).removeprefix(".")
    text = text[:1].lower() + text[1:]
    return f"{location}: {text}" if location else text


def field_of(error: msgspec.ValidationError) -> str | None:
    """The top-level field that an error is about, also one that is missing or unknown."""
    text, path = _parted(error)
    if path:
        return path.removeprefix(".").replace("[", ".").partition(".")[0] or None
    named = _NAMED_FIELD.match(text)
    return named[1] or named[2] if named else None


def _parted(error: msgspec.ValidationError) -> tuple[str, str]:
    """What is wrong, and where: `.prompts[3][17]`; "" for the whole body."""
    text, _, location = str(error).partition(" - at `")
    # Of a key of an object, the location is "`key` in `$.logit_bias`".
    return text, location.rpartition("`$")[2].removeprefix("$").rstrip("`")
