"""What stands for messages, ids and images, and the errors that rollouts raise."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Message: TypeAlias = Mapping[str, Any]
Ids: TypeAlias = NDArray[np.int32]
# A picture: a PIL image, the bytes of a file, or a file in base64.
Image: TypeAlias = Any


class RolloutError(Exception):
    """Base of the errors of this package."""


class HistoryRewritten(RolloutError):
    """The chat template renders the turns so far differently once the new messages follow."""


class MessageDropped(RolloutError):
    """What the chat template appends does not depend on the text of a new message."""


class TemplateRefused(RolloutError):
    """The chat template takes the conversation in none of the forms that a turn may have."""


class ContextFull(RolloutError):
    """The conversation leaves no room for a token within `max_context`."""


class PromptChanged(RolloutError):
    """The ids that the engine got do not begin with the ids of the turns before."""
