"""Updates of tiny models of many families, there and back: all of the model is new, and exact.

Each family's engine runs in the same process, which this module starts for all of them.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import reference
from tests.engine_in_process import PROMPT, engine_in_process
from tests.model_families import FAMILIES, FURTHER_TOKEN, make_family, module_tensors
from tests.servers import need_gpus
from tests.trainer import DEVICE
from tests.weights import NUM_TOKENS, TOLERANCE

Greedy = tuple[list[int], list[float]]
# Of an engine's start and five updates.
TIMEOUT_S = 600
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
BIAS = "e_score_correction_bias"
# Ends of the names of buffers that no update changes.
CONSTANT = ("cos_sin_cache", "_scale", "normalizer")
ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    # vLLM 0.32 takes a kernel for bfloat16 where the CPU has AMX. Its rotary embedding is wrong for
    # several heads on a CPU, as the bare engine shows; torch's own operations replace it.
    "deepseek_v3": {
        "attention_config": {"backend": "CPU_MLA"},
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    },
}
# vLLM's CPU build cannot route their tokens: its router knows no sigmoid without groups.
ONLY_LOADED = ("minimax_m2",)


@pytest.fixture(scope="module")
def in_child() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that tests of this module share."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield lambda do, *args: pool.apply_async(do, args).get(TIMEOUT_S)


def there_and_back(family: str, own: str, other: str) -> dict[str, Any]:
    """Runs in the child: serves `own`, loads `other` and `own` again, each in several forms.

    Raises:
        AssertionError: a part of the model is neither new nor what vLLM's own loading makes of it.
    """
    seen: dict[str, Any] = {"greedy": [], "reports": []}
    options = ENGINE_OPTIONS.get(family, {}) if DEVICE == "cpu" else {}
    with engine_in_process(own, **options) as engine:

        def look(report: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
            if report is not None:
                seen["reports"].append(report)
            seen["greedy"].append(None if family in ONLY_LOADED else engine.greedy())
            return engine.memory(), engine.digests()

        at_first, first_digests = look()
        # By the names of the trainer's module.
        there, there_digests = look(engine.update(module_tensors(other), is_stock=False))
        assert there.keys() == at_first.keys()
        for name, tensor in there.items():
            num_same = int((tensor == at_first[name]).sum())
            assert not num_same or name.endswith(CONSTANT), f"{name}: {num_same} are as before"
        # By the names of the checkpoint.
        _, back_digests = look(engine.update(stored_tensors(own), is_stock=True))
        assert same(engine.memory(), at_first)
        assert back_digests.items() >= first_digests.items()
        _, from_folder = look(engine.update_from_folder(other))
        assert same(engine.memory(), there)
        assert from_folder == there_digests
        # One layer, and then parameters without buffers, which stay.
        norm = [one for one in module_tensors(own) if one[0] == "model.norm.weight"]
        changed, _ = look(engine.update(norm, is_stock=False, partial=True))
        differing = {name for name in there if not same({name: changed[name]}, there)}
        assert {name.rpartition("model.")[2] for name in differing} == {"norm.weight"}
        look(engine.update(parameters(other), is_stock=True))
        assert same(engine.memory(), there)
    return seen


def same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether all tensors of `some` equal those of `others` bit by bit."""
    return all(bool((tensor == others[name]).all()) for name, tensor in some.items())


def stored_tensors(folder: str) -> list[tuple[str, Any]]:
    """All tensors of a checkpoint."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return [item for file in files for item in load_file(file).items()]


def parameters(folder: str) -> list[tuple[str, Any]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return [(name, one.detach()) for name, one in model.named_parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_updates_there_and_back_are_exact(
    family: str, tmp_path: Path, in_child: Callable[..., Any]
):
    need_gpus(2)
    own = make_family(family, tmp_path / "own", 0)
    other = make_family(family, tmp_path / "other", 1)
    seen = in_child(there_and_back, family, own, other)
    for report in seen["reports"][:2]:
        assert (report["missing"], report["kept"]) == ([], [])
        assert all(name.startswith(("lm_head.", FURTHER_TOKEN)) for name in report["ignored"])
    kept = {name.rpartition(".")[2] for name in seen["reports"][-1]["kept"]}
    assert kept == ({BIAS} if any(BIAS in name for name, _ in stored_tensors(own)) else set())
    if family in ONLY_LOADED:
        return
    at_first, there, back, from_folder, _, again = seen["greedy"]
    assert back == at_first
    assert from_folder == again == there
    assert_exact(at_first, own)
    assert_exact(there, other)
    # The prompt's last token, which some models repeat, would hide a difference of ids only.
    assert max(abs(one - two) for one, two in zip(at_first[1], there[1], strict=True)) > 0.1


def assert_exact(greedy: Greedy, folder: str) -> None:
    """Checks that ids and log-probabilities equal transformers' for `folder`."""
    ids = reference.greedy(folder, PROMPT, NUM_TOKENS)
    rows = reference.logprobs(folder, PROMPT, ids)
    assert greedy[0] == ids
    expected = [float(row[one]) for row, one in zip(rows, ids, strict=True)]
    assert greedy[1] == pytest.approx(expected, abs=TOLERANCE)
