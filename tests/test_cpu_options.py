"""Options that titopool chooses for vLLM's CPU build, where vLLM's own choice is wrong or ends it."""

import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.forks import Forks
from tests.matrix import text
from tests.matrix.row import OPTIONS
from tests.model_families import make_family
from tests.servers import running_server

ROTARY = "-rotary_embedding"


# vLLM replaces classes of transformers that other tests of this process may need.
FIT = """
import json, sys
from titopool.errors import ConfigError
from titopool.settings.sources import from_command_line
from workers.engine.start.options import fit_to_cpu, parse_options

found = []
for words in json.loads(sys.argv[1]):
    config = from_command_line(["--dtype", "float32", *words], {})
    options = parse_options(config, {"structured_outputs_config": {"backend": "xgrammar"}})
    try:
        fit_to_cpu(options)
    except ConfigError as error:
        found.append({"error": str(error)})
        continue
    backend = options.attention_config.backend
    found.append({
        "enable_prefix_caching": options.enable_prefix_caching,
        "enable_lora": options.enable_lora,
        "custom_ops": options.compilation_config.custom_ops,
        "backend": backend and backend.name,
    })
print(json.dumps(found))
"""


@functools.cache
def forks() -> Forks:
    return Forks("workers.engine.start.options", "vllm.engine.arg_utils")


def fitted(*commands: list[str]) -> list[SimpleNamespace]:
    """vLLM's options for a model's folder and the user's words; or the `error` of a refusal."""
    answer = forks().run(FIT, json.dumps(commands))
    return [SimpleNamespace(**one) for one in json.loads(answer.splitlines()[-1])]


def test_only_models_with_a_state_lose_the_prefix_cache(tmp_path: Path):
    with_state = make_family("granite4", tmp_path / "state", 0)
    without = make_family("llama", tmp_path / "none", 0)
    on, off = "--enable-prefix-caching", "--no-enable-prefix-caching"
    *found, refused = fitted(
        [with_state], [with_state, off], [without], [without, on], [with_state, on]
    )
    assert [one.enable_prefix_caching for one in found] == [False, False, None, True]
    assert re.search(r"recurrent layers on a CPU.*; leave it out", refused.error)


def test_latent_attention_is_computed_by_kernels_for_float32(tmp_path: Path):
    latent = make_family("deepseek_v3", tmp_path / "latent", 0)
    other = make_family("llama", tmp_path / "other", 0)
    own = ["--compilation-config", '{"custom_ops": ["+rotary_embedding"]}']
    exact, half, chosen, plain = fitted(
        [latent], [latent, "--dtype", "bfloat16"], [latent, *own], [other]
    )
    assert (exact.custom_ops, exact.backend) == ([ROTARY], "CPU_MLA")
    assert half.backend is None
    assert chosen.custom_ops == ["+rotary_embedding"]
    assert (plain.custom_ops, plain.backend) == ([], None)


def test_adapters_of_experts_need_a_gpu(tmp_path: Path):
    experts = make_family("olmoe", tmp_path / "experts", 0)
    dense = make_family("llama", tmp_path / "dense", 0)
    allowed, refused = fitted([dense, "--enable-lora"], [experts, "--enable-lora"])
    assert allowed.enable_lora
    assert re.search(r"--enable-lora: .*mixture of experts on a CPU", refused.error)


@pytest.mark.parametrize("family", ["nemotron_h", "deepseek_v3"])
def test_such_models_are_exact(family: str, tmp_path: Path):
    own = make_family(family, tmp_path / "own", 0)
    with running_server(own, *OPTIONS, log=tmp_path / "log") as server:
        row = text.Row(server, own, own)
        for column in (text.column_cache, text.column_sampled, text.column_scoring):
            column(row)
