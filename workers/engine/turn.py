"""One job while vLLM runs it: its parameters, who looks at what it makes, and what comes of it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from titopool.wire.messages import Completion
from workers.engine.packing import pack_logprobs
from workers.engine.parsing import Parsing
from workers.engine.sampling import failed_inside
from workers.engine.streaming import Stream
from workers.engine.versions import History


@dataclass
class Turn:
    """How one job is run: vLLM's parameters, and who looks at what it makes."""

    params: Any
    parsing: Parsing | None = None
    stream: Stream | None = None
    # With all images expanded, once they are.
    prompt_token_ids: bytes = b""
    # Of AsyncLLM.generate.
    arguments: dict[str, Any] = field(default_factory=dict)
    # Which weights made its tokens, once it has ended.
    history: History = field(default_factory=lambda: History(0))

    async def completions(self, output: Any) -> list[Completion]:
        """Those of `output`, vLLM's last RequestOutput.

        Raises:
            TitopoolError: one failed inside the engine.
        """
        completions = []
        for item in output.outputs:
            if item.finish_reason == "error":
                raise failed_inside(self.params, num_tokens=len(item.token_ids))
            ids = np.array(item.token_ids, dtype=np.int32).tobytes()
            message, finish_reason, packed = None, item.finish_reason, None
            if self.stream is None:
                if self.parsing is not None:
                    message, finish_reason = self.parsing.whole(item)
                    # Long texts take long: other jobs and signs of life go in between.
                    await asyncio.sleep(0)
                if item.logprobs is not None:
                    packed = pack_logprobs(item.logprobs, ids)
            completions.append(
                Completion(
                    token_ids=ids,
                    finish_reason=finish_reason,
                    logprobs=packed,
                    weight_versions=self.history.spans(item.index, len(item.token_ids)),
                    text="" if self.stream else item.text,
                    stop_reason=item.stop_reason,
                    message=message,
                )
            )
        return completions
