"""vLLM's options: titopool's defaults, the user's words, and what depends on the model."""

import argparse
import copy
from typing import Any, NoReturn

from titopool import demo_model
from titopool.errors import ConfigError
from titopool.settings.config import ServerConfig

# Options of vLLM for caches outside the engine, with what they keep.
OUTLIVING = {
    "kv_offloading_size": "keys and values of old weights",
    "kv_transfer_config": "keys and values of old weights",
    "ec_transfer_config": "images encoded by old weights",
}
# Options of vLLM for several replicas in one engine, with the values that mean one.
DATA_PARALLEL = {
    "data_parallel_size": 1, "data_parallel_size_local": 1, "data_parallel_rank": None,
    "data_parallel_start_rank": None, "data_parallel_hybrid_lb": False,
    "data_parallel_external_lb": False, "data_parallel_multi_port_external_lb": False,
}  # fmt: skip
# Modes of vLLM in which steps that only decode run as CUDA graphs of their own.
DECODE_GRAPHS = ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")


def parse_options(config: ServerConfig, defaults: dict[str, Any]) -> Any:
    """vLLM's AsyncEngineArgs.

    Raises:
        ConfigError: vLLM does not know an option, or refuses its value; or the pool's weights would
            not be right with it.
    """
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # vLLM writes `reasoning_parser` into it.
    structured_outputs = StructuredOutputsConfig(**defaults.pop("structured_outputs_config"))

    def refuse(message: str) -> NoReturn:
        passed = "; titopool has no such setting and passed it on to vLLM"
        is_unknown = message.startswith("unrecognized arguments")
        raise ConfigError(f"vLLM's options: {message}{passed if is_unknown else ''}")

    argv = config.engine_argv
    model = config.model
    if not model:
        model = demo_model.demo_model_folder()
        given = {word.partition("=")[0] for word in argv}
        if not given & {"--dtype", "--max-model-len"}:
            argv = [*demo_model.ENGINE_ARGV, *argv]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm", allow_abbrev=False))
    # argparse's `error` would end the process.
    parser.error = refuse
    parser.set_defaults(model=model, structured_outputs_config=structured_outputs, **defaults)
    try:
        engine_args = AsyncEngineArgs.from_cli_args(parser.parse_args(argv))
    except (argparse.ArgumentError, ValueError) as error:
        raise ConfigError(f"vLLM's options: {error}") from error
    _check_weights_can_change(engine_args)
    return engine_args


def _check_weights_can_change(engine_args: Any) -> None:
    """Refuses caches that outlive an update of the weights, and ranks that a group does not count.

    Keys of cached blocks do not name the weights, and what is on disks or in other processes stays
    when vLLM clears its caches (`TieringOffloadingManager.reset_cache`).

    Raises:
        ConfigError: names the option.
    """
    for option, what in OUTLIVING.items():
        if getattr(engine_args, option, None):
            raise ConfigError(
                f"--{option.replace('_', '-')}: expected none, because {what} stay there after an "
                "update of the weights, and requests would use them; leave it out"
            )
    for option in DATA_PARALLEL:
        value = getattr(engine_args, option, None)
        if value is not None and value is not False and value != DATA_PARALLEL[option]:
            raise ConfigError(
                f"--{option.replace('_', '-')}: expected none, because each of titopool's workers is "
                "one replica, and several in one would have the same ranks in a trainer's group, got "
                f"{value}; use --num-workers for more replicas"
            )


