"""A worker whose engine is a stub: real process, real sockets, staged faults.

    python -m harness.stub_worker --endpoint ipc://… [--delay-s 0.1]

The completion of a prompt is the prompt's ids in reverse, `max_tokens` at most, streamed or whole.
The first id of a prompt can stage a fault (see `Fault`).
"""

import argparse
import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from titopool.errors import GenerationFailed, InvalidRequest, WeightUpdateFailed
from titopool.settings.logs import configure_logging
from titopool.settings.sampling import SamplingOptions, decode_options
from titopool.settings.sources import from_environment
from titopool.wire.messages import (
    ID_BYTES,
    Chunk,
    Completion,
    ImageFacts,
    Job,
    JobProgress,
    Logprobs,
    MetricFamily,
    RoutedExperts,
    WorkerFacts,
)
from titopool.wire.pool_state import PauseMode
from workers.engine.base import EngineDead, Generated, OnChunk, ReportPhase, Slots, in_slots
from workers.engine.lora import Adapter, Adapters
from workers.engine.versions import Progress, Versions
from workers.process import write_stacks_on_signal
from workers.serving.server import WorkerServer
from workers.supervisor.phase_pipe import PhaseReporter
from workers.weights import checks

VOCAB_SIZE = 50_000
NUM_METRICS = 36
# Experts of a token in a layer, with --layers-with-experts.
NUM_CHOSEN = 8
# The token that stands for an image, with --max-images.
IMAGE_PLACEHOLDER = 40_100
# Make the event loop of a stub worker stand: it, or all threads.
BLOCK_SIGNAL, HOLD_SIGNAL = signal.SIGUSR2, signal.SIGRTMIN
# Tests name ports without a trainer.
checks.LISTEN_TIMEOUT_S = 0.1


class Fault(IntEnum):
    """Faults that a prompt stages if it starts with this id."""

    FAIL = 40_001  # only this job fails
    RAISE = 40_002  # the engine raises an unexpected error
    DIE = 40_003  # the engine reports that it is dead
    KILL = 40_004  # the process is killed
    HANG = 40_005  # the job never ends
    DIE_MID_STREAM = 40_006  # anywhere in a streamed prompt: the engine dies before sending it
    UNSCORED = 40_008  # the job has no log-probabilities of its prompt
    PANIC = 40_009  # what the engine raises is no `Exception`
    FREEZE = 40_007  # the engine's step never ends: no job goes on, and no probe is answered
    BLOCK = 40_010  # the event loop stands, in `stand_still`
    STAND = 40_011  # it stands for a second


class Panic(BaseException):
    """As pyo3's PanicException, which libraries raise where their code in Rust fails."""


def stand_still(*_: object) -> None:
    while True:
        time.sleep(3600)


def hold_python(*_: object) -> None:
    """As an extension that never returns, and never releases Python's lock."""
    while True:
        ctypes.PyDLL(None).sleep(3600)


