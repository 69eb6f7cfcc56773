"""Options that titopool chooses or refuses where vLLM is wrong, or ends its engine."""

from pathlib import Path
from typing import Any

import pytest
from vllm.usage.usage_lib import UsageContext

from harness.servers import running_server
from tests.all.matrix import text
from tests.all.matrix.row import OPTIONS
from tests.kit.models.model_families import make_family
from titopool.errors import ConfigError
from titopool.settings.sources import from_command_line
from workers.engine.start.options import check_adapters_on_gpu, fit_to_cpu, parse_options
from workers.environment import default_engine_options

ROTARY = "-rotary_embedding"
CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"


def fitted(folder: str, *words: str) -> Any:
    """vLLM's options for the model in `folder`, from the user's words."""
    config = from_command_line([folder, "--dtype", "float32", *words], {})
    options = parse_options(config, {"structured_outputs_config": {"backend": "xgrammar"}})
    fit_to_cpu(options)
    return options


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--kv-offloading-size", "1"], "--kv-offloading-size: .* keys and values of old weights"),
        (
            ["--kv-transfer-config", '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'],
            "--kv-transfer-config: .* keys and values of old weights stay there after an update",
        ),
        (
            ["--ec-transfer-config.ec_connector=ECExampleConnector", "--ec-transfer-config.ec_role=ec_both"],
            "--ec-transfer-config: .* images encoded by old weights",
        ),
        (["-dp", "2"], "--data-parallel-size: .* got 2; use --num-workers"),
        (["--data-parallel-rank", "0"], "--data-parallel-rank: .* got 0; use --num-workers"),
        (["--data-parallel-size", "1", "--num-gpu-blocks-override", "64"], ""),
    ],
)  # fmt: skip
def test_options_with_which_an_update_would_be_wrong_are_refused(words: list[str], expected: str):
    config = from_command_line(["model", *words], {})
    defaults = {"structured_outputs_config": {"backend": "xgrammar"}}
    if not expected:
        parse_options(config, defaults)
        return
    with pytest.raises(ConfigError, match=expected):
        parse_options(config, defaults)


def test_only_models_with_a_state_lose_the_prefix_cache(tmp_path: Path):
    with_state = make_family("granite4", tmp_path / "state", 0)
    without = make_family("llama", tmp_path / "none", 0)
    on, off = "--enable-prefix-caching", "--no-enable-prefix-caching"
    assert fitted(with_state).enable_prefix_caching is False
    assert fitted(with_state, off).enable_prefix_caching is False
    assert fitted(without).enable_prefix_caching is None
    assert fitted(without, on).enable_prefix_caching is True
    with pytest.raises(ConfigError, match=r"recurrent layers on a CPU.*; leave it out"):
        fitted(with_state, on)


def test_latent_attention_is_computed_by_kernels_for_float32(tmp_path: Path):
    latent = make_family("deepseek_v3", tmp_path / "latent", 0)
    other = make_family("llama", tmp_path / "other", 0)
    assert fitted(latent).compilation_config.custom_ops == [ROTARY]
    assert fitted(latent).attention_config.backend.name == "CPU_MLA"
    assert fitted(latent, "--dtype", "bfloat16").attention_config.backend is None
    chosen = fitted(latent, "--compilation-config", '{"custom_ops": ["+rotary_embedding"]}')
    assert chosen.compilation_config.custom_ops == ["+rotary_embedding"]
    assert fitted(other).compilation_config.custom_ops == []
    assert fitted(other).attention_config.backend is None


def test_gated_linear_attention_needs_bfloat16(tmp_path: Path):
    folder = make_family("qwen3_next", tmp_path / "linear", 0)
    assert fitted(folder, "--dtype", "bfloat16").dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"--dtype: expected bfloat16 .*, got float32; use"):
        fitted(folder)


def test_adapters_of_experts_need_a_gpu(tmp_path: Path):
    experts = make_family("olmoe", tmp_path / "experts", 0)
    dense = make_family("llama", tmp_path / "dense", 0)
    assert fitted(dense, "--enable-lora").enable_lora
    with pytest.raises(ConfigError, match=r"--enable-lora: .*mixture of experts on a CPU"):
        fitted(experts, "--enable-lora")


def test_adapters_on_a_gpu_need_half_precision(tmp_path: Path):
    folder = make_family("llama", tmp_path / "model", 0)

    def check(*words: str) -> None:
        options = fitted(folder, "--max-model-len", "64", *words)
        check_adapters_on_gpu(options.create_engine_config(UsageContext.LLM_CLASS))

    check()
    check("--enable-lora", "--dtype", "bfloat16")
    with pytest.raises(ConfigError, match=r"--enable-lora: .* got float32; use --dtype bfloat16"):
        check("--enable-lora")


@pytest.mark.parametrize("family", ["nemotron_h", "deepseek_v3", "minimax_m2"])
def test_such_models_are_exact(family: str, tmp_path: Path):
    own = make_family(family, tmp_path / "own", 0)
    with running_server(own, *OPTIONS, log=tmp_path / "log") as server:
        row = text.Row(server, own, own)
        for column in (text.column_cache, text.column_sampled, text.column_scoring):
            column(row)


@pytest.mark.parametrize(
    "words, expected",
    [
        pytest.param([], 2**30, id="default"),
        pytest.param(["--kv-cache-memory-bytes", str(2**28)], 2**28, id="given"),
    ],
)
def test_the_key_value_cache_is_as_large_as_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: int
):
    folder = make_family("llama", tmp_path / "model", 0)
    config = from_command_line([folder, "--dtype", "float32", *words], {})
    environ: dict[str, str] = {}
    options = parse_options(config, default_engine_options(config, environ, on_cpu=True, seed=0))
    monkeypatch.delenv(CACHE_SPACE, raising=False)
    if CACHE_SPACE in environ:
        monkeypatch.setenv(CACHE_SPACE, environ[CACHE_SPACE])
    made = options.create_engine_config(UsageContext.ENGINE_CONTEXT)
    assert made.cache_config.kv_cache_memory_bytes == expected
