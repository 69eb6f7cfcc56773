"""A vLLM worker extension with room for three chunks only, neither for a model nor in the KV cache.

Passed to vLLM as `--worker-extension-cls`.
"""

from workers.in_model.extension import WorkerExtension
from workers.in_model.load.loader import Loader
from workers.in_model.receiving.staging import StagingRoom
from workers.in_model.served_model import ServedModel


class CrowdedExtension(WorkerExtension):
    """Its import changes what the extension sees."""


ServedModel.kv_caches = None  # type: ignore[assignment,method-assign]
# The largest chunk is the embedding, of 2 MiB. The model has 11 MiB.
StagingRoom._num_free = lambda room: 7 * 2**20  # type: ignore[method-assign]
# On a GPU, two layers, which would leave no room for chunks.
Loader.extra_bytes = lambda loader, infos: 0  # type: ignore[method-assign]