class StubWeights:
    """Implements `workers.engine.weights.WeightEngine`: all calls succeed but for staged faults."""

    can_keep = True

    def __init__(self, *, is_bad: bool, dies_at: str, slow: dict[str, float], staging: str):
        """`slow`: delays in seconds, by the name of a method."""
        self._staging = staging
        self._is_bad = is_bad
        self._dies_at = dies_at
        self._slow = slow
        # With tensors (`harness/stub_tensors.py`).
        self.rank: Any = None
        # Of completions in flight: set when the job is aborted.
        self.open: dict[asyncio.Event, Job] = {}
        # The engine's.
        self.versions = Versions()
        # Set while generation is not paused.
        self.runs = asyncio.Event()
        self.runs.set()

    async def call(self, method: str, *args: Any) -> list[Any]:
        await asyncio.sleep(self._slow.get(method, 0))
        if method in ("offer", "compare", "fetch"):
            if self.rank is None:
                raise InvalidRequest("a stub has no tensors")
            return await asyncio.to_thread(self.rank.call, method, *args)
        if method == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if method == "apply" and self.rank is not None:
            await asyncio.to_thread(self.rank.change)
        if method == ("load" if self._staging == "in_place" else "apply") and self._is_bad:
            raise WeightUpdateFailed("staged failure")
        fit = {
            "missing": [], "ignored": [], "kept": [], "split_layers": "", "staging": self._staging,
        }  # fmt: skip
        status = {
            "is_joined": True, "error": "", "num_announced": 1, "num_received": 1, "awaited": None,
        }  # fmt: skip
        answers = {
            "begin": fit, "check": fit, "check_folder": fit, "status": status, "device": "",
            "apply": {"loaded": 1}, "checksum": "0" * 16, "take": {"staging": self._staging},
            "digests": {"dp0:pp0:pcp0:tp0:w": "0" * 64},
        }  # fmt: skip
        if method == "digests" and self.rank is not None:
            return [self.rank.digests()]
        return [answers.get(method)]

    async def pause(self, policy: PauseMode) -> None:
        self.runs.clear()

    async def resume(self) -> None:
        self.runs.set()

    async def clear_caches(self) -> None:
        await asyncio.sleep(self._slow.get("clear_caches", 0))

    async def keep_keys(self) -> None:
        pass

    async def progress(self) -> Progress:
        return {}

    async def abort_requests(self, request_ids: Collection[str] | None) -> int:
        for event, job in self.open.items():
            if request_ids is None or job.is_named_in(request_ids):
                event.set()
        return self.versions.stop_jobs(request_ids)

    def count_tokens(self, request_ids: Collection[str]) -> dict[str, int]:
        """Each job in flight has a token."""
        names = (job.client_id for job in self.open.values())
        return {name: 1 for name in names if name in request_ids}

    async def run_until_aborted(self, job: Job, work: Awaitable[None]) -> bool:
        """Returns whether the job was aborted before the end of `work`."""
        aborted, task = asyncio.Event(), asyncio.ensure_future(work)
        self.open[aborted] = job
        waiting = asyncio.create_task(aborted.wait())
        try:
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
            return aborted.is_set()
        finally:
            del self.open[aborted]
            for one in (task, waiting):
                one.cancel()


def stub_adapters() -> Adapters:
    """The real `Adapters`, over an engine that accepts every adapter."""

    async def succeed(*_: Any) -> None:
        return None

    # Importing vLLM's LoRARequest would take seconds.
    Adapter.request = lambda self: self  # type: ignore[method-assign]
    lora = SimpleNamespace(max_loras=2, max_cpu_loras=8, max_lora_rank=16)
    return Adapters(
        SimpleNamespace(
            vllm_config=SimpleNamespace(lora_config=lora), add_lora=succeed, remove_lora=succeed
        )
    )


def logprobs_of(ids: Sequence[int], options: SamplingOptions) -> Logprobs | None:
    """-1.5 for each id, and -2 for as many others as are asked for."""
    if options.logprobs is None and options.logprob_token_ids is None:
        return None
    others = options.logprob_token_ids or range(options.logprobs or 0)
    rows = [[one, *(other for other in others if other != one)] for one in ids]
    values = [-1.5 if index == 0 else -2.0 for row in rows for index in range(len(row))]
    if not others:
        return Logprobs(np.float32(values).tobytes())
    flat = np.int32([one for row in rows for one in row])
    counts = np.int32([len(row) for row in rows])
    return Logprobs(np.float32(values).tobytes(), flat.tobytes(), counts.tobytes())


def prompt_logprobs_of(ids: np.ndarray, options: SamplingOptions) -> Logprobs | None:
    """-1.5 for each id but the first, and for the first ids of the vocabulary."""
    if options.prompt_logprobs is None or ids[0] == Fault.UNSCORED:
        return None
    rows = [[one, *range(options.prompt_logprobs)] for one in ids[1:].tolist()]
    flat = np.int32(rows).ravel()
    values = np.full(len(flat), -1.5, np.float32)
    return Logprobs(values.tobytes(), flat.tobytes(), ranks=np.ones_like(flat).tobytes())


