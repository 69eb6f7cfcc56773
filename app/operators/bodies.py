"""The body of the route that changes the number of workers."""

from typing import Annotated

import msgspec
from msgspec import Meta


class ScaleBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /workers/scale`."""

    num_workers: Annotated[int, Meta(ge=1, le=4096)]
