"""JSON Schemas of bodies, made from the structs and tables of fields that decode them.

msgspec makes those of plain decoders. The decoders of OpenAI's, vLLM's and SGLang's routes take
fields of several structs in one object, read null as left out, and know fields without effect.
Their schemas are put together here from the same structs and tables.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from app.openapi.components import Components, Schema
from app.schemas import inference, sglang, sglang_fields
from app.schemas.decoding import Decoder
from app.schemas.generation import GenerateBody, SamplingBody, TokenizeDecoder
from app.schemas.inference import GenerateFields
from app.schemas.openai import CompletionsFields, OpenAIDecoder
from app.schemas.sglang import GRAMMARS, NAMES, PromptFields, RequestFields
from app.schemas.unused_fields import (
    CHAT_ONLY,
    UNUSED,
    UNUSED_OF_GENERATE,
    UNUSED_SAMPLING,
    Unused,
)
from titopool.settings.grammars import StructuredOutputs
from titopool.settings.sampling import SERVER_SET_FIELDS, UNSUPPORTED_FIELDS, SamplingOptions

NULL = {"type": "null"}
# Structs whose fields the schemas below take over.
PARTS = (
    SamplingOptions, StructuredOutputs, GenerateFields, PromptFields, RequestFields, GenerateBody,
)  # fmt: skip


def types_of(decoder: Decoder[Any]) -> tuple[Any, ...]:
    """The type that a decoder makes, and structs that its schema is made of."""
    if isinstance(decoder, msgspec.json.Decoder):
        return (decoder.type, *PARTS)
    if isinstance(decoder, OpenAIDecoder | TokenizeDecoder):
        return (decoder.body_type, *PARTS)
    return PARTS


def schema_of(decoder: Decoder[Any], components: Components) -> Schema:
    """The schema of a body; adds components."""
    match decoder:
        case msgspec.json.Decoder():
            if issubclass(decoder.type, SamplingBody):
                _describe_sampling(decoder.type, components)
            return components.ref(decoder.type)
        case TokenizeDecoder():
            return components.ref(decoder.body_type)
        case OpenAIDecoder():
            return _openai_body(decoder, components)
        case inference.GenerateDecoder():
            return _inference_body(components)
        case sglang.GenerateDecoder():
            _describe_sampling(GenerateBody, components)
            return {"anyOf": [components.ref(GenerateBody), _sglang_body(components)]}
    raise TypeError(f"expected a decoder that app/openapi/bodies.py knows, got {decoder!r}")


def _describe_sampling(body_type: type[msgspec.Struct], components: Components) -> None:
    """`generation_kwargs` has the options that `app.inputs.sampling` converts."""
    refused = {**SERVER_SET_FIELDS, **UNSUPPORTED_FIELDS}
    options = _object(
        "Any field of vLLM's SamplingParams; wins over the body's own fields.",
        _fields(components, SamplingOptions, without=refused),
    )
    properties = components.struct(body_type)["properties"]
    properties["generation_kwargs"] = components.add("GenerationKwargs", options) | {"default": {}}


def _openai_body(decoder: OpenAIDecoder[Any], components: Components) -> Schema:
    body_type = decoder.body_type
    fields = {
        **_nullable(_fields(components, SamplingOptions, without=UNUSED)),
        **_unused(UNUSED),
        **({name: _chat_only() for name in CHAT_ONLY} if body_type is CompletionsFields else {}),
        **_nullable(_fields(components, body_type), but=_required(components, body_type)),
    }
    about = components.struct(body_type)["description"] + " Null means left out."
    name = f"OpenAI{body_type.__name__.replace('Fields', 'Body')}"
    return components.add(name, _object(about, fields, _required(components, body_type)))


def _chat_only() -> Schema:
    return {"description": "Of a chat: without effect where the prompt is ids, else refused."}


def _inference_body(components: Components) -> Schema:
    options = {
        **_nullable(_fields(components, SamplingOptions, without=UNUSED_SAMPLING)),
        **_unused(UNUSED_SAMPLING),
    }
    options["max_tokens"] = {**options["max_tokens"], "default": None}
    about = "vLLM's SamplingParams. Null means left out; without `max_tokens` the context ends."
    required = _required(components, GenerateFields)
    fields = {
        **_unused(UNUSED_OF_GENERATE),
        **_nullable(_fields(components, GenerateFields), but=required),
        "sampling_params": components.add("SamplingParams", _object(about, options)),
    }
    about = "`POST /inference/v1/generate`. Null means left out."
    return components.add("TokensBody", _object(about, fields, required))


def _sglang_body(components: Components) -> Schema:
    """Fields of prompts have one value, or in a batch a list with one for each prompt."""
    prompt = _fields(components, PromptFields)
    prompt["sampling_params"] = _sglang_options(components)
    fields = {
        **_unused(sglang_fields.UNUSED),
        **_nullable(_fields(components, RequestFields)),
        **{
            name: {
                "anyOf": [_without_default(one), {"type": "array", "items": _or_null(one)}, NULL]
            }
            for name, one in prompt.items()
        },
    }
    about = (
        "`POST /generate` as SGLang has it: with one of `input_ids` and `text`. In a batch, where "
        "that is a list of prompts, fields of prompts have one value for all or a list with one for "
        "each. Null means left out."
    )
    return components.add("SGLangGenerateBody", _object(about, fields))


def _sglang_options(components: Components) -> Schema:
    vllm, grammars = (_fields(components, one) for one in (SamplingOptions, StructuredOutputs))
    options = {
        **{name: vllm[theirs] for name, theirs in NAMES.items()},
        **{name: grammars[theirs] for name, theirs in GRAMMARS.items()},
        "max_new_tokens": {
            "type": ["integer", "null"], "minimum": 0, "default": 128,
            "description": "0 scores the prompt only; null: to the end of the context.",
        },
    }  # fmt: skip
    about = "SGLang's sampling options. Null means left out, but for `max_new_tokens`."
    fields = {**_unused(sglang_fields.UNUSED_SAMPLING), **_nullable(options)}
    return components.add("SGLangSamplingParams", _object(about, fields))


def _object(about: str, fields: Mapping[str, Schema], required: Collection[str] = ()) -> Schema:
    return {
        "description": about,
        "type": "object",
        "properties": dict(sorted(fields.items())),
        "required": sorted(required),
        "additionalProperties": False,
    }


def _fields(
    components: Components, struct: type[msgspec.Struct], *, without: Collection[str] = ()
) -> dict[str, Schema]:
    properties = components.struct(struct)["properties"]
    return {name: one for name, one in properties.items() if name not in without}


def _required(components: Components, struct: type[msgspec.Struct]) -> list[str]:
    return list(components.struct(struct)["required"])


def _nullable(fields: Mapping[str, Schema], *, but: Collection[str] = ()) -> dict[str, Schema]:
    return {name: one if name in but else _or_null(one) for name, one in fields.items()}


def _or_null(schema: Schema) -> Schema:
    inner = _without_default(schema)
    options = inner.get("anyOf", [inner])
    if NULL in options or "null" in inner.get("type", ()):
        return schema
    # An empty object is what null stands for here, and generators of clients refuse it as a default.
    default = schema.get("default", {})
    return {"anyOf": [*options, NULL], **({} if default == {} else {"default": default})}


def _without_default(schema: Schema) -> Schema:
    return {key: one for key, one in schema.items() if key != "default"}


def _unused(table: Mapping[str, Unused]) -> dict[str, Schema]:
    """Fields that are accepted with values that ask for nothing; null alone is not worth a field."""
    fields = {}
    for name, one in table.items():
        if one.accepted is None:
            fields[name] = {"description": f"Without effect: {one.reason}."}
        elif one.accepted:
            values = ", ".join(f"`{json.dumps(value)}`" for value in one.accepted)
            fields[name] = {"description": f"Only {values} or null: {one.reason}."}
    return fields
