"""Tensors for a stub worker, given to and taken from other workers by the code of vLLM's processes."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from titopool.errors import InvalidRequest, WeightUpdateFailed
from workers.in_model.host import answer_of
from workers.in_model.peers.exchange import Exchange
from workers.in_model.peers.model_bytes import ModelBytes
from workers.in_model.served_model import ServedModel

MIB = 2**20


class StubModel(ServedModel):
    """A module without vLLM."""

    def __init__(self, module: Any):
        config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=False))
        super().__init__(
            SimpleNamespace(
                device=torch.device("cpu"), rank=0, model_config=None, vllm_config=config,
                model_runner=None, get_model=lambda: module,
            )
        )  # fmt: skip

    def loading(self) -> Any:
        return torch.no_grad()


class StubRank:
    """A model of `num_mib` MiB in place of vLLM's process."""

    def __init__(self, num_mib: int, gate: Path | None):
        """With `gate`, the second half of the bytes is read once that file exists.

        The file `<gate>.reached` says that a reader has come so far.
        """
        torch.manual_seed(0)
        self._module: Any = torch.nn.Module()
        self._module.low = torch.nn.Parameter(torch.randn(num_mib, MIB // 8))
        self._module.register_buffer("high", torch.zeros(MIB // 8, num_mib).T)
        self._exchange = Exchange(StubModel(self._module))
        if gate is not None:
            self._read = ModelBytes.read
            ModelBytes.read = lambda *args: self._read_through(gate, *args)  # type: ignore

    def change(self) -> None:
        """As an update does."""
        self._exchange.end_offer()
        with torch.no_grad():
            self._module.low += 1
            self._module.high += torch.arange(self._module.high.shape[1])

    def digests(self) -> dict[str, str]:
        """A digest of all tensors, for `/weights_checker`."""
        return {"dp0:pp0:pcp0:tp0:w": "".join(ModelBytes(self._module).digests()).zfill(64)}

    def call(self, method: str, *args: Any) -> list[Any]:
        """As `VllmWeights.call`, of a method of `Exchange`."""
        status, value = answer_of(method, lambda: getattr(self._exchange, method)(*args))
        if status == "refused":
            raise InvalidRequest(value)
        if status != "ok":
            raise WeightUpdateFailed(value)
        return [value]

    def _read_through(self, gate: Path, content: ModelBytes, begin: int, into: Any) -> None:
        if begin >= content.plan.num_bytes // 2:
            Path(f"{gate}.reached").touch()
            while not gate.exists():
                time.sleep(0.02)
        self._read(content, begin, into)
