"""The engine adapter: one vLLM AsyncLLM (0.25.1 to 0.33) as a worker's engine.

Runs in: each worker process, on its event loop. Everything of vLLM is imported inside functions:
the import takes seconds, and the environment must be prepared before.
"""

import gc
import hashlib
import importlib
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, NamedTuple

import msgspec
import numpy as np

from titopool.errors import InvalidRequest, TitopoolError
from titopool.settings.config import ServerConfig
from titopool.settings.sampling import SamplingOptions, decode_options, encode_options
from titopool.wire.messages import (
    ID_BYTES,
    Completion,
    ImageFacts,
    Job,
    JobProgress,
    Logprobs,
    MetricFamily,
    WorkerCounters,
    WorkerFacts,
    decode_chat_parsing,
)
from workers.engine.base import (
    EngineDead,
    FreeSlots,
    Generated,
    OnChunk,
    ReportPhase,
    Slots,
    Timings,
    in_slots,
)
from workers.engine.facts import facts_of
from workers.engine.grammars.trials import GrammarTrials
from workers.engine.lora import Adapter, Adapters
from workers.engine.metrics.exposition import families_of
from workers.engine.metrics.stat_logger import make_stat_logger
from workers.engine.outputs.completions import ChunkSender, RunContext, Stream
from workers.engine.outputs.first_tokens import FirstTokens
from workers.engine.outputs.packing import pack_prompt_logprobs
from workers.engine.outputs.streams import OpenStreams
from workers.engine.parsing.parsers import Parsers, check_parsers, load_parsers
from workers.engine.parsing.processes import ParserProcesses
from workers.engine.sampling import (
    check_replay_start,
    client_errors,
    params_of_other,
    refusal_or_failure,
    to_vllm_params,
)
from workers.engine.scoring import check_scored, until_scored
from workers.engine.sent_images import SentImages, send_images_once
from workers.engine.start.exact import fit_to_exact
from workers.engine.start.importing import import_vllm
from workers.engine.start.options import (
    capture_graphs_for_all,
    check_adapters_on_gpu,
    fit_to_cpu,
    has_decode_graphs,
    parse_options,
)
from workers.engine.start.raw_logprobs import check_raw_logprobs
from workers.engine.start.tracing import trace_requests
from workers.engine.versions import Versions
from workers.engine.weights import VllmWeights, WeightEngine
from workers.environment import image_processes
from workers.images.preparer import ImagePreparer
from workers.in_model.logprobs_patch import receive_lists

