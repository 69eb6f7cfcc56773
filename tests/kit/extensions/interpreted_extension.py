"""titopool's extension for `tests.kit.workers.interpreted_worker`."""

from vllm.v1.sample.ops import topk_topp_sampler

from workers.in_model.extension import WorkerExtension

# Triton 3.9 cannot interpret vLLM's kernel for top-k and top-p; this chooses torch's functions.
topk_topp_sampler.HAS_TRITON = False


class Extension(WorkerExtension):
    """The extension as it is."""
