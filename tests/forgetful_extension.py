"""vLLM's worker with a model whose loader leaves out a tensor, as the file that FORGETS names says.

`always`: in dry runs too; `loading`: only when the tensors have values; else never.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from workers.in_model.catalogue import Catalogue
from workers.in_model.extension import WorkerExtension

LEFT_OUT = "model.layers.2.mlp.down_proj.weight"


class ForgetfulExtension(WorkerExtension):
    """Given to vLLM as `--worker-extension-cls`."""

    _titopool_is_forgetful = False

    def _titopool_known(self) -> Catalogue:
        if not self._titopool_is_forgetful:
            self._titopool_is_forgetful = True
            model = self.get_model()
            load = model.load_weights
            model.load_weights = lambda weights: load(_remembered(weights))
        return super()._titopool_known()


def _remembered(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    forgets = Path(os.environ["FORGETS"]).read_text()
    for name, tensor in weights:
        is_forgotten = forgets == "always" or (forgets == "loading" and not tensor.is_meta)
        if name != LEFT_OUT or not is_forgotten:
            yield name, tensor
