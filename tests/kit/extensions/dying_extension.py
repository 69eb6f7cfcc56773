"""A vLLM worker extension in whose engine each step fails, as it does where a kernel is missing.

Passed to vLLM as `--worker-extension-cls`. The profiling run of vLLM's start is no step.
"""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from workers.in_model.extension import WorkerExtension


class DyingExtension(WorkerExtension):
    """Its import changes the worker that it extends, on CPUs and on GPUs."""


def _fail(*arguments: Any, **named: Any) -> None:
    raise AssertionError("staged: no kernel for this step")


Worker.execute_model = _fail  # type: ignore[method-assign,assignment]
