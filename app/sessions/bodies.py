"""Bodies of the routes of sessions."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, field


class SessionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the session's maker wants to read with it."""

    metadata: dict[str, Any] = field(default_factory=dict)


class SamplesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How miles' trainer wants its samples (`OpenAIEndpointTracer.collect_samples`)."""

    # Tokens of a sample; what follows is cut off.
    max_seq_len: Annotated[int, Meta(ge=1)] | None = None
    # The agent's, for each sample; `reward` becomes the sample's.
    metadata: dict[str, Any] | None = None
