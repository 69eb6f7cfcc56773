"""A vLLM worker extension with room for three chunks only, neither for a model nor in the KV cache."""

from typing import Any

from workers.in_model.extension import WorkerExtension
from workers.in_model.receiving.staging import StagingRoom


class CrowdedExtension(WorkerExtension):
    """Passed to vLLM as `--worker-extension-cls`."""

    def _titopool_kv_caches(self) -> Any:
        # The largest chunk is the embedding, of 2 MiB. The model has 11 MiB.
        StagingRoom._num_free = lambda room: 7 * 2**20  # type: ignore[method-assign]
        return None

    def _titopool_extra_bytes(self, infos: Any) -> int:
        # On a GPU, two layers, which would leave no room for chunks.
        return 0
