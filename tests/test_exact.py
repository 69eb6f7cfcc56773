"""`--exact`: what it sets, and where it is refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.model_families import make_family
from tests.servers import serve_process
from titopool.errors import ConfigError
from titopool.settings.gpus import visible_gpus
from titopool.settings.sources import from_command_line
from workers.engine.start.exact import VARIABLE, choose_kernels, fit_to_exact
from workers.engine.start.options import parse_options


def options_of(folder: str, *words: str) -> Any:
    """vLLM's options under `--exact`, from the user's words."""
    config = from_command_line([folder, "--exact", "--dtype", "bfloat16", *words], {})
    options = parse_options(config, {"structured_outputs_config": {"backend": "xgrammar"}})
    fit_to_exact(options)
    return options


def test_a_gpu_s_kernels_are_chosen_before_vllm_is_imported():
    environ: dict[str, str] = {}
    choose_kernels(environ, on_cpu=False)
    assert environ == {VARIABLE: "1"}
    with pytest.raises(ConfigError, match=f"expected {VARIABLE} unset or 1, got '0'"):
        choose_kernels({VARIABLE: "0"}, on_cpu=False)


def test_logits_are_computed_in_float32_unless_the_user_chose(tmp_path: Path):
    folder = make_family("llama", tmp_path / "model", 0)
    dtype = options_of(folder).create_model_config().head_dtype
    assert str(dtype) == "torch.float32"
    beside = options_of(folder, "--hf-overrides", '{"rope_theta": 5000.0}').hf_overrides
    assert beside == {"head_dtype": "float32", "rope_theta": 5000.0}
    chosen = options_of(folder, "--hf-overrides", '{"head_dtype": "model"}')
    assert str(chosen.create_model_config().head_dtype) == "torch.bfloat16"


def test_speculative_decoding_is_refused(tmp_path: Path):
    folder = make_family("llama", tmp_path / "model", 0)
    draft = '{"method": "ngram", "num_speculative_tokens": 2}'
    with pytest.raises(ConfigError, match="expected no --speculative-config"):
        options_of(folder, "--speculative-config", draft)


def test_an_old_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from vllm.platforms import current_platform

    replaced: dict[str, Any] = {
        "is_cuda": lambda: True, "has_device_capability": lambda least: least <= 75,
        "get_device_name": lambda: "Tesla T4",
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(current_platform, name, value)
    folder = make_family("llama", tmp_path / "model", 0)
    with pytest.raises(ConfigError, match=r"capability 8\.0 or higher.*, got Tesla T4; leave"):
        options_of(folder)


@pytest.mark.skipif(bool(visible_gpus()), reason="this machine's GPU has the kernels")
def test_a_cpu_ends_the_start_with_the_reason(tmp_path: Path):
    log = tmp_path / "log"
    process, _ = serve_process("--exact", log=log)
    assert process.wait(60) != 0
    assert "exact: expected a GPU" in log.read_text()
    assert "Traceback" not in log.read_text()
