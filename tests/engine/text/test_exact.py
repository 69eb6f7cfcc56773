"""`--exact`: what it sets, and where it is refused."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.servers import serve_process
from tests.kit.forks import Forks
from tests.kit.models.model_families import make_family
from titopool.errors import ConfigError
from titopool.settings.gpus import visible_gpus
from workers.engine.start.exact import VARIABLE, choose_kernels

# vLLM replaces classes of transformers that other tests of this process may need.
PREAMBLE = """
import json, sys
from titopool.errors import ConfigError
from titopool.settings.sources import from_command_line
from workers.engine.start.exact import fit_to_exact
from workers.engine.start.options import parse_options

def options_of(*words):
    config = from_command_line([sys.argv[1], "--exact", "--dtype", "bfloat16", *words], {})
    options = parse_options(config, {"structured_outputs_config": {"backend": "xgrammar"}})
    fit_to_exact(options)
    return options

def refusal_of(*words):
    try:
        options_of(*words)
    except ConfigError as error:
        return str(error)

def answer(value):
    print(json.dumps(value))
"""


@functools.cache
def forks() -> Forks:
    return Forks("workers.engine.start.options", "vllm.engine.arg_utils")


def run(folder: str, script: str) -> Any:
    """The value that `script` passes to `answer`; `options_of(…)` are vLLM's under `--exact`."""
    return json.loads(forks().run(PREAMBLE + script, folder).splitlines()[-1])


def test_a_gpu_s_kernels_are_chosen_before_vllm_is_imported():
    environ: dict[str, str] = {}
    choose_kernels(environ, on_cpu=False)
    assert environ == {VARIABLE: "1"}
    with pytest.raises(ConfigError, match=f"expected {VARIABLE} unset or 1, got '0'"):
        choose_kernels({VARIABLE: "0"}, on_cpu=False)


def test_logits_are_computed_in_float32_unless_the_user_chose(tmp_path: Path):
    folder = make_family("llama", tmp_path / "model", 0)
    script = """
chosen = options_of("--hf-overrides", '{"head_dtype": "model"}')
answer([
    str(options_of().create_model_config().head_dtype),
    options_of("--hf-overrides", '{"rope_theta": 5000.0}').hf_overrides,
    str(chosen.create_model_config().head_dtype),
])
"""
    own, beside, chosen = run(folder, script)
    assert own == "torch.float32"
    assert beside == {"head_dtype": "float32", "rope_theta": 5000.0}
    assert chosen == "torch.bfloat16"


def test_speculative_decoding_is_refused(tmp_path: Path):
    folder = make_family("llama", tmp_path / "model", 0)
    script = """
draft = '{"method": "ngram", "num_speculative_tokens": 2}'
answer(refusal_of("--speculative-config", draft))
"""
    assert "expected no --speculative-config" in run(folder, script)


def test_an_old_gpu_is_refused(tmp_path: Path):
    script = """
from vllm.platforms import current_platform

current_platform.is_cuda = lambda: True
current_platform.has_device_capability = lambda least: least <= 75
current_platform.get_device_name = lambda: "Tesla T4"
answer(refusal_of())
"""
    folder = make_family("llama", tmp_path / "model", 0)
    refusal = run(folder, script)
    assert re.search(r"capability 8\.0 or higher.*, got Tesla T4; leave", refusal)


@pytest.mark.skipif(bool(visible_gpus()), reason="this machine's GPU has the kernels")
def test_a_cpu_ends_the_start_with_the_reason(tmp_path: Path):
    log = tmp_path / "log"
    process, _ = serve_process("--exact", log=log)
    assert process.wait(60) != 0
    assert "exact: expected a GPU" in log.read_text()
    assert "Traceback" not in log.read_text()
