"""The body of `POST /sessions`."""

from typing import Any

import msgspec
from msgspec import field


class SessionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the session's maker wants to read with it."""

    metadata: dict[str, Any] = field(default_factory=dict)