def fit_to_cpu(engine_args: Any) -> None:
    """Avoids what vLLM 0.32 for CPUs computes wrongly, or ends its engine with.

    Raises:
        ConfigError: the user's options ask for it.
    """
    model = engine_args.create_model_config()
    # Configs of hybrids may count experts that the model does not have.
    has_experts = getattr(model, "is_moe", False) and not model.is_hybrid
    if engine_args.enable_lora and has_experts:
        raise ConfigError(
            "--enable-lora: expected none for a mixture of experts on a CPU, because vLLM's kernels "
            "for adapters of experts need Triton; leave it out, or use a GPU"
        )
    if hasattr(model.hf_text_config, "linear_key_head_dim"):
        _need_bfloat16(model)
    if model.is_hybrid or model.has_inner_state:
        _cache_no_states(engine_args)
    if model.use_mla:
        _rotate_by_torch(engine_args)
        if str(model.dtype) == "torch.float32":
            _attend_in_float32(engine_args)


def _need_bfloat16(model: Any) -> None:
    """Gated linear attention (Qwen3-Next) has a kernel for bfloat16 only, which asserts that later."""
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype != "bfloat16":
        raise ConfigError(
            "--dtype: expected bfloat16 for a model with gated linear attention on a CPU, because "
            f"vLLM's kernel there has no other, got {dtype}; use --dtype bfloat16, or a GPU"
        )


def _cache_no_states(engine_args: Any) -> None:
    """Turns the prefix cache off for models with a recurrent state (Mamba, linear attention).

    vLLM's engine dies at the second block of such a model's cached states.
    """
    if engine_args.enable_prefix_caching:
        raise ConfigError(
            "--enable-prefix-caching: expected it off for a model with recurrent layers on a CPU, "
            "because vLLM's engine ends at the first long prompt; leave it out, or use a GPU"
        )
    engine_args.enable_prefix_caching = False


def _rotate_by_torch(engine_args: Any) -> None:
    """Leaves out vLLM's kernel for rotary embeddings, unless the user chose it.

    It is wrong for several heads of latent attention (MLA), as the bare engine shows.
    """
    operations = engine_args.compilation_config.custom_ops
    if not any("rotary_embedding" in one for one in operations):
        operations.append("-rotary_embedding")


def _attend_in_float32(engine_args: Any) -> None:
    """Where the CPU has AMX, vLLM takes a kernel for bfloat16 for latent attention in float32 too."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = getattr(AttentionBackendEnum, "CPU_MLA", None)
    chosen = (engine_args.attention_config.backend, engine_args.attention_backend)
    if backend is not None and chosen == (None, None):
        engine_args.attention_config.backend = backend


def check_adapters_on_gpu(vllm_config: Any) -> None:
    """vLLM's kernels for adapters assert their dtype at the first request that has one.

    Raises:
        ConfigError: the model computes in float32.
    """
    if (
        vllm_config.lora_config is not None
        and str(vllm_config.model_config.dtype) == "torch.float32"
    ):
        raise ConfigError(
            "--enable-lora: expected a model in bfloat16 or float16 on a GPU, because vLLM's kernels "
            "for adapters have no other, got float32; use --dtype bfloat16"
        )


def capture_graphs_for_all(engine_args: Any, usage_context: Any) -> None:
    """Makes vLLM capture CUDA graphs for all sequences that it runs at once, unless the user chose.

    vLLM captures for up to 512 sequences; a larger step launches kernel by kernel (measured on an
    H200: with graphs, 1,024 sequences make 1.6 times the tokens).
    """
    for given in (engine_args, engine_args.compilation_config):
        if given.max_cudagraph_capture_size or given.cudagraph_capture_sizes:
            return
    config = copy.deepcopy(engine_args).create_engine_config(usage_context)
    limit = config.compilation_config.max_cudagraph_capture_size
    num_seqs = config.scheduler_config.max_num_seqs
    if limit and limit < num_seqs:
        engine_args.max_cudagraph_capture_size = num_seqs


def has_decode_graphs(config: Any) -> bool:
    """Whether steps that only decode run as CUDA graphs of their own, as on a GPU by default.

    There are no graphs on the CPU and with `--enforce-eager`. `config`: a VllmConfig.
    """
    return config.compilation_config.cudagraph_mode.name in DECODE_GRAPHS
