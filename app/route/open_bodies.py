"""Bodies with a route's fields and vLLM's sampling options in one object, and those of them whose unknown
fields are accepted: clients that speak to a vendor's own service add fields with every release.

A field that this server knows is served, or refused by name.
"""

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from app.route.components import Components, Schema
from app.route.decoding import convert, decode_object
from app.route.field_schemas import fields_of, nullable, object_of, required_of, unused_fields
from app.route.fields import StreamedFields, check_stream
from app.route.unused_fields import UNUSED, Unused, used_fields
from titopool.settings.grammars import StructuredOutputs
from titopool.settings.sampling import SamplingOptions

Fields = TypeVar("Fields", bound=StreamedFields)
_OF_CHATS = Unused("this route has another name for it, or none; docs/http.md lists its fields")
# Fields of OpenAI's routes that a dialect has under another name, or not at all, and the values that ask
# for nothing.
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("add_generation_prompt", "include_reasoning", "parallel_tool_calls"), True),
    **dict.fromkeys(
        (
            "continue_final_message", "logprobs", "return_tokens_as_token_ids",
            "return_weight_versions",
        ),
        False,
    ),
    "top_logprobs": 0,
}  # fmt: skip
_NAMES = (
    "chat_template_kwargs", "max_completion_tokens", "max_tokens", "messages", "reasoning_effort",
    "response_format", "tokens", "tool_choice",
)  # fmt: skip
OTHERS: dict[str, Unused] = UNUSED | {
    **dict.fromkeys(_NAMES, _OF_CHATS),
    **{name: _OF_CHATS._replace(accepted=(one,)) for name, one in NEUTRAL.items()},
    "n": Unused("an answer has one message; send several requests", (1,)),
}


class Sent(NamedTuple, Generic[Fields]):
    """A body: the route's fields, vLLM's sampling options, and the names of unknown fields."""

    fields: Fields
    options: SamplingOptions
    unknown: list[str]


class OptionsDecoder(Generic[Fields]):
    """Decodes a body to the route's fields and the sampling options; null means left out."""

    def __init__(self, fields_type: type[Fields], unused: Mapping[str, Unused]):
        """`unused`: fields without effect, unless the route has them."""
        self.body_type = fields_type
        self.types = (fields_type, SamplingOptions, StructuredOutputs)
        own = fields_type.__struct_fields__
        self.unused = {name: one for name, one in unused.items() if name not in own}

    def read(self, body: bytes) -> Sent[Fields]:
        """
        Raises:
            InvalidRequest: a field is not supported, or of another type or range.
            msgspec.DecodeError: the body is not a JSON object.
        """
        used = used_fields(decode_object(body), self.unused)
        own, sampling = (
            {name: used.pop(name) for name in struct.__struct_fields__ if name in used}
            for struct in (self.body_type, SamplingOptions)
        )
        fields, options = convert(own, self.body_type), convert(sampling, SamplingOptions)
        options.detokenize = True
        check_stream(fields, options)
        return Sent(fields, options, [*used])

    def schema_of(self, components: Components, others: Mapping[str, Schema]) -> Schema:
        """All in one object, without its name; `others`: of further fields."""
        required = required_of(components, self.body_type)
        fields = {
            **nullable(fields_of(components, SamplingOptions, without=self.unused)),
            **unused_fields(self.unused),
            **others,
            **nullable(fields_of(components, self.body_type), but=required),
        }
        about = components.struct(self.body_type)["description"] + " Null means left out."
        return object_of(about, fields, required)


class OpenDecoder(OptionsDecoder[Fields]):
    """Accepts fields that nobody knows."""

    def __init__(self, fields_type: type[Fields], unused: Mapping[str, Unused]):
        """`unused`: the dialect's fields without effect."""
        super().__init__(fields_type, {**OTHERS, **unused})

    def decode(self, body: bytes, /) -> Sent[Fields]:
        """Called by `app.route.decoding.decode_body`, which explains msgspec's errors.

        Raises:
            InvalidRequest, msgspec.DecodeError: as `read`.
        """
        return self.read(body)

    def schema(self, components: Components) -> Schema:
        """As `app.route.decoding.DescribedDecoder`."""
        schema = self.schema_of(components, {}) | {"additionalProperties": True}
        return components.add(self.body_type.__name__.replace("Fields", "Body"), schema)
