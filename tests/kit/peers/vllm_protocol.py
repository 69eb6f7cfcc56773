"""The models of vLLM's own `/inference/v1/generate`, to read our answers with."""

import importlib
from typing import Any

from pydantic import TypeAdapter

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"


def vllm_protocol() -> Any:
    """The models of the installed vLLM for /inference/v1/generate."""
    try:
        return importlib.import_module("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    except ImportError:
        # Before vLLM 0.30.
        return importlib.import_module("vllm.entrypoints.serve.disagg.protocol")


def read_by_vllm(model: str, data: bytes) -> Any:
    """`data` as vLLM's own client would read it; raises ValidationError."""
    return TypeAdapter(getattr(vllm_protocol(), model)).validate_json(data)
