"""Bodies of vLLM's routes for token ids, `/inference/v1/…`, with the fields of vLLM 0.27 to 0.32.

`tests/engine/text/test_vllm_fields.py` compares them with the installed vLLM.
"""

from typing import Any, Literal

import msgspec

from app.schemas.decoding import convert, decode_object
from app.schemas.features import ContentPart, Features
from app.schemas.openai import StreamedFields, check_stream
from app.schemas.unused_fields import UNUSED_OF_GENERATE, UNUSED_SAMPLING, check_unused
from titopool.settings.sampling import SamplingOptions


class GenerateFields(StreamedFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /inference/v1/generate`."""

    # Of one prompt.
    token_ids: list[int]
    # vLLM's SamplingParams.
    sampling_params: dict[str, Any]
    # "npy": as vLLM's server has them, in place of the object that renderers reads. A client that
    # sends the field needs a server that returns routed experts.
    routed_experts_format: Literal["object", "npy"] | None = None
    # The prompt's images: with expanded placeholders in `token_ids`, or single ones.
    features: Features | None = None
    content_parts: list[ContentPart] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.features is not None and self.content_parts:
            raise ValueError(
                "content_parts: expected none with features, got both; send the images once"
            )

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer has the expanded prompt and the ranges of its images."""
        return self.return_token_ids or bool(self.content_parts)


class AbortBody(msgspec.Struct, kw_only=True):
    """`POST /inference/v1/abort_requests`; as in vLLM's server, other fields have no effect."""

    request_ids: list[str]


class GenerateDecoder:
    """Decodes a body to the route's fields and the sampling options; null means left out."""

    body_type = GenerateFields

    def decode(self, body: bytes, /) -> tuple[GenerateFields, SamplingOptions]:
        """Called by `app.schemas.decoding.decode_body`, which explains msgspec's errors.

        Raises:
            InvalidRequest: a field is unknown, not supported, or of another type or range.
            msgspec.DecodeError: the body is not a JSON object.
        """
        values = {}
        for name, value in decode_object(body).items():
            if value is None:
                continue
            if name in UNUSED_OF_GENERATE:
                check_unused(name, value, UNUSED_OF_GENERATE[name])
            else:
                values[name] = value
        fields = convert(values, GenerateFields)
        options = _sampling_options(fields.sampling_params)
        check_stream(fields, options)
        return fields, options


GENERATE_BODY = GenerateDecoder()


def _sampling_options(sent: dict[str, Any]) -> SamplingOptions:
    """The options of `sampling_params`; what the server sets itself has no effect."""
    # Without a limit a completion ends with the context. As in vLLM's server, all requests get
    # routed experts from a server that returns them.
    values: dict[str, Any] = {"max_tokens": None, "routed_experts_prompt_start": 0}
    for name, value in sent.items():
        if value is None:
            continue
        if name in UNUSED_SAMPLING:
            check_unused(f"sampling_params.{name}", value, UNUSED_SAMPLING[name])
        else:
            values[name] = value
    return convert(values, SamplingOptions, "sampling_params")
