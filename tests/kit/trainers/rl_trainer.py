"""A trainer that calls vLLM's routes as TRL's client does, with gloo in NCCL's place on CPUs."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import requests
import torch

from harness.servers import Server
from tests.kit.trainers.stock_trainer import packed_chunks
from tests.kit.trainers.trainer import DEVICE
from titopool.client.weights.trainer_group import TrainerGroup

TIMEOUT_S = 30.0
# Name and values.
Tensors = Sequence[tuple[str, Any]]


class StockTrainer:
    """Rank 0 of a group with all ranks of a server."""

    def __init__(self, server: Server, **init_info: Any):
        """Forms the group; `init_info` are further fields of the call."""
        self.server = server
        # Bytes of a chunk; 0: each tensor has a broadcast of its own.
        self._chunk_bytes = init_info["packed_buffer_size_bytes"] if init_info.get("packed") else 0
        world_size = server.get("/get_world_size").json()["world_size"] + 1
        self.group = TrainerGroup(torch.device(DEVICE), world_size, timeout_s=TIMEOUT_S)
        info = {
            "master_address": "127.0.0.1", "master_port": self.group.port, "rank_offset": 1,
            "world_size": world_size, "backend": self.group.backend, **init_info,
        }  # fmt: skip
        call = InThread(server, "/init_weight_transfer_engine", {"init_info": info})
        self.group.form(should_stop=lambda: call.has_failed)
        assert call.answer().status_code == 200, call.answer().text

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        """The answer of a call that must succeed."""
        answer = self.server.post(path, body)
        assert answer.status_code == 200, f"{path}: {answer.text}"
        result: dict[str, Any] = answer.json()
        return result

    def send(self, tensors: Tensors, *, num_sent: int | None = None) -> requests.Response:
        """Announces tensors and broadcasts them as vLLM's trainer does, or only the first `num_sent`."""
        info = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(one.dtype).removeprefix("torch.") for _, one in tensors],
            "shapes": [list(one.shape) for _, one in tensors],
        }
        call = InThread(self.server, "/update_weights", {"update_info": info})
        sent = [(name, tensor.detach().contiguous()) for name, tensor in tensors[:num_sent]]
        chunks = (
            packed_chunks(sent, self._chunk_bytes) if self._chunk_bytes else dict(sent).values()
        )
        for chunk in chunks:
            self.group.broadcast(chunk, check_workers=lambda: None)()
        return call.answer()

    def update(self, *lists: Tensors, body: Any = None) -> dict[str, Any]:
        """A whole update, with a call for each list; the answer of its finish."""
        self.call("/start_weight_update", {})
        for tensors in lists:
            answer = self.send(tensors)
            assert answer.status_code == 200, answer.text
        return self.call("/finish_weight_update", body)


class InThread:
    """A POST that runs while the caller goes on."""

    def __init__(self, server: Server, path: str, body: Any, **options: Any):
        self._answers: list[requests.Response] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(server.post(path, body, **options)), daemon=True
        )
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        return bool(self._answers) and not self._answers[0].ok

    def answer(self) -> requests.Response:
        """The answer, for which it waits."""
        self._thread.join(120)
        (answer,) = self._answers
        return answer


@contextmanager
def stock_trainer(server: Server, **init_info: Any) -> Iterator[StockTrainer]:
    """A trainer whose group is gone at the end."""
    trainer = StockTrainer(server, **init_info)
    try:
        yield trainer
    finally:
        trainer.group.abort()
        server.post("/finish_weight_update", {})
        server.post("/shutdown_weight_transfer_engine", {})
