"""A vLLM worker extension whose model loader skips one tensor; the file named by FORGETS says when.

File content: `always` skips the tensor in dry runs too; `loading` skips it only when tensors have
values; anything else never skips it.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from workers.in_model.extension import WorkerExtension
from workers.in_model.host import Answer

SKIPPED_TENSOR = "model.layers.2.mlp.down_proj.weight"


class ForgetfulExtension(WorkerExtension):
    """Passed to vLLM as `--worker-extension-cls`."""

    _titopool_is_forgetful = False
    # vLLM's.
    get_model: Any

    def titopool(self, method: str, *args: Any) -> Answer:
        if not self._titopool_is_forgetful:
            self._titopool_is_forgetful = True
            model = self.get_model()
            load = model.load_weights
            model.load_weights = lambda weights: load(_without_skipped(weights))
        return super().titopool(method, *args)


def _without_skipped(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    forgets = Path(os.environ["FORGETS"]).read_text()
    for name, tensor in weights:
        is_skipped = forgets == "always" or (forgets == "loading" and not tensor.is_meta)
        if name != SKIPPED_TENSOR or not is_skipped:
            yield name, tensor
