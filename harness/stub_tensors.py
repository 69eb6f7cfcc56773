"""Tensors for a stub worker, given to and taken from other workers by the code of vLLM's processes."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from titopool.errors import InvalidRequest, WeightUpdateFailed
from workers.in_model.peers.model_bytes import ModelBytes
from workers.in_model.weight_extension import WeightExtension

MIB = 2**20


class StubRank(WeightExtension):
    """A model of `num_mib` MiB in place of vLLM's process."""

    device = torch.device("cpu")
    rank = 0
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=False))
    model_runner = SimpleNamespace()

    def __init__(self, num_mib: int, gate: Path | None):
        """With `gate`, the second half of the bytes is read once that file exists.

        The file `<gate>.reached` says that a reader has come so far.
        """
        torch.manual_seed(0)
        self._model = torch.nn.Module()
        self._model.low = torch.nn.Parameter(torch.randn(num_mib, MIB // 8))
        self._model.register_buffer("high", torch.zeros(MIB // 8, num_mib).T)
        if gate is not None:
            self._read = ModelBytes.read
            ModelBytes.read = lambda *args: self._read_through(gate, *args)  # type: ignore

    def get_model(self) -> Any:
        return self._model

    def change(self) -> None:
        """As an update does."""
        self._titopool_end_offer()
        with torch.no_grad():
            self._model.low += 1
            self._model.high += torch.arange(self._model.high.shape[1])

    def digests(self) -> dict[str, str]:
        """A digest of all tensors, for `/weights_checker`."""
        return {"dp0:pp0:pcp0:tp0:w": "".join(ModelBytes(self._model).digests()).zfill(64)}

    def call(self, method: str, *args: Any) -> list[Any]:
        """As `VllmWeights.call`."""
        status, value = getattr(self, f"titopool_weights_{method}")(*args)
        if status == "refused":
            raise InvalidRequest(value)
        if status != "ok":
            raise WeightUpdateFailed(value)
        return [value]

    def _titopool_in_model(self) -> Any:
        return torch.no_grad()

    def _read_through(self, gate: Path, content: ModelBytes, begin: int, into: Any) -> None:
        if begin >= content.plan.num_bytes // 2:
            Path(f"{gate}.reached").touch()
            while not gate.exists():
                time.sleep(0.02)
        self._read(content, begin, into)
