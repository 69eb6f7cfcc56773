"""The servers under test, each with the calls of one weight update."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from benchmarks.processes import engine_environment, running
from benchmarks.targets import Engine, VllmServe
from benchmarks.weights.trainer import Trainer, checkpoint_tensors
from harness.servers import Server, free_port, running_server
from titopool.client.weights_client import WeightsClient


class Updater(Protocol):
    """A trainer's connection to one server."""

    # In the table.
    name: str
    server: Server

    def update(self, model: Any, policy: str) -> dict[str, Any]:
        """Sends all parameters; returns when the new weights serve, with further figures."""

    def close(self) -> None:
        """Leaves the group."""


class Titopool:
    """titopool with its own client."""

    name = "titopool"

    def __init__(self, server: Server, trainer: Trainer):
        self.server = server
        self._client = WeightsClient(server.url, device=trainer.device, timeout_s=120)
        self._client.open()

    def update(self, model: Any, policy: str) -> dict[str, Any]:
        answer = self._client.update(model, policy=policy)
        parts = {key: answer[key] for key in ("prepare_s", "apply_s", "paused_s")}
        return {"staging": answer["staging"], **parts}

    def close(self) -> None:
        self._client.close()


class Vllm:
    """vLLM's own server with vLLM's own trainer, in vLLM's chunks."""

    name = "vllm serve"

    def __init__(self, server: Server, trainer: Trainer):
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        self.server = server
        self._source = source_of(trainer.models[0])
        world_size = server.get("/get_world_size").json()["world_size"] + 1
        info = NCCLTrainerInitInfo(
            master_address="127.0.0.1", master_port=free_port(), world_size=world_size, rank=0
        )
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=HTTPVLLMWeightSyncClient(server.url), source=self._source
        )

    def _call(self, path: str) -> Any:
        answer = self.server.post(path, None)
        assert answer.status_code == 200, f"{path}: {answer.text}"
        return answer.json()

    def update(self, model: Any, policy: str) -> dict[str, Any]:
        self._source.model = model
        mode = {"drain": "wait"}.get(policy, policy)
        self._call(f"/pause?mode={mode}")
        paused = time.monotonic()
        # /start_weight_update, /update_weights beside the broadcast, /finish_weight_update.
        self._engine.send_weights()
        # Requests in flight hold blocks: without this option nothing is reset.
        reset = self._call("/reset_prefix_cache?reset_running_requests=true")
        assert reset == {"success": True}, reset
        self._call("/resume")
        return {"staging": "in place", "paused_s": time.monotonic() - paused}

    def close(self) -> None:
        self._engine.shutdown()


def source_of(model: Any) -> Any:
    """vLLM's view of a trainer's weights; its field `model` says which model is sent."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]
        def __init__(self) -> None:
            self.model = model

        @cached_property
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self.iter_full()]

        def iter_full(self) -> Iterator[tuple[str, Any]]:
            for name, one in checkpoint_tensors(dict(self.model.named_parameters())):
                yield name, one.detach()

    return Source()


TRL_SCRIPT = Path(__file__).with_name("trl_trainer.py")


class TrlTrainer:
    """A process with TRL's unchanged client and a model of its own on the trainer's device."""

    def __init__(self, server: Server, trainer: Trainer, package: Path, folder: str, dtype: str):
        self.name = f"TRL {package.name} on {server.log_file.stem}"
        self.server = server
        words = [server.url, folder, dtype, str(trainer.device.index), str(free_port())]
        self._log = server.log_file.with_name(f"{server.log_file.stem}-trl-{package.name}.log")
        path = os.pathsep.join((str(package), os.environ.get("PYTHONPATH", "")))
        self._process = subprocess.Popen(
            [sys.executable, str(TRL_SCRIPT), *words],
            env={**os.environ, "PYTHONPATH": path}, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._log.open("w"),
        )  # fmt: skip
        self._read()

    def update(self, model: Any, policy: str) -> dict[str, Any]:
        """`update_model_params` and `reset_prefix_cache`, timed in the process; `model`'s weights."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{model.number}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"{self.name} ended; see {self._log}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextmanager
def titopool_server(folder: str, words: Sequence[str], log: Path, gpus: str) -> Iterator[Server]:
    """titopool with dummy weights on the GPUs `gpus`."""
    visible = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    num_workers = int(words[words.index("--num-workers") + 1])
    with running_server(folder, *words, log=log, num_workers=num_workers, **visible) as server:
        yield server


@contextmanager
def vllm_server(
    folder: str, options: dict[str, Any], log: Path, gpus: str, num_engines: int
) -> Iterator[Server]:
    """vLLM's own server with dummy weights on the GPUs `gpus`."""
    environ = engine_environment(on_cpu=False) | {
        "CUDA_VISIBLE_DEVICES": gpus, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }  # fmt: skip
    transfer = {"weight_transfer_config": '{"backend": "nccl"}'}
    with running(
        VllmServe(num_engines=num_engines), Engine(folder, options | transfer), environ, log
    ) as found:
        yield Server(found.process, found.url, log, num_engines, is_peer=True)  # type: ignore[arg-type]


def kv_tokens(server: Server) -> int:
    """Tokens that fit into the KV caches of all workers."""
    # titopool writes vLLM's log to files that it names, one for each worker.
    named = re.search(r"vLLM's log goes to (.+);", server.log)
    log = Path(named[1].partition(", ")[0]).read_text() if named else server.log
    found = re.search(r"KV cache size: ([\d,]+) tokens", log)
    assert found, "expected the size of the KV cache in vLLM's log"
    return int(found[1].replace(",", "")) * server.num_workers
