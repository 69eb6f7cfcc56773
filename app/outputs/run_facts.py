"""What is known of a prompt once it runs."""

from dataclasses import dataclass, field

import numpy as np

from titopool.wire.messages import Chunk, Completed, Completion

# Of Python's string without its characters.
TEXT_BYTES = 50


@dataclass
class RunFacts:
    """What an answer says of a prompt besides its completions."""

    # int32, with expanded image placeholders.
    prompt_ids: np.ndarray
    # (start, length) of each image in prompt_ids.
    image_ranges: list[tuple[int, int]] = field(default_factory=list)
    num_cached: int = 0
    # Of the LoRA adapter.
    adapter_version: int | None = None
    # Of a stream.
    has_begun: bool = False

    def begin(self, chunk: Chunk | Completed) -> bool:
        """Takes the facts of a result, or of a stream's first chunk; False for all others."""
        if self.has_begun:
            return False
        self.has_begun = True
        if chunk.prompt_token_ids:
            self.prompt_ids = np.frombuffer(chunk.prompt_token_ids, np.int32)
        self.image_ranges = chunk.image_ranges
        self.num_cached = chunk.num_cached_tokens
        self.adapter_version = chunk.adapter_version
        return True


def kept_bytes(piece: Completion) -> int:
    """Memory of who keeps a piece of a stream: ids, log-probabilities and a text with its object."""
    return 2 * len(piece.token_ids) + len(piece.text) + TEXT_BYTES
