"""A worker whose engine is a stub: real process, real sockets, staged faults.

    python -m tests.stub_worker --endpoint ipc://… [--delay-s 0.1]

It answers a prompt with the prompt's ids, reversed, `max_tokens` at most, streamed or whole. The first id of a
prompt stages a fault (see `Fault`).
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

from titopool.commands import Policy
from titopool.config import from_environment
from titopool.errors import GenerationFailed, WeightUpdateFailed
from titopool.logs import configure_logging
from titopool.messages import Completion, Job, Logprobs, Part, WorkerFacts
from titopool.sampling import SamplingOptions, decode_options
from workers.engine import EngineDead, Generated, OnPart, ReportPhase
from workers.server import WorkerServer
from workers.status import PhaseReporter
from workers.versions import Progress, Versions

VOCAB_SIZE = 50_000


class Fault(IntEnum):
    """What the engine does with a prompt that starts with this id."""

    FAIL = 40_001  # fails this job only
    RAISE = 40_002  # raises what nobody expects
    DIE = 40_003  # reports its engine dead
    KILL = 40_004  # the process is killed
    HANG = 40_005  # never ends
    DIE_AMID = 40_006  # anywhere in a streamed prompt: the engine dies where it would be written


class StubWeights:
    """Implements `workers.weight_engine.WeightEngine`: all goes well, or all but the last step."""

    can_keep = True

    def __init__(self, *, is_bad: bool):
        self._is_bad = is_bad

    async def call(self, method: str, *args: Any) -> list[Any]:
        if method == "apply" and self._is_bad:
            raise WeightUpdateFailed("staged failure")
        fit = {"missing": [], "ignored": [], "kept": [], "split_layers": ""}
        status = {"is_joined": True, "error": "", "num_announced": 1, "num_received": 1}
        answers = {
            "begin": fit, "check": fit, "check_folder": fit, "status": status, "device": "",
            "apply": {"loaded": 1}, "checksum": "0" * 16,
        }  # fmt: skip
        return [answers.get(method)]

    async def pause(self, policy: Policy) -> None:
        return None

    async def resume(self) -> None:
        return None

    async def clear_caches(self) -> None:
        return None

    async def progress(self) -> Progress:
        return {}


class StubEngine:
    """Implements `workers.engine.Engine`."""

    has_died = False

    def __init__(
        self, *, delay_s: float, load_s: float, max_num_seqs: int, max_model_len: int, is_bad: bool
    ):
        self.versions = Versions()
        self.adapters: Any = SimpleNamespace(versions={})
        self.weights = StubWeights(is_bad=is_bad)
        self._delay_s = delay_s
        self._load_s = load_s
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs

    def load(self, report: ReportPhase) -> WorkerFacts:
        report("importing")
        report("loading")
        time.sleep(self._load_s)
        return WorkerFacts(
            model="stub",
            tokenizer="none",
            tokenizer_revision=None,
            trust_remote_code=False,
            vllm_version="0.0-stub",
            sampling_fields=list(SamplingOptions.__struct_fields__),
            max_model_len=self._max_model_len,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=self._max_num_seqs,
            max_logprobs=20,
            world_size=1,
            num_cache_tokens=100_000,
        )

    async def warm_up(self) -> None:
        return None

    async def run(self, job: Job, on_part: OnPart) -> Generated:
        ids = np.frombuffer(job.prompt_token_ids, dtype=np.int32)
        await self._stage_fault(int(ids[0]))
        await asyncio.sleep(self._delay_s)
        options = decode_options(job.sampling)
        if job.is_streamed:
            await self._stream(job, ids[::-1], on_part)
        answer = np.ascontiguousarray(ids[::-1][: options.max_tokens])
        logprobs = None
        if options.logprobs is not None:
            values = np.full(len(answer), -1.5, dtype=np.float32)
            logprobs = Logprobs(values.tobytes())
        completion = Completion(answer.tobytes(), "length", logprobs, [(0, 0)])
        return Generated([completion] * options.n)

    async def _stream(self, job: Job, ids: np.ndarray, on_part: OnPart) -> None:
        """One id every `delay_s`."""
        for place, token_id in enumerate(ids.tolist()):
            if token_id == Fault.DIE_AMID:
                raise EngineDead("staged death")
            end = "length" if place == len(ids) - 1 else ""
            text = f"{token_id} "
            piece = Completion(np.int32(token_id).tobytes(), end, None, [(0, 0)], text=text)
            on_part(Part(job.job_id, job.attempt, [(0, piece)]))
            await asyncio.sleep(self._delay_s)

    async def _stage_fault(self, first_id: int) -> None:
        match first_id:
            case Fault.FAIL:
                raise GenerationFailed("staged failure")
            case Fault.RAISE:
                raise RuntimeError("staged surprise")
            case Fault.DIE:
                raise EngineDead("staged death")
            case Fault.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.HANG:
                await asyncio.sleep(3600)

    async def probe(self) -> None:
        return None

    def close(self) -> None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--worker-id", default="stub")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--bad-weights", action="store_true")
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=4096)
    arguments = parser.parse_args()
    config = from_environment()
    configure_logging(config.log_level)
    engine = StubEngine(
        delay_s=arguments.delay_s,
        load_s=arguments.load_s,
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.max_model_len,
        is_bad=arguments.bad_weights,
    )

    async def serve() -> str:
        server = WorkerServer(
            engine,
            endpoint=arguments.endpoint,
            worker_id=arguments.worker_id,
            config=config,
            report=PhaseReporter(arguments.worker_id, None),
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
        return await server.run()

    sys.exit(asyncio.run(serve()))


if __name__ == "__main__":
    main()
