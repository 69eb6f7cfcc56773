"""`python -m workers` on CPUs with vLLM's second model runner, whose kernels Triton interprets.

vLLM returns routed experts and sampling masks only with this runner. It requires Triton's backend
for CPUs, which Triton's wheel lacks; Triton's interpreter needs no backend. A step takes 0.1 s.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

import triton.backends

# All that vLLM reads of a backend (vllm/triton_utils/importing.py).
_backend: Any = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
triton.backends.backends.clear()
triton.backends.backends["cpu"] = _backend

from workers.__main__ import run  # noqa: E402

# vLLM spawns its engine process, which imports this module a second time.
if __name__ == "__main__":
    sys.argv += ["--worker-extension-cls", "tests.kit.extensions.interpreted_extension.Extension"]
    run()
