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
from titopool.errors import ConfigError, InvalidRequest
from titopool.settings.config import ServerConfig
from titopool.settings.sampling import SamplingOptions, decode_options, encode_options
from titopool.wire.messages import Completion, Job, Logprobs, Part, WorkerFacts, decode_chat_parsing
from workers.engine.lora import Adapters
from workers.engine.packing import pack_prompt_logprobs
from workers.engine.parsing import Parsers, check_parsers, load_parsers
from workers.engine.sampling import client_errors, refusal_or_failure, to_vllm_params
from workers.engine.scoring import check_scored, until_scored
from workers.engine.streaming import Stream
from workers.engine.tokenizer_files import digest_of_tokenizer
from workers.engine.turn import Turn
from workers.engine.versions import Versions
from workers.engine.weights import VllmWeights, WeightEngine
from workers.environment import default_engine_options, image_threads, prepare_environment
from workers.images.preparer import ImagePreparer
from workers.in_model.logprobs_patch import receive_lists
from workers.process import without_collector
from workers.vllm_internals import check_internals

ReportPhase = Callable[[str], None]
OnPart = Callable[[Part], None]


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
    adapter_version: int | None = None


class EngineDead(Exception):
    """The engine can never answer again; the worker process must end."""


class Engine(Protocol):
    """What a worker process asks of its engine."""

    versions: Versions
    # Of LoRA; there once the model is loaded.
    adapters: Adapters

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

    async def run(self, job: Job, on_part: OnPart) -> Generated:
        """All completions of `job`; of a streamed one, `on_part` gets what is new as it comes.

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
        self._parsers: Parsers | None = None
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
        with without_collector():
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            check_internals()
        check_parsers(self._config)
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
        self._parsers = load_parsers(self._config, self._llm)
        self.adapters = Adapters(self._llm)
        return self._facts()

    def _engine_args(self, args_class: Any, defaults: dict[str, Any]) -> Any:
        from vllm.config import StructuredOutputsConfig
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        # vLLM sets `reasoning_parser` in it.
        guided = StructuredOutputsConfig(**defaults.pop("structured_outputs_config"))

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
        parser.set_defaults(model=model, structured_outputs_config=guided, **defaults)
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
            max_loras=self.adapters.limit,
            tool_call_parser=self._config.tool_call_parser,
            reasoning_parser=self._config.reasoning_parser,
            tokenizer_digest=digest_of_tokenizer(str(model.tokenizer)),
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
        await self.run(job, lambda part: None)
        await self._llm.collective_rpc("titopool_die_with", args=(os.getpid(),))
        # What vLLM and torch have imported stays: the collector need not look at it again and
        # again while tokens come in (10 µs a token at 512 sequences).
        gc.collect()
        gc.freeze()

    async def run(self, job: Job, on_part: OnPart) -> Generated:
        timeout_s = self._config.request_timeout_s
        if not job.adapter:
            return await until_scored(lambda: self._run(job, on_part), timeout_s)
        with self.adapters.use(job.adapter) as adapter:
            version, request = adapter.version, adapter.request()

            def on_own_part(part: Part) -> None:
                on_part(msgspec.structs.replace(part, adapter_version=version))

            generated = await until_scored(
                lambda: self._run(job, on_own_part, lora_request=request), timeout_s
            )
        return generated._replace(adapter_version=version)

    async def _run(self, job: Job, on_part: OnPart, **arguments: Any) -> Generated:
        """Raises NotScored where an abort left the prompt without its log-probabilities."""
        turn = self._turn_of(job, on_part)
        if turn.params.prompt_logprobs is not None and self._on_cpu and self.adapters.limit:
            # In a step with other requests its LoRA code mistakes the number of rows, and the engine
            # ends.
            raise InvalidRequest(
                "log-probabilities of a prompt: expected a server without --enable-lora, which vLLM's CPU "
                "build does not have together with them"
            )
        turn.arguments |= arguments
        if not job.images:
            output = await self._output(job, _tokens_input(job), turn)
            return await self._generated(output, turn)
        if self._images is None:
            raise InvalidRequest("images: expected none, as the model takes token ids only")
        async with self._images.prepared(job) as prompt:
            turn.prompt_token_ids = prompt.token_ids
            output = await self._output(job, prompt.engine_input, turn)
        return (await self._generated(output, turn))._replace(
            prompt_token_ids=prompt.token_ids,
            num_images=prompt.num_images,
            image_s=prompt.elapsed_s,
        )

    def _turn_of(self, job: Job, on_part: OnPart) -> Turn:
        if not job.chat and not job.is_streamed:
            return Turn(self._sampling_params(job.sampling))
        params = to_vllm_params(decode_options(bytes(job.sampling)), is_streamed=job.is_streamed)
        parsing = None
        if job.chat and self._parsers is not None:
            chat = decode_chat_parsing(job.chat)
            parsing = self._parsers.begin(chat, params, job.prompt_token_ids)
        stream = Stream(job, parsing, on_part) if job.is_streamed else None
        return Turn(params, parsing, stream, arguments=parsing.engine_arguments if parsing else {})

    async def _output(self, job: Job, prompt: Any, turn: Turn) -> Any:
        """vLLM's last output, with the completions of all."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        latest: dict[int, Any] = {}
        num_aborts = self.versions.num_aborts
        try:
            with self.versions.request(job.job_id) as request_id:
                # One with all completions, or of a stream many with those that went on.
                async for output in self._llm.generate(
                    prompt, turn.params, request_id, **turn.arguments
                ):
                    if self.versions.num_aborts == num_aborts:
                        check_not_stopping(output)
                    latest |= {one.index: one for one in output.outputs}
                    if turn.stream is not None:
                        history = self.versions.history(request_id)
                        turn.stream.take(output, turn.prompt_token_ids, history)
                # Before anybody else has a turn: an update may be about to change the version.
                turn.history = self.versions.take(request_id)
        except EngineDeadError as error:
            raise EngineDead("vLLM's engine process has ended") from error
        except EngineGenerateError as error:
            raise refusal_or_failure(error.__cause__ or error) from error
        except client_errors() as error:
            raise refusal_or_failure(error) from error
        output.outputs = [latest[index] for index in sorted(latest)]
        return output

    async def _generated(self, output: Any, turn: Turn) -> Generated:
        completions = await turn.completions(output)
        generated = Generated(completions, output.num_cached_tokens or 0)
        if turn.params.prompt_logprobs is None:
            return generated
        check_scored(output)
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

    async def probe(self) -> None:
        # Answered by the engine core's loop. vLLM's own timeout argument must not be used:
        # a late answer would be taken for that of the next call.
        await self._llm.collective_rpc("check_health")

    def close(self) -> None:
        if self._images is not None:
            self._images.close()
        if self._llm is not None:
            self._llm.shutdown()


def check_not_stopping(output: Any) -> None:
    """Raises EngineDead if sequences were aborted, which only an engine does that is told to end.

    vLLM's processes do so on SIGTERM, which may come from outside.
    """
    if any(one.finish_reason == "abort" for one in output.outputs):
        raise EngineDead("vLLM's engine process is ending: it aborted what was under way")


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
    from workers.in_model.extension import WorkerExtension

    module, _, name = extension.rpartition(".")
    return issubclass(getattr(importlib.import_module(module), name), WorkerExtension)
