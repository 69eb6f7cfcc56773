"""Updates of a tiny model there and back, in every form: all of it is new, and exact.

Runs in a process of its own, because an engine of vLLM changes its process.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from harness.servers import need_gpus
from tests.kit.models import reference
from tests.kit.models.model_families import FURTHER_TOKEN, make_family
from tests.kit.models.weights import NUM_TOKENS, TOLERANCE
from tests.kit.trainers.trainer import DEVICE
from tests.kit.workers.engine_in_process import PROMPT, engine_in_process

Greedy = tuple[list[int], list[float]]
BIAS = "e_score_correction_bias"
# Ends of the names of buffers that no update changes.
CONSTANT = ("cos_sin_cache", "_scale", "normalizer", "inv_freq", "mup_vector")
ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    # vLLM 0.32 takes a kernel for bfloat16 where the CPU has AMX. Its rotary embedding is wrong for
    # several heads on a CPU, as the bare engine shows; torch's own operations replace it.
    "deepseek_v3": {
        "attention_config": {"backend": "CPU_MLA"},
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    },
}

# Several models may share a GPU.
ON_GPU: dict[str, Any] = {
    "gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 2**30, "enforce_eager": True,
}  # fmt: skip

# Of an engine's start and five updates.
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def in_child() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that the tests of a module share."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        child = psutil.Process(pool.submit(os.getpid).result(TIMEOUT_S))
        try:
            yield lambda do, *args: pool.submit(do, *args).result(TIMEOUT_S)
        finally:
            # The pool would wait for an engine that hangs.
            child.kill()


def check_family(family: str, folder: Path, in_child: Callable[..., Any]) -> None:
    """Makes two models of a family, and updates one by the other and back."""
    need_gpus(2)
    own = make_family(family, folder / "own", 0)
    other = make_family(family, folder / "other", 1)
    in_child(there_and_back, family, own, other)


def there_and_back(family: str, own: str, other: str) -> None:
    """Serves `own`, loads `other` and `own` again, each in several forms.

    Raises:
        AssertionError: a part of the model is neither new nor what vLLM's own loading makes of it.
    """
    seen: dict[str, Any] = {"greedy": [], "reports": []}
    # Before vLLM is imported, which replaces some of transformers' classes.
    new = reference.reference_model(other)
    norm = last_norm(own)
    expected = [expected_greedy(one) for one in (own, other)]
    options = ENGINE_OPTIONS.get(family, {}) if DEVICE == "cpu" else ON_GPU
    with engine_in_process(own, **options) as engine:

        def look(report: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
            if report is not None:
                seen["reports"].append(report)
            seen["greedy"].append(engine.greedy())
            return engine.memory(), engine.digests()

        at_first, first_digests = look()
        # By the names of the trainer's module.
        there, there_digests = look(engine.update(list(new.state_dict().items()), is_stock=False))
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
        changed, _ = look(engine.update([norm], is_stock=False, partial=True))
        differing = {name for name in there if not same({name: changed[name]}, there)}
        assert {name.rpartition("model.")[2] for name in differing} == {
            norm[0].removeprefix("model.")
        }
        parameters = [(name, one.detach()) for name, one in new.named_parameters()]
        look(engine.update(parameters, is_stock=True))
        assert same(engine.memory(), there)
    check_reports(seen, own)
    check_greedy(seen["greedy"], *expected)


def same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether all tensors of `some` equal those of `others` bit by bit."""
    return all(bool((tensor == others[name]).all()) for name, tensor in some.items())


def last_norm(folder: str) -> tuple[str, Any]:
    """Name and value of the norm after the last layer."""
    parameters = reference.reference_model(folder).named_parameters()
    (norm,) = [one for one in parameters if "norm" in one[0] and ".layers." not in one[0]]
    return norm[0], norm[1].detach()


def stored_tensors(folder: str) -> list[tuple[str, Any]]:
    """All tensors of a checkpoint."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return [item for file in files for item in load_file(file).items()]


def check_reports(seen: dict[str, Any], own: str) -> None:
    """Nothing was left out, but for what a family's checkpoint has and nobody loads."""
    for report in seen["reports"][:2]:
        assert (report["missing"], report["kept"]) == ([], [])
        assert all(name.startswith(("lm_head.", FURTHER_TOKEN)) for name in report["ignored"])
    kept = {name.rpartition(".")[2] for name in seen["reports"][-1]["kept"]}
    assert kept == ({BIAS} if any(BIAS in name for name, _ in stored_tensors(own)) else set())


def check_greedy(greedy: list[Greedy], of_own: Greedy, of_other: Greedy) -> None:
    """After each update the ids and log-probabilities are transformers' for those weights."""
    at_first, there, back, from_folder, _, again = greedy
    assert back == at_first
    assert from_folder == again == there
    for found, expected in ((at_first, of_own), (there, of_other)):
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], abs=TOLERANCE)
    # The prompt's last token, which some models repeat, would hide a difference of ids only.
    assert max(abs(one - two) for one, two in zip(at_first[1], there[1], strict=True)) > 0.1


def expected_greedy(folder: str) -> Greedy:
    """transformers' ids and log-probabilities."""
    ids = reference.greedy(folder, PROMPT, NUM_TOKENS)
    rows = reference.logprobs(folder, PROMPT, ids)
    return ids, [float(row[one]) for row, one in zip(rows, ids, strict=True)]
