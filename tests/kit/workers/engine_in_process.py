"""A real vLLM engine with titopool's extension in this process, and a trainer that updates it.

A server takes 25 s of CPU time to start, mostly for imports. Here the engines of several models
follow each other in one process, which a test starts for them: vLLM changes its process.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from harness.servers import free_port, wait_until
from tests.kit.models.weights import NUM_TOKENS
from tests.kit.trainers import stock_trainer
from tests.kit.trainers.trainer import DEVICE
from titopool.client.weights.packing import messages_of
from titopool.client.weights.sources import Source
from titopool.client.weights.trainer_group import TrainerGroup
from titopool.settings.config import ServerConfig
from titopool.wire.weight_plan import Checksum
from workers.environment import default_engine_options, prepare_environment

Tensors = list[tuple[str, Any]]
# Longer than the window of the models that have a sliding one.
PROMPT = list(range(5, 45))
TIMEOUT_S = 60
CHUNK_BYTES = 2**20


class Refused(Exception):
    """The extension refused a call."""


class EngineInProcess:
    """vLLM's engine for one model."""

    def __init__(self, folder: str, **given: Any):
        """`given`: vLLM's engine options."""
        on_cpu = DEVICE == "cpu"
        prepare_environment(os.environ, on_cpu=on_cpu)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        options = default_engine_options(ServerConfig(), os.environ, on_cpu=on_cpu, seed=0)
        from vllm import LLM

        from workers.in_model.logprobs_patch import receive_lists

        receive_lists()
        options |= {
            "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4,
            "num_gpu_blocks_override": 64,
            # A worker empties the prefix cache after an update, and no worker runs here.
            "enable_prefix_caching": False,
        }  # fmt: skip
        self._llm = LLM(folder, **{**options, **given})

    def call(self, method: str, *args: Any) -> Any:
        """The result of a method of `Host`."""
        ((status, *result),) = self._llm.collective_rpc("titopool", args=(method, *args))
        if status != "ok":
            raise Refused(f"{status}: {result[0]}")
        return result[0]

    def memory(self) -> dict[str, Any]:
        """Copies of all parameters and buffers by name, and what layers compute with packed copies.

        Names that end in `()` are outputs of linear layers, whose weights vLLM packs on a CPU.
        """
        found: dict[str, Any] = {}
        for path, module in self._model.named_modules():
            for name, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is not None and tensor.numel():
                    found[f"{path}.{name}"] = tensor.clone()
            # vLLM keeps the weights of convolutions in linear layers, which do not multiply.
            is_linear = isinstance(getattr(module, "input_size_per_partition", None), int)
            if is_linear and module.weight.dim() == 2:
                size, weight = module.input_size_per_partition, next(self._model.parameters())
                probe = torch.linspace(-1, 1, size, dtype=weight.dtype, device=weight.device)
                found[f"{path}()"] = module.quant_method.apply(module, probe[None])
        return found

    def digests(self) -> dict[str, str]:
        """Checksums of all tensors that the model holds, also of those that vLLM derives."""
        from workers.in_model.load.copies import digests

        return digests(self._model, lambda path: True)

    @property
    def _model(self) -> Any:
        return self._llm.collective_rpc(lambda worker: worker.get_model())[0]

    def greedy(self) -> tuple[list[int], list[float]]:
        """The ids that follow `PROMPT`, and their log-probabilities."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True,
            flat_logprobs=True, detokenize=False,
        )  # fmt: skip
        (answer,) = self._llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        (output,) = answer.outputs
        # Arrays, or lists before vLLM is patched.
        assert list(output.logprobs.token_ids) == list(output.token_ids)
        return list(output.logprobs.token_ids), list(output.logprobs.logprobs)

    def update(self, tensors: Tensors, *, is_stock: bool, partial: bool = False) -> dict[str, Any]:
        """Sends `tensors` and applies them.

        Args:
            is_stock: vLLM's trainer forms the group and packs, else our client's parts do.

        Returns:
            The reports of *begin* and *apply*.

        Raises:
            Refused: the extension refused them; the model is unchanged.
        """
        with _stock_trainer(self) if is_stock else _own_trainer(self) as send:
            infos = msgspec.msgpack.encode(Source(tensors).infos)
            # Both ways in which generation goes on meanwhile.
            staging = "host" if is_stock else "auto"
            report: dict[str, Any] = self.call(
                "begin", infos, partial, CHUNK_BYTES, staging, "", "clear"
            )
            self.call("receive")
            send(tensors)
            wait_until(self._has_received, TIMEOUT_S, lambda: str(self.call("status")))
            digest = Checksum()
            for _, tensor in tensors:
                digest.add(tensor)
            assert self.call("checksum") == digest.digest()
            return report | self.call("apply")

    def update_from_folder(self, folder: str) -> dict[str, Any]:
        """Loads the checkpoint in `folder`; returns the reports of the check and of *apply*."""
        report: dict[str, Any] = self.call("check_folder", folder)
        return report | self.call("apply")

    def _has_received(self) -> bool:
        status = self.call("status")
        assert not status["error"], status
        return bool(status["num_received"] == status["num_announced"])

    def join(self, port: int) -> None:
        """Joins the group of the trainer that listens at `port`, in a thread."""
        args = {
            "protocol": "vllm", "backend": "auto", "host": "127.0.0.1", "port": port, "rank": 1,
            "world_size": 2, "timeout_s": TIMEOUT_S,
        }  # fmt: skip
        self.call("join", args)


Send = Callable[[Tensors], None]


@contextmanager
def _own_trainer(engine: EngineInProcess) -> Iterator[Send]:
    device = torch.device(DEVICE)
    group = TrainerGroup(device, 2, timeout_s=TIMEOUT_S)

    def send(tensors: Tensors) -> None:
        for message in messages_of(Source(tensors), CHUNK_BYTES, device, None):
            group.broadcast(message, check_workers=lambda: None)()

    engine.join(group.port)
    group.form(should_stop=lambda: False)
    try:
        yield send
    finally:
        engine.call("drop", True)
        group.abort()


@contextmanager
def _stock_trainer(engine: EngineInProcess) -> Iterator[Send]:
    port = free_port()
    engine.join(port)
    communicator = stock_trainer.communicator(port, 2, DEVICE)
    try:
        yield lambda tensors: stock_trainer.send(
            communicator, ((name, one.to(DEVICE)) for name, one in tensors), CHUNK_BYTES
        )
    finally:
        engine.call("drop", True)


@contextmanager
def engine_in_process(folder: str, **options: Any) -> Iterator[EngineInProcess]:
    """The engine of the model in `folder`, which is gone afterwards; `options`: vLLM's."""
    engine = EngineInProcess(folder, **options)
    try:
        yield engine
    finally:
        from vllm.distributed import cleanup_dist_env_and_memory

        del engine._llm
        cleanup_dist_env_and_memory()
