"""The trainer: two random models of one shape, and the check of what a server samples."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.weights.adapter import NAME, Adapter
from harness.servers import Server

PROMPT = list(range(50, 82))
NUM_TOKENS = 16
NUM_PROMPTS = 8
# Ids and log-probabilities for each prompt.
Answers = list[tuple[list[int], list[float]]]


class Trainer:
    """Two sets of weights on the trainer's device, sent in turn."""

    def __init__(self, folder: str, device: torch.device, dtype: str, tolerance: float):
        """
        Args:
            tolerance: of a log-probability between the server and transformers. The two models
                differ by several times 0.5.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        self.device = device
        if device.type == "cuda":
            # vLLM's trainer sends from the current device.
            torch.cuda.set_device(device)
        self._tolerance = tolerance
        # Loaded at the server, and checked with the models.
        self.adapter: Adapter | None = None
        # The greatest difference that was accepted.
        self.largest_difference = 0.0
        self.models: list[Any] = []
        self.last_sent: Any = None
        for seed in (1, 2):
            torch.manual_seed(seed)
            with device:
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype)
                )
            # Which of the two it is.
            model.number = len(self.models)
            self.models.append(model.eval())

    @torch.inference_mode()
    def check(self, server: Server, model: Any) -> list[int]:
        """Compares the server's log-probabilities of its greedy ids with the model's.

        Returns:
            The greedy ids of one prompt in a request of its own. In a batch bfloat16 can give
            others.
        """
        self._compare(server, model)
        if self.adapter:
            self._check_adapter(server, model, self.adapter)
        # Another prompt: the cache has keys and values of `PROMPT` that a batch has computed.
        ((alone, _),) = greedy(server, [PROMPT[::-1]])
        return alone

    def _check_adapter(self, server: Server, model: Any, adapter: Adapter) -> None:
        """Compares the adapter's greedy ids with the model's in which it is merged."""
        with adapter.merged(model):
            merged = self._compare(server, model, NAME)
        alone = [self._logprobs(model, ids) for ids, _ in merged]
        changes = [
            abs(a - b) for (_, with_adapter), row in zip(merged, alone, strict=True)
            for a, b in zip(with_adapter, row, strict=True)
        ]  # fmt: skip
        assert max(changes) > self._tolerance, "the adapter changes nothing"

    def _compare(self, server: Server, model: Any, name: str = "") -> Answers:
        """Compares `name`'s greedy log-probabilities, by default the base model's, with `model`'s."""
        # The same prompts after each update: the prefix cache has known them from the second on.
        answers = greedy(server, [PROMPT] * NUM_PROMPTS, name)
        for ids, logprobs in answers:
            expected = self._logprobs(model, ids)
            difference = max(abs(a - b) for a, b in zip(expected, logprobs, strict=True))
            assert difference < self._tolerance, (ids, expected, logprobs)
            self.largest_difference = max(self.largest_difference, difference)
        return answers

    def _logprobs(self, model: Any, ids: list[int]) -> list[float]:
        """The log-probabilities of `ids` after `PROMPT`."""
        input_ids = torch.tensor([PROMPT + ids], device=self.device)
        rows = torch.log_softmax(model(input_ids).logits[0, len(PROMPT) - 1 : -1].float(), dim=-1)
        chosen: list[float] = rows.gather(1, input_ids[0, len(PROMPT) :, None])[:, 0].tolist()
        return chosen

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def peak_bytes(self) -> Iterator[list[int]]:
        """Yields a list that has, at the end, the bytes that the block took on the device."""
        peak = list[int]()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        yield peak
        if self.device.type == "cuda":
            peak.append(torch.cuda.max_memory_allocated(self.device) - before)


def greedy(server: Server, prompts: list[list[int]], model: str = "") -> Answers:
    """Greedy ids of each prompt and their log-probabilities, by the route that both servers have.

    Args:
        model: the name of an adapter; empty: the base model.
    """
    answer = server.post(
        "/v1/completions",
        {
            "model": model or server.get("/v1/models").json()["data"][0]["id"], "prompt": prompts,
            "temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0,
            "return_token_ids": True,
        },
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return [
        (one["token_ids"], one["logprobs"]["token_logprobs"]) for one in answer.json()["choices"]
    ]


def checkpoint_tensors(parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Parameters as checkpoints of mixtures of experts have them: a tensor for each expert.

    transformers' fused `gate_up_proj` has shape (experts, 2 × intermediate, hidden), `down_proj`
    (experts, hidden, intermediate). vLLM's own server takes the checkpoint's form.
    """
    for name, parameter in parameters.items():
        head, _, last = name.rpartition(".experts.")
        if not head:
            yield name, parameter
            continue
        for number, expert in enumerate(parameter.detach()):
            parts = {last: expert}
            if last == "gate_up_proj":
                gate, up = expert.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, tensor in parts.items():
                yield f"{head}.experts.{number}.{part}.weight", tensor


def num_bytes_of(folder: str, dtype: str) -> int:
    """Bytes of the parameters of one model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype)
        )
    return sum(one.nbytes for one in model.parameters())
