"""The engine adapter: what a worker does with vLLM (0.25.1 to 0.32).

`Engine` is what a worker needs of an engine; `VllmEngine` is the only one that is shipped.
Everything of vLLM is imported inside functions: importing it takes seconds, and the
environment must be prepared before.
"""

import argparse
import copy
import gc
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import msgspec
import numpy as np

from titopool import demo_model
from titopool.config import ServerConfig
from titopool.errors import ConfigError, InvalidRequest
from titopool.messages import Completion, Job, Logprobs, WorkerFacts
from titopool.sampling import SamplingOptions, decode_options, encode_options
from workers.environment import default_engine_options, image_threads, prepare_environment
from workers.images import ImagePreparer
from workers.logprobs_transport import receive_lists
from workers.packing import pack_logprobs, pack_prompt_logprobs
from workers.versions import Versions
from workers.vllm_params import client_errors, failed_inside, refusal_or_failure, to_vllm_params
from workers.weight_engine import VllmWeights, WeightEngine

ReportPhase = Callable[[str], None]


class Generated(NamedTuple):
    """What an engine made of a job."""

    completions: list[Completion]
    # Prompt tokens found in the cache.
    num_cached_tokens: int = 0
    # With images: the prompt with all placeholders expanded, how many images were processed for
    # it, and for how long.
    prompt_token_ids: bytes = b""
    num_images: int = 0
    image_s: float = 0.0
    prompt_logprobs: Logprobs | None = None


class EngineDead(Exception):
    """The engine can never answer again; the worker process must end."""


class Engine(Protocol):
    """What a worker process asks of its engine."""

    versions: Versions

    @property
    def weights(self) -> WeightEngine:
        """What updates need of it; known once it is loaded."""

    @property
    def has_died(self) -> bool:
        """Whether the engine's processes are known to be gone; answers at once."""

    def load(self, report: ReportPhase) -> WorkerFacts:
        """Loads the model; blocks, in a thread of its own. Calls `report` with each phase."""

    async def warm_up(self) -> None:
        """Generates once, so that no request pays for what is compiled on first use."""

    async def run(self, job: Job) -> Generated:
        """All completions of `job`.

        Cancelling the call stops the generation.

        Raises:
            InvalidRequest: the engine refuses the job.
            GenerationFailed: the engine failed on this job only.
            EngineDead: the engine is gone.
        """

    async def probe(self) -> None:
        """Returns when the engine's loop has turned; hangs when it does not."""

    def close(self) -> None:
        """Stops the engine's processes; blocks for seconds."""


