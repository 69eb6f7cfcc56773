"""What rollouts need of a client, and the errors that they raise."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Message: TypeAlias = Mapping[str, Any]
Ids: TypeAlias = NDArray[np.int32]
# A picture: a PIL image, the bytes of a file, or a file in base64.
Image: TypeAlias = Any


class Completion(Protocol):
    """One sampled completion."""

    @property
    def ids(self) -> Ids: ...
    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        """[tokens], of the sampled tokens."""
        ...

    @property
    def finish_reason(self) -> str: ...
    @property
    def weight_versions(self) -> Sequence[tuple[int, int]]:
        """(version, index of the first token that it sampled), in order."""
        ...


class PromptResult(Protocol):
    """The answer to one prompt."""

    @property
    def prompt_ids(self) -> Ids:
        """As the engine got them: with each image's placeholder expanded."""
        ...

    @property
    def completions(self) -> Sequence[Completion]: ...
    @property
    def image_ranges(self) -> Sequence[tuple[int, int]]:
        """Offset and length of each image; empty if an abort came before they were placed."""
        ...


class GenerationClient(Protocol):
    """The calls of `titopool.Client` that rollouts make."""

    def generate(self, prompts: Any, **options: Any) -> Sequence[PromptResult]: ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        chat_template_kwargs: Any = None,
        add_generation_prompt: bool = True,
    ) -> Ids: ...

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> Any: ...

    def detokenize(self, ids: Any) -> str: ...

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Only where a run ends before its rollouts."""
        ...


class RolloutError(Exception):
    """Base of the errors of this package.

    RolloutError
      HistoryRewritten  the chat template would change tokens that were sampled or sent
      MessageDropped    the chat template writes nothing of a new message
      TemplateRefused   the chat template raises an error over the conversation
      ContextFull       the conversation has no room for another token
      PromptChanged     the server answered for other prompt ids than were sent
    """


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