# Of the encoded options whose parameters are kept, each with what vLLM's object takes besides.
MAX_PARAMS_BYTES = 16 * 2**20
PARAMS_BYTES = 4096
# vLLM's variable: how it starts its processes.
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class VllmEngine:
    """One vLLM AsyncLLM; implements `workers.engine.base.Engine`."""

    def __init__(self, config: ServerConfig, *, on_cpu: bool):
        self.versions = Versions()
        self._config = config
        self._on_cpu = on_cpu
        self.has_decode_graphs = False
        self.counters = WorkerCounters()
        self._llm: Any = None
        self._images: ImagePreparer | None = None
        self._sent_images: SentImages | None = None
        self._parsers: Parsers | None = None
        self._parsing: ParserProcesses | None = None
        self._grammars: GrammarTrials | None = None
        self._params_by_digest: dict[bytes, tuple[Any, int | None]] = {}
        self._params_bytes = 0
        self._streams = OpenStreams(config.stream_interval)
        self._first_tokens = FirstTokens(lambda: self._llm.output_processor.request_states)

    @property
    def weights(self) -> WeightEngine:
        return VllmWeights(self._llm, self.versions)

    @property
    def has_died(self) -> bool:
        return self._llm is not None and bool(self._llm.errored)

    def load(self, report: ReportPhase) -> WorkerFacts:
        # vLLM's CPU build overwrites it.
        start_method = os.environ.get(START_METHOD)
        report("importing")
        defaults = import_vllm(self._config, on_cpu=self._on_cpu)
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        check_parsers(self._config)
        engine_args = parse_options(self._config, defaults)
        if _is_titopools(engine_args.worker_extension_cls):
            receive_lists(with_raw=self._config.raw_logprobs)
        if self._config.exact:
            fit_to_exact(engine_args)
        if self._config.raw_logprobs:
            check_raw_logprobs(engine_args)
        trace_requests(engine_args, self._config)
        report("loading")
        # LLM_CLASS: the batch sizes that vLLM chooses for throughput.
        usage = UsageContext.LLM_CLASS
        if self._on_cpu:
            fit_to_cpu(engine_args)
        else:
            capture_graphs_for_all(engine_args, usage)
        vllm_config = engine_args.create_engine_config(usage)
        if not self._on_cpu:
            check_adapters_on_gpu(vllm_config)
        if self._on_cpu and start_method != "spawn" and _can_fork(vllm_config):
            # vLLM's CPU build chooses `spawn`, and the engine's process would import vLLM again (10 s
            # of a core).
            os.environ[START_METHOD] = "fork"
        self._llm = AsyncLLM.from_vllm_config(
            vllm_config,
            usage_context=usage,
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
            stat_loggers=[make_stat_logger()] if self._config.metrics else None,
        )
        self.has_decode_graphs = has_decode_graphs(vllm_config)
        self._streams.tap(self._llm.output_processor)
        if self._llm.model_config.is_multimodal_model:
            images = ImagePreparer(
                self._llm.model_config,
                self._llm.renderer.tokenizer,
                num_processes=image_processes(self._config),
                max_bytes=self._config.image_memory_bytes,
            )
            if images.facts:
                self._images = images
                self._sent_images = send_images_once(self._llm)
        self._parsers = load_parsers(self._config, self._llm)
        if self._parsers is not None:
            self._parsing = ParserProcesses(self._parsers, self.counters)
        self._grammars = GrammarTrials(self._llm.vllm_config, self._config.grammar_timeout_s)
        self.adapters = Adapters(self._llm)
        return facts_of(
            self._llm, self._config,
            images=self._image_facts(), max_loras=self.adapters.limit,
        )  # fmt: skip

    def _image_facts(self) -> ImageFacts | None:
        if self._images is None or self._images.facts is None:
            return None
        sees_all = getattr(self._llm.model_config, "is_mm_prefix_lm", False)
        if not (self._on_cpu and sees_all):
            return self._images.facts
        reason = (
            "this model's images attend to all of themselves, which vLLM computes on GPUs only (on "
            "a CPU it would give other log-probabilities than the trainer's)"
        )
        return msgspec.structs.replace(self._images.facts, refused_because=reason)

    async def warm_up(self) -> None:
        # The first request for log-probabilities compiles code (13 s on a CPU).
        # With --return-sampling-mask (vLLM 0.32) vLLM refuses a request without top_k.
        top_k = int(getattr(self._llm.model_config, "return_sampling_mask", False))
        sampling = SamplingOptions(max_tokens=2, logprobs=0, ignore_eos=True, top_k=top_k)
        job = Job(
            job_id=0,
            attempt=0,
            prompt_token_ids=np.array([0], dtype=np.int32).tobytes(),
            num_sequences=1,
            num_tokens=3,
            sampling=msgspec.Raw(encode_options(sampling)),
        )
        await self.run(job, lambda chunk: None, FreeSlots())
        await self._llm.collective_rpc("titopool_die_with", args=(os.getpid(),))
        # The garbage collector need not look again at what vLLM and torch have imported, which
        # costs 10 µs a token at 512 sequences.
        gc.collect()
        gc.freeze()
        # Requests leave no cycles. By Python's thresholds 1,024 streams had all their objects visited
        # every 2 s, for 80 ms in which none went on.
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, 100)

    async def run(self, job: Job, on_chunk: OnChunk, slots: Slots) -> Generated:
        with self.adapters.use(job.adapter) if job.adapter else nullcontext() as adapter:
            context = self._context_of(job, on_chunk, adapter)
            # Open from here on: an abort also meets a job whose grammar is tried.
            with closing(context), self.versions.job(job, lambda: context.stop(slots)):
                generated = await self._run(job, context, slots)
        return generated._replace(adapter_version=adapter.version if adapter else None)

    async def _run(self, job: Job, context: RunContext, slots: Slots) -> Generated:
        if self._grammars is not None:
            await self._grammars.check(context.params)
        if context.needs_scores and self._on_cpu and self.adapters.limit:
            # vLLM's LoRA code for CPUs counts rows wrong when the prompt shares a step with other
            # requests, and its engine dies.
            raise InvalidRequest(
                "log-probabilities of a prompt: expected a server without --enable-lora, because vLLM's "
                "CPU build cannot compute them with LoRA; start a server without it"
            )
        if not job.images:
            return await self._generate(job, _tokens_input(job), context, slots)
        if self._images is None:
            raise InvalidRequest("images: expected none, as the model takes token ids only")
        async with self._images.prepared(job) as prompt:
            context.add_images(prompt.token_ids, prompt.image_ranges)
            generated = Generated([])
            if job.num_sequences:
                generated = await self._generate(job, prompt.engine_input, context, slots)
        return generated._replace(
            prompt_token_ids=prompt.token_ids,
            image_ranges=prompt.image_ranges,
            num_images=prompt.num_images,
            image_s=prompt.elapsed_s,
            image_decode_s=prompt.decode_s,
        )

    def _context_of(self, job: Job, on_chunk: OnChunk, adapter: Adapter | None) -> RunContext:
        arguments = {"lora_request": adapter.request()} if adapter else {}
        if job.traceparent and self._config.otlp_endpoint:
            arguments["trace_headers"] = {"traceparent": job.traceparent}
        if not job.chat and not job.is_streamed:
            params, start = self._shared_params(job.sampling)
            arguments |= self._grammar_arguments(job, params)
            return RunContext(params, on_chunk, arguments=arguments, replay_start=start)
        options = decode_options(bytes(job.sampling))
        start = options.routed_experts_prompt_start
        params = to_vllm_params(options, is_streamed=job.is_streamed)
        parsing = sender = None
        if job.chat and self._parsers is not None and self._parsing is not None:
            chat = decode_chat_parsing(job.chat)
            begun = self._parsers.begin(chat, params, job.prompt_token_ids)
            arguments |= begun.engine_arguments
            parsing = self._parsing.job(job)
        else:
            arguments |= self._grammar_arguments(job, params)
        if job.is_streamed:
            sender = ChunkSender(job, on_chunk, adapter.version if adapter else None)
        return RunContext(params, on_chunk, parsing, sender, arguments, replay_start=start)

    def _grammar_arguments(self, job: Job, params: Any) -> dict[str, Any]:
        if self._parsers is None or params.structured_outputs is None:
            return {}
        return self._parsers.unparsed_arguments(job.prompt_token_ids)

    async def _generate(
        self, job: Job, prompt: Any, context: RunContext, slots: Slots
    ) -> Generated:
        num_prompt = len(context.prompt_token_ids or job.prompt_token_ids) // ID_BYTES
        check_replay_start(context.replay_start, num_prompt)

        async def complete(index: int) -> Ended:
            if index or not context.needs_scores:
                return await self._complete(index, job, prompt, context, slots)
            ended = await until_scored(
                lambda: self._complete(index, job, prompt, context, slots),
                self._config.request_timeout_s,
            )
            if ended.completion.finish_reason == "abort":
                slots.stop()
            context.is_scored.set()
            return ended

        all_ended = list[Ended]()
        if not slots.is_stopped:
            # The prompt's scores are made once, and alone: an abort before them repeats nothing else.
            scored = context.is_scored if context.needs_scores else None
            all_ended = await in_slots(job.num_sequences, complete, slots, after=scored)
        completions = [one.completion for one in all_ended]
        completions += self._not_started(len(all_ended), job, context)
        if not all_ended:
            return Generated(completions)
        first, last = all_ended[0], max(all_ended, key=lambda one: one.ended_s)
        return Generated(
            completions, first.num_cached_tokens,
            prompt_logprobs=first.prompt_logprobs, timings=last.timings,
        )  # fmt: skip

    def _not_started(self, first: int, job: Job, context: RunContext) -> list[Completion]:
        """The completions from `first` on of a job that was aborted before they started."""
        completion = Completion(b"", "abort", None, [(self.versions.current, 0)])
        indices = range(first, job.num_sequences)
        if indices and context.sender is not None:
            context.sender.send([(index, completion) for index in indices])
        return [completion for _ in indices]

    async def _complete(
        self, index: int, job: Job, prompt: Any, context: RunContext, slots: Slots
    ) -> "Ended":
        """One completion of `job`. Cancelling the task makes vLLM abort it in the engine.

        Raises:
            NotScored: an abort left the prompt without its log-probabilities.
        """
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params, stream, began = context.params, None, time.monotonic()
        if index:
            params = params_of_other(params, index)
        num_aborts = self.versions.num_aborts
        try:
            is_scoring = context.needs_scores and not index
            with self.versions.request(
                job.job_id, job.client_id, job.key_name, is_scoring=is_scoring
            ) as request_id:
                if context.sender is not None:
                    stream = Stream(
                        index, context.sender, context.parsing,
                        lambda: self.versions.history(request_id), context.replay_start,
                    )  # fmt: skip
                with (
                    self._watched(request_id, index, job, context),
                    self._streams.open(request_id, stream),
                ):
                    salt = self.versions.cache_salt(job.cache_salt)
                    async for output in self._llm.generate(
                        {**prompt, "cache_salt": salt} if salt else prompt,
                        params,
                        request_id,
                        **context.arguments,
                    ):
                        is_meant = request_id in self.versions.restarting
                        if self.versions.num_aborts == num_aborts and not is_meant:
                            check_not_stopping(output)
                    if is_scoring:
                        check_scored(output)
                    if stream is not None:
                        stream.send_last(output)
                # Without an await in between: an update may be about to change the version.
                history = self.versions.take(request_id)
            # Its text may still be parsed, which takes none of the engine's time. A job that fails
            # gives back all of its slots.
            slots.give_back(len(output.outputs[0].token_ids), time.monotonic() - began)
            if stream is not None:
                await stream.sent()
        except EngineDeadError as error:
            raise EngineDead("vLLM's engine process has ended") from error
        except EngineGenerateError as error:
            if job.images and self._sent_images is not None:
                self._sent_images.forget()
            if isinstance(error.__cause__, TitopoolError):
                # Of `OpenStreams`.
                raise error.__cause__ from None
            raise refusal_or_failure(error.__cause__ or error) from error
        except client_errors() as error:
            raise refusal_or_failure(error) from error
        prompt_logprobs = None
        if context.needs_scores and not index:
            prompt_logprobs = pack_prompt_logprobs(output.prompt_logprobs)
        return Ended(
            await context.completion(output.outputs[0], history), time.monotonic(),
            output.num_cached_tokens or 0, prompt_logprobs,
            _timings_of(output) if job.traceparent else None,
        )  # fmt: skip

    def _shared_params(self, encoded: msgspec.Raw) -> tuple[Any, int | None]:
        """vLLM's parameters and `routed_experts_prompt_start`."""
        # The jobs of a request share their options; vLLM clones the parameters before it changes them.
        key = hashlib.sha256(encoded).digest()
        shared = self._params_by_digest.get(key)
        if shared is None:
            options = decode_options(encoded)
            shared = to_vllm_params(options), options.routed_experts_prompt_start
            num_bytes = memoryview(encoded).nbytes + PARAMS_BYTES
            if self._params_bytes + num_bytes > MAX_PARAMS_BYTES:
                self._params_by_digest.clear()
                self._params_bytes = 0
            self._params_bytes += num_bytes
            self._params_by_digest[key] = shared
        return shared

    def _watched(
        self, request_id: str, index: int, job: Job, context: RunContext
    ) -> AbstractContextManager[None]:
        """Within the block, `on_chunk` is told when the job has its first token."""
        if index or (job.is_streamed and not context.needs_scores):
            # The first completion starts first. The first chunk of a stream says so.
            return nullcontext()

        def note() -> None:
            context.is_scored.set()
            if not job.is_streamed:
                context.on_chunk(JobProgress(job.job_id, job.attempt, has_token=True))

        return self._first_tokens.watched(request_id, note)

    async def probe(self) -> None:
        # The engine core's loop answers. vLLM's `timeout` argument must not be used: the next call
        # would get the late answer.
        await self._llm.collective_rpc("check_health")

    def metrics(self, worker_id: str) -> Iterable[MetricFamily | None]:
        return families_of(worker_id) if self._config.metrics else ()

    def close(self) -> None:
        if self._parsing is not None:
            self._parsing.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._images is not None:
            self._images.close()
        if self._llm is not None:
            self._llm.shutdown()