class VllmEngine:
    """One vLLM AsyncLLM."""

    def __init__(self, config: ServerConfig, *, on_cpu: bool):
        self.versions = Versions()
        self._config = config
        self._on_cpu = on_cpu
        self._llm: Any = None
        self._images: ImagePreparer | None = None
        self._params_by_options: dict[bytes, Any] = {}

    @property
    def weights(self) -> WeightEngine:
        return VllmWeights(self._llm, self.versions)

    @property
    def has_died(self) -> bool:
        return self._llm is not None and bool(self._llm.errored)

    def load(self, report: ReportPhase) -> WorkerFacts:
        prepare_environment(os.environ, on_cpu=self._on_cpu)
        # A worker that is restarted, or stands beside others, must not repeat their samples.
        seed = int.from_bytes(os.urandom(4), "little") >> 1
        defaults = default_engine_options(self._config, os.environ, on_cpu=self._on_cpu, seed=seed)
        report("importing")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        engine_args = self._engine_args(AsyncEngineArgs, defaults)
        if _is_ours(engine_args.worker_extension_cls):
            receive_lists()
        report("loading")
        # LLM_CLASS: the batch sizes that vLLM chooses for throughput.
        usage = UsageContext.LLM_CLASS
        if not self._on_cpu:
            capture_graphs_for_all(engine_args, usage)
        self._llm = AsyncLLM.from_engine_args(engine_args, usage_context=usage)
        if self._llm.model_config.is_multimodal_model:
            images = ImagePreparer(
                self._llm.model_config,
                self._llm.renderer.tokenizer,
                num_threads=image_threads(self._config),
                max_bytes=self._config.image_memory_bytes,
            )
            self._images = images if images.facts else None
        return self._facts()

    def _engine_args(self, args_class: Any, defaults: dict[str, Any]) -> Any:
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        def refuse(message: str) -> NoReturn:
            raise ConfigError(f"vLLM's options: {message}")

        argv = self._config.engine_argv
        model = self._config.model
        if not model:
            model = demo_model.demo_model_folder()
            given = {word.partition("=")[0] for word in argv}
            if not given & {"--dtype", "--max-model-len"}:
                argv = [*demo_model.ENGINE_ARGV, *argv]
        parser = args_class.add_cli_args(FlexibleArgumentParser(prog="vllm", allow_abbrev=False))
        # argparse's own way is to end the process.
        parser.error = refuse
        parser.set_defaults(model=model, **defaults)
        try:
            return args_class.from_cli_args(parser.parse_args(argv))
        except (argparse.ArgumentError, ValueError) as error:
            raise ConfigError(f"vLLM's options: {error}") from error

    def _facts(self) -> WorkerFacts:
        import vllm
        from vllm import SamplingParams

        config, model = self._llm.vllm_config, self._llm.model_config
        cache = config.cache_config
        num_cache_tokens = cache.kv_cache_size_tokens if cache.enable_prefix_caching else 0
        return WorkerFacts(
            model=str(self._config.model or model.model),
            tokenizer=str(model.tokenizer),
            tokenizer_revision=model.tokenizer_revision,
            trust_remote_code=bool(model.trust_remote_code),
            vllm_version=vllm.__version__,
            sampling_fields=[
                name for name in SamplingParams.__struct_fields__ if not name.startswith("_")
            ],
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_logprobs=model.max_logprobs,
            world_size=config.parallel_config.world_size,
            num_cache_tokens=num_cache_tokens or 0,
            images=self._images.facts if self._images else None,
        )

    async def warm_up(self) -> None:
        # The first request for log-probabilities compiles code of its own (13 s on a CPU).
        sampling = SamplingOptions(max_tokens=2, logprobs=0, ignore_eos=True)
        job = Job(
            job_id=0,
            attempt=0,
            prompt_token_ids=np.array([0], dtype=np.int32).tobytes(),
            num_sequences=1,
            num_tokens=3,
            sampling=msgspec.Raw(encode_options(sampling)),
        )
        await self.run(job)
        await self._llm.collective_rpc("titopool_die_with", args=(os.getpid(),))
        # What vLLM and torch have imported stays: the collector need not look at it again and
        # again while tokens come in (10 µs a token at 512 sequences).
        gc.collect()
        gc.freeze()

    async def run(self, job: Job) -> Generated:
        params = self._sampling_params(job.sampling)
        if not job.images:
            return self._generated(await self._output(job, _tokens_input(job), params), params)
        if self._images is None:
            raise InvalidRequest("images: expected none, as the model takes token ids only")
        async with self._images.prepared(job) as prompt:
            output = await self._output(job, prompt.engine_input, params)
        return self._generated(output, params)._replace(
            prompt_token_ids=prompt.token_ids,
            num_images=prompt.num_images,
            image_s=prompt.elapsed_s,
        )

    async def _output(self, job: Job, prompt: Any, params: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            # FINAL_ONLY: exactly one output, with all completions in order.
            with self.versions.request(job.job_id) as request_id:
                outputs = [one async for one in self._llm.generate(prompt, params, request_id)]
        except EngineDeadError as error:
            raise EngineDead("vLLM's engine process has ended") from error
        except EngineGenerateError as error:
            raise refusal_or_failure(error.__cause__ or error) from error
        except client_errors() as error:
            raise refusal_or_failure(error) from error
        (output,) = outputs
        return output

    def _generated(self, output: Any, params: Any) -> Generated:
        generated = Generated(self._completions(output, params), output.num_cached_tokens or 0)
        if params.prompt_logprobs is None:
            return generated
        return generated._replace(prompt_logprobs=pack_prompt_logprobs(output.prompt_logprobs))

    def _sampling_params(self, encoded: msgspec.Raw) -> Any:
        # The jobs of a request share their options; vLLM clones what it changes.
        key = bytes(encoded)
        params = self._params_by_options.get(key)
        if params is None:
            options = decode_options(key)
            params = to_vllm_params(options)
            if len(self._params_by_options) >= 256:
                self._params_by_options.clear()
            self._params_by_options[key] = params
        return params

    def _completions(self, output: Any, params: Any) -> list[Completion]:
        completions = []
        history = self.versions.take(output.request_id)
        for item in output.outputs:
            if item.finish_reason == "error":
                raise failed_inside(params, num_tokens=len(item.token_ids))
            ids = np.array(item.token_ids, dtype=np.int32).tobytes()
            packed = None if item.logprobs is None else pack_logprobs(item.logprobs, ids)
            completions.append(
                Completion(
                    token_ids=ids,
                    finish_reason=item.finish_reason,
                    logprobs=packed,
                    weight_versions=history.spans(item.index, len(item.token_ids)),
                    text=item.text,
                    stop_reason=item.stop_reason,
                )
            )
        return completions

    async def probe(self) -> None:
        # Answered by the engine core's loop. vLLM's own timeout argument must not be used:
        # a late answer would be taken for that of the next call.
        await self._llm.collective_rpc("check_health")

    def close(self) -> None:
        if self._images is not None:
            self._images.close()
        if self._llm is not None:
            self._llm.shutdown()


def _tokens_input(job: Job) -> Any:
    from vllm.inputs import tokens_input

    token_ids = np.frombuffer(job.prompt_token_ids, dtype=np.int32).tolist()
    return tokens_input(token_ids, cache_salt=job.cache_salt)


def capture_graphs_for_all(engine_args: Any, usage_context: Any) -> None:
    """Has CUDA graphs made for as many sequences as the engine runs at once.

    vLLM's own limit is 512; beyond it each step is launched kernel by kernel (measured on an
    H200: 1,024 sequences make 1.6 times the tokens with graphs). What the user says stays.
    """
    for given in (engine_args, engine_args.compilation_config):
        if given.max_cudagraph_capture_size or given.cudagraph_capture_sizes:
            return
    config = copy.deepcopy(engine_args).create_engine_config(usage_context)
    limit = config.compilation_config.max_cudagraph_capture_size
    num_seqs = config.scheduler_config.max_num_seqs
    if limit and limit < num_seqs:
        engine_args.max_cudagraph_capture_size = num_seqs


def _is_ours(extension: str) -> bool:
    """Whether the class mixed into vLLM's worker, by its path, is this package's or extends it."""
    from workers.extension import WorkerExtension

    module, _, name = extension.rpartition(".")
    return issubclass(getattr(importlib.import_module(module), name), WorkerExtension)
