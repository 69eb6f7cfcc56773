"""Bodies of TRL's generating routes."""

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from app.route.components import Components, Schema
from app.route.field_schemas import fields_of, object_of
from app.route.fields import CacheSalt, Message, WeightVersion
from titopool.settings.grammars import StructuredOutputs
from titopool.settings.sampling import SERVER_SET_FIELDS, UNSUPPORTED_FIELDS, SamplingOptions


class MultiModalData(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `multi_modal_data`, with images as base64; one string means one image."""

    image: list[str] | str | None = None


class TokensPrompt(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's TokensPrompt."""

    prompt_token_ids: list[int]
    multi_modal_data: MultiModalData | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None


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


Sampled = TypeVar("Sampled", bound=SamplingBody)


class SamplingDecoder(Generic[Sampled]):
    """Decodes a body with `generation_kwargs`, and describes them as vLLM's options."""

    def __init__(self, body_type: type[Sampled]):
        self.type = self.body_type = body_type
        self.types = (body_type, SamplingOptions, StructuredOutputs)
        self.decode = msgspec.json.Decoder(body_type).decode

    def schema(self, components: Components) -> Schema:
        """As `app.route.decoding.DescribedDecoder`; `app.trl.prompts` converts the options."""
        refused = {**SERVER_SET_FIELDS, **UNSUPPORTED_FIELDS}
        options = object_of(
            "Any field of vLLM's SamplingParams; wins over the body's own fields.",
            fields_of(components, SamplingOptions, without=refused),
        )
        properties = components.struct(self.body_type)["properties"]
        properties["generation_kwargs"] = components.add("GenerationKwargs", options) | {
            "default": {}
        }
        return components.ref(self.body_type)


# Decoders are made at import: msgspec inspects a Struct at its first use and crashes when two
# threads do so at once (seen with 0.22).
GENERATE_BODY = SamplingDecoder(GenerateBody)
CHAT_BODY = SamplingDecoder(ChatBody)
SEQUENCES_BODY = msgspec.json.Decoder(SequencesBody)
MISMATCH_BODY = msgspec.json.Decoder(MismatchBody)
