"""Bodies of TRL's generating routes and of vLLM's tokenization."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.schemas.decoding import convert, decode_object
from app.schemas.unused_fields import UNUSED_OF_TOKENIZE, check_unused

# vLLM refuses an empty salt. A request's salt is a part of each of its jobs.
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
WeightVersion = Annotated[int, Meta(ge=0, le=2**62)]


class MultiModalData(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `multi_modal_data`, with images as base64; one string means one image."""

    image: list[str] | str | None = None


class TokensPrompt(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's TokensPrompt."""

    prompt_token_ids: list[int]
    multi_modal_data: MultiModalData | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None


# An OpenAI chat message; the model's chat template decides which fields matter.
Message = dict[str, Any]


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that `/generate/` and `/chat/` share."""

    mm_processor_kwargs: dict[str, Any] | list[dict[str, Any] | None] | None = None
    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None = 0
    raw_logprobs: bool = False
    truncate_prompt_tokens: int | None = None
    structured_outputs_regex: str | None = None
    generation_kwargs: dict[str, Any] = {}
    # None: the base model, without a LoRA adapter.
    lora_name: str | None = None
    # Wait until the pool serves this version of the weights, or a later one.
    min_weight_version: WeightVersion | None = None


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
    min_weight_version: WeightVersion | None = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /tokenize`, as vLLM's server takes it: either a prompt or messages."""

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


class TokenizeDecoder:
    """Decodes the body of `POST /tokenize`; null means left out, as in vLLM's clients."""

    body_type = TokenizeBody

    def decode(self, body: bytes, /) -> TokenizeBody:
        """Called by `app.schemas.decoding.decode_body`, which explains msgspec's errors.

        Raises:
            InvalidRequest: a field is unknown, not supported, or of another type.
            msgspec.DecodeError: the body is not a JSON object.
        """
        sent = {name: one for name, one in decode_object(body).items() if one is not None}
        for name in UNUSED_OF_TOKENIZE.keys() & sent.keys():
            check_unused(name, sent.pop(name), UNUSED_OF_TOKENIZE[name])
        return convert(sent, TokenizeBody)


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /detokenize`, as vLLM's server takes it."""

    tokens: list[int]
    model: str | None = None
    # Not vLLM's: also the text of each token.
    return_token_texts: bool = False


class MismatchBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /mismatch`: a trainer's log-probabilities of the completions of a request."""

    # The header X-Request-Id of the request or of its answer.
    request_id: Annotated[str, Meta(min_length=1, max_length=256)]
    # One list for each completion, in the answer's order; one value for each token.
    logprobs: list[list[float]]


# Fields of `SamplingBody` that are sampling options of the same name.
SAMPLING_FIELDS = (
    "n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs",
)  # fmt: skip


# Decoders are made at import: msgspec inspects a Struct at its first use and crashes when two
# threads do so at once (seen with 0.22).
GENERATE_BODY = msgspec.json.Decoder(GenerateBody)
CHAT_BODY = msgspec.json.Decoder(ChatBody)
SEQUENCES_BODY = msgspec.json.Decoder(SequencesBody)
TOKENIZE_BODY = TokenizeDecoder()
MISMATCH_BODY = msgspec.json.Decoder(MismatchBody)
DETOKENIZE_BODY = msgspec.json.Decoder(DetokenizeBody)