def text_of(ids: Iterable[int]) -> str:
    """The ids in decimals: texts of other ids are others, and texts of their pieces add up."""
    return "".join(f"{one} " for one in ids)


class StubEngine:
    """Implements `workers.engine.base.Engine`."""

    has_died = False
    has_decode_graphs = False

    def __init__(
        self,
        *,
        delay_s: float,
        in_slots: bool,
        load_s: float,
        warm_s: float,
        load_until: Path | None,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        model: str,
        tokenizer: str,
        weights: StubWeights,
        runs_file: Path | None = None,
        max_images: int = 0,
        num_layers: int = 0,
        has_texts: bool = False,
    ):
        self.versions = weights.versions
        self.adapters = stub_adapters()
        self.weights = weights
        self._model, self._vocab_size = model, vocab_size
        self._tokenizer = tokenizer
        self._delay_s = delay_s
        # As vLLM's: a sequence has a slot, first come, first served, and a token takes a step.
        self._slots = asyncio.Semaphore(max_num_seqs) if in_slots else None
        self._load_s, self._warm_s = load_s, warm_s
        self._load_until = load_until
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._is_frozen = False
        self._runs_file = runs_file
        self._tokenizer = tokenizer
        self._num_layers, self._has_texts = num_layers, has_texts
        self._images = ImageFacts(max_images, [IMAGE_PLACEHOLDER], True) if max_images else None

    def load(self, report: ReportPhase) -> WorkerFacts:
        report("importing")
        report("loading")
        time.sleep(self._load_s)
        while self._load_until is not None and not self._load_until.exists():
            time.sleep(0.02)
        return WorkerFacts(
            model=self._model,
            tokenizer=self._tokenizer,
            tokenizer_revision=None,
            trust_remote_code=False,
            vllm_version="0.0-stub",
            sampling_fields=list(SamplingOptions.__struct_fields__),
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            max_num_seqs=self._max_num_seqs,
            max_logprobs=20,
            world_size=1,
            num_cache_tokens=100_000,
            max_loras=self.adapters.limit,
            dtype="torch.float32",
            logprobs_mode="processed_logprobs",
            weight_backend="gloo",
            max_lora_rank=16,
            images=self._images,
            routed_expert_bytes=self._num_layers * NUM_CHOSEN,
        )

    async def warm_up(self) -> None:
        time.sleep(self._warm_s)

    async def run(self, job: Job, on_chunk: OnChunk, slots: Slots) -> Generated:
        with self.versions.job(job, slots.stop):
            if self._slots is not None:
                return await self._run_in_slots(job, on_chunk, slots)
            if not job.adapter:
                return await self._run(job, on_chunk)
            with self.adapters.use(job.adapter) as adapter:
                generated = await self._run(job, on_chunk)
            return generated._replace(adapter_version=adapter.version)

    async def _run_in_slots(self, job: Job, on_chunk: OnChunk, slots: Slots) -> Generated:
        """Each completion by itself, as the engine runs them."""

        async def complete(index: int) -> Generated:
            began = time.monotonic()
            assert self._slots is not None
            async with self._slots:
                generated = await self._run(job, on_chunk)
            num_steps = len(generated.completions[0].token_ids) // ID_BYTES
            slots.give_back(num_steps, time.monotonic() - began)
            return generated

        ended = await in_slots(job.num_sequences, complete, slots)
        completions = [one.completions[0] for one in ended]
        # Those that an abort kept from starting.
        completions += [self._aborted()] * (job.num_sequences - len(completions))
        return ended[0]._replace(completions=completions)

    async def _run(self, job: Job, on_chunk: OnChunk) -> Generated:
        ids = np.frombuffer(job.prompt_token_ids, dtype=np.int32)
        if self._runs_file is not None:
            with self._runs_file.open("a") as file:
                print(*ids[:1], file=file)
        await self._stage_fault(int(ids[0]))
        on_chunk(JobProgress(job.job_id, job.attempt, has_token=True))
        options = decode_options(job.sampling)
        num_steps = min(len(ids), options.max_tokens or len(ids)) if self._slots else 1
        delay_s = self._delay_s * (1 if job.is_streamed else num_steps)
        if await self.weights.run_until_aborted(job, self._wait(delay_s)):
            return Generated([self._aborted()] * options.n)
        if job.is_streamed:
            await self._stream(job, ids[::-1][: options.max_tokens], on_chunk, options)
        answer = np.ascontiguousarray(ids[::-1][: options.max_tokens])
        versions = [(self.versions.current, 0)]
        completion = Completion(
            answer.tobytes(), "length", logprobs_of(answer, options), versions,
            routed_experts=None if job.is_streamed else self._experts(len(ids) + len(answer), options),
            text=text_of(answer) if self._has_texts else "",
        )  # fmt: skip
        scores = prompt_logprobs_of(ids, options)
        return Generated([completion] * options.n, prompt_logprobs=scores)

    def _experts(self, num_tokens: int, options: SamplingOptions) -> RoutedExperts | None:
        """The first expert everywhere; None without layers that have any."""
        start = options.routed_experts_prompt_start
        if start is None or not self._num_layers:
            return None
        shape = (num_tokens - 1 - start, self._num_layers, NUM_CHOSEN)
        return RoutedExperts(bytes(shape[0] * shape[1] * shape[2]), shape, "uint8", start)

    def _aborted(self) -> Completion:
        return Completion(b"", "abort", None, [(self.versions.current, 0)])

    async def _wait(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self.weights.runs.wait()
        await self._wait_while_frozen()

    async def _wait_while_frozen(self) -> None:
        while self._is_frozen:
            await asyncio.sleep(1)

    async def _stream(
        self, job: Job, ids: np.ndarray, on_chunk: OnChunk, options: SamplingOptions
    ) -> None:
        """Sends one id every `delay_s` seconds."""
        for index, token_id in enumerate(ids.tolist()):
            if token_id == Fault.DIE_MID_STREAM:
                raise EngineDead("staged death")
            end = "length" if index == len(ids) - 1 else ""
            text = text_of([token_id])
            logprobs = logprobs_of([token_id], options)
            token = np.int32(token_id).tobytes()
            completion = Completion(
                token, end, logprobs, [(0, 0)], text=text,
                routed_experts=self._experts(2 * len(ids), options) if end else None,
            )  # fmt: skip
            on_chunk(Chunk(job.job_id, job.attempt, [(0, completion)]))
            await asyncio.sleep(self._delay_s)

    async def _stage_fault(self, first_id: int) -> None:
        match first_id:
            case Fault.FAIL:
                raise GenerationFailed("staged failure")
            case Fault.RAISE:
                raise RuntimeError("staged surprise")
            case Fault.PANIC:
                raise Panic("staged panic")
            case Fault.DIE:
                raise EngineDead("staged death")
            case Fault.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.HANG:
                await asyncio.sleep(3600)
            case Fault.FREEZE:
                self._is_frozen = True
            case Fault.BLOCK:
                stand_still()
            case Fault.STAND:
                time.sleep(1)
        await self._wait_while_frozen()

    async def probe(self) -> None:
        await self._wait_while_frozen()

    def metrics(self, worker_id: str) -> Iterable[MetricFamily | None]:
        """As many samples as vLLM 0.32 has for a text model, 21 for each metric."""
        for index in range(NUM_METRICS):
            name = f"vllm:stub_{index}_seconds"
            head = f"# HELP {name} A metric.\n# TYPE {name} histogram\n"
            samples = (
                f'{name}_bucket{{engine="0",le="{le}.0",model_name="stub",worker="{worker_id}"}} 1.0\n'
                for le in range(21)
            )
            yield MetricFamily(name, head.encode(), "".join(samples).encode())

    def close(self) -> None:
        return None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--endpoint", required=True)
    made.add_argument("--worker-id", default="stub")
    # Of a supervisor.
    made.add_argument("--status-fd", type=int)
    made.add_argument("--parent-pid", type=int)
    made.add_argument("--ready-file")
    made.add_argument("--delay-s", type=float, default=0.0)
    made.add_argument("--max-num-seqs", type=int, default=256)
    made.add_argument(
        "--in-slots", action="store_true", help="max_num_seqs at once, steps of delay_s"
    )
    made.add_argument("--bad-weights", action="store_true")
    made.add_argument("--staging", default="beside")
    made.add_argument("--die-at", default="", help="a method of weight updates, e.g. apply")
    made.add_argument("--slow", default=[], action="append", help="METHOD=SECONDS")
    made.add_argument("--tensors", type=int, default=0, help="MiB that other workers may fetch")
    made.add_argument("--gate", type=Path, help="see harness/stub_tensors.py")
    made.add_argument("--model", default="stub")
    made.add_argument("--tokenizer", default="none", help="a folder; by default no text is read")
    made.add_argument("--max-images", type=int, default=0, help="of a prompt")
    made.add_argument("--layers-with-experts", type=int, default=0)
    made.add_argument("--texts", action="store_true", help="also of answers that are not streamed")
    made.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    made.add_argument("--load-s", type=float, default=0.0)
    made.add_argument("--warm-s", type=float, default=0.0, help="the loop stands in the warm-up")
    made.add_argument("--load-until", type=Path, help="loads until this file exists")
    made.add_argument("--max-model-len", type=int, default=4096)
    made.add_argument("--runs-file", type=Path, help="gets the first id of each job that begins")
    return made


def engine_of(arguments: argparse.Namespace) -> StubEngine:
    engine = StubEngine(
        delay_s=arguments.delay_s,
        in_slots=arguments.in_slots,
        load_s=arguments.load_s,
        warm_s=arguments.warm_s,
        load_until=arguments.load_until,
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.max_model_len,
        vocab_size=arguments.vocab_size,
        model=arguments.model,
        tokenizer=arguments.tokenizer,
        runs_file=arguments.runs_file,
        max_images=arguments.max_images,
        num_layers=arguments.layers_with_experts,
        has_texts=arguments.texts,
        weights=StubWeights(
            is_bad=arguments.bad_weights,
            dies_at=arguments.die_at,
            staging=arguments.staging,
            slow={name: float(one) for name, one in (word.split("=") for word in arguments.slow)},
        ),
    )
    if arguments.tensors:
        # Importing torch takes seconds.
        from harness.stub_tensors import StubRank

        engine.weights.rank = StubRank(arguments.tensors, arguments.gate)
    return engine


async def serve(
    arguments: argparse.Namespace,
    prepare: Callable[[WorkerServer, StubEngine], None] = lambda server, engine: None,
) -> int:
    """Serves until SIGTERM, which drains, or SIGINT; `prepare` may change the server first. Returns the exit code."""
    config = from_environment()
    report = PhaseReporter(arguments.worker_id, arguments.status_fd, arguments.ready_file)
    configure_logging(
        config.log_level, report.log_handler(),
        log_format=config.log_format, worker=arguments.worker_id,
    )  # fmt: skip
    write_stacks_on_signal()
    signal.signal(BLOCK_SIGNAL, stand_still)
    signal.signal(HOLD_SIGNAL, hold_python)
    engine = engine_of(arguments)
    server = WorkerServer(
        engine,
        endpoint=arguments.endpoint,
        worker_id=arguments.worker_id,
        config=config,
        report=report,
        report_load=report.load,
        report_endpoint=report.endpoint,
        report_alive=report.alive,
        parent_pid=arguments.parent_pid,
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.drain)
    loop.add_signal_handler(signal.SIGINT, server.stop)
    prepare(server, engine)
    reason = await server.run()
    if reason:
        print(reason, file=sys.stderr)
    return server.exit_code if reason else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(parser().parse_args())))