class Ended(NamedTuple):
    """A completion that has ended, and what vLLM's last output of it says of its prompt."""

    completion: Completion
    # Monotonic.
    ended_s: float
    num_cached_tokens: int
    prompt_logprobs: Logprobs | None
    timings: Timings | None


def check_not_stopping(output: Any) -> None:
    """Raises EngineDead if a completion was aborted, which an engine does by itself only as it ends.

    vLLM's processes abort all requests on SIGTERM, which may come from outside.
    """
    if any(one.finish_reason == "abort" for one in output.outputs):
        raise EngineDead("vLLM's engine process is ending: it aborted its requests in flight")


def _tokens_input(job: Job) -> Any:
    from vllm.inputs import tokens_input

    token_ids = np.frombuffer(job.prompt_token_ids, dtype=np.int32).tolist()
    return tokens_input(token_ids)


def _timings_of(output: Any) -> Timings | None:
    """vLLM's times of a request; None if it has made no token, or measures nothing.

    vLLM's processes are on one host, and share its clock.
    """
    found = output.metrics
    if found is None or not (found.scheduled_ts and found.first_token_ts):
        return None
    return Timings(found.queued_ts, found.scheduled_ts, found.first_token_ts, found.last_token_ts)


def _can_fork(vllm_config: Any) -> bool:
    """Whether no thread of OpenMP can run in this process, as a fork's child would wait for it.

    The processors of images, and a model's own code, may compute here before the engine's process
    starts.
    """
    model = vllm_config.model_config
    only_text = not (model.is_multimodal_model or model.trust_remote_code)
    return only_text and vllm_config.parallel_config.world_size_across_dp == 1


def _is_titopools(extension: str) -> bool:
    """Whether the class path `extension`, mixed into vLLM's worker, is titopool's or a subclass."""
    from workers.in_model.extension import WorkerExtension

    module, _, name = extension.rpartition(".")
    return issubclass(getattr(importlib.import_module(module), name), WorkerExtension)
