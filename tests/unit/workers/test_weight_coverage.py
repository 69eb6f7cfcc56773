"""Coverage of loaders' writes, in dry runs too: toy models in vLLM's own layerwise reload."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from titopool.wire.commands import TensorInfo
from workers.in_model.checkpoint_files import Refused
from workers.in_model.load.reload import reload
from workers.in_model.proof.catalogue import Catalogue, Fit
from workers.in_model.proof.coverage import HalfLoaded, copied_sinks, renew_sinks
from workers.in_model.proof.dry_runs import DryRuns, dry_run

Load = Callable[["Toy", str, torch.Tensor], None]


class Layer(torch.nn.Module):
    def __init__(self, *names: str):
        super().__init__()
        for name in names:
            value = torch.zeros(4, 3)
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


class Toy(torch.nn.Module):
    """Two layers, the first with two parameters; `load` writes one tensor to its parameter."""

    def __init__(self, load: Load):
        super().__init__()
        self.first = Layer("one", "two")
        self.second = Layer("one")
        self.seen: list[str] = []
        self._load = load
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        record_metadata_for_reloading(self)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.seen = [*self.seen, name]
            self._load(self, name, tensor)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: one.clone() for name, one in self.named_parameters()}


NAMES = ["first.one", "first.two", "second.one"]
INFOS = [TensorInfo(name, "float32", [4, 3]) for name in NAMES]
FIT = Fit()


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(4, 3) for name in NAMES}


def by_loader(model: Toy, name: str, tensor: torch.Tensor) -> None:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    parameter = model.get_parameter(name)
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


def around_loader(model: Toy, name: str, tensor: torch.Tensor) -> None:
    """One parameter in two halves, one through its loader, the third by a plain copy."""
    if name == "first.one":
        model.first.one.data[:2].copy_(tensor[:2])
        model.first.one.data.narrow(0, 2, 2).copy_(tensor.narrow(0, 2, 2))
    elif name == "second.one":
        model.second.one.copy_(tensor)
    else:
        by_loader(model, name, tensor)


def reload_model(model: Toy, sent: dict[str, torch.Tensor], coverage: Any = None) -> None:
    with torch.no_grad():
        reload(model, None, iter(sent.items()), coverage, on_cpu=False)


@pytest.mark.parametrize("load", [by_loader, around_loader])
@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
@pytest.mark.parametrize("is_dry_run", [True, False])
def test_a_reload_writes_every_tensor_also_around_loaders(
    load: Load, order: list[str], is_dry_run: bool
):
    model = Toy(load)
    memory = {name: one.data_ptr() for name, one in model.named_parameters()}
    coverage = dry_run(model, INFOS, is_reload=True) if is_dry_run else None
    for _ in range(3):
        sent = tensors()
        reload_model(model, {name: sent[name] for name in order}, coverage)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, sent[name]), name
            # CUDA graphs keep the parameter's address.
            assert parameter.data_ptr() == memory[name]
    if coverage is not None:
        assert coverage.is_confirmed
        assert coverage.outside_loaders == (
            set() if load is by_loader else {"first.one", "second.one"}
        )


def creates_parameter(model: Toy, name: str, tensor: torch.Tensor) -> None:
    """Like vLLM, which creates the bias of some heads while loading."""
    by_loader(model, name, tensor)
    if name == "second.one":
        model.second.bias = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        model.second.bias.data.copy_(tensor)


def test_a_parameter_created_during_loading_is_ignored():
    model = Toy(creates_parameter)
    coverage = dry_run(model, INFOS, is_reload=True)
    assert not hasattr(model.second, "bias")
    assert coverage.uncovered(dict, is_whole=True) == []


def test_a_partial_reload_keeps_the_other_layers():
    model = Toy(around_loader)
    before, sent = model.state(), tensors()
    reload_model(
        model, {"second.one": sent["second.one"]}, dry_run(model, INFOS[2:], is_reload=True)
    )
    assert torch.equal(model.second.one, sent["second.one"])
    assert torch.equal(model.first.one, before["first.one"])


def by_loader_after_move(model: Toy, name: str, tensor: torch.Tensor) -> None:
    """Like loaders that first move a tensor to the model's GPU."""
    by_loader(model, name, tensor.to("cpu", torch.float64).to(torch.float32))


@pytest.mark.parametrize("is_reload", [True, False])
@pytest.mark.parametrize("load", [by_loader, around_loader, by_loader_after_move])
def test_a_dry_run_changes_nothing(load: Load, is_reload: bool):
    model = Toy(load)
    reload_model(model, tensors())
    before, objects = model.state(), dict(model.named_parameters())
    seen, attributes = list(model.seen), dict(model.first.one.__dict__)
    for _ in range(2):
        coverage = dry_run(model, INFOS, is_reload=is_reload)
        assert coverage.written == dict.fromkeys(NAMES, 12)
        assert coverage.uncovered(dict, is_whole=True) == []
    assert model.seen == seen
    assert model.first.one.__dict__ == attributes
    for name, parameter in model.named_parameters():
        assert parameter is objects[name]
        assert torch.equal(parameter, before[name])


def skips_one(model: Toy, name: str, tensor: torch.Tensor) -> None:
    """A loader that skips tensors it does not know, as many of vLLM's do."""
    if name != "second.one":
        by_loader(model, name, tensor)


def writes_half(model: Toy, name: str, tensor: torch.Tensor) -> None:
    if name == "first.two":
        model.first.two.data[:2].copy_(tensor[:2])
    else:
        by_loader(model, name, tensor)


@pytest.mark.parametrize(
    "load, name, num",
    [(skips_one, "second.one", 0), (writes_half, "first.two", 6)],
    ids=["not-at-all", "by-half"],
)
@pytest.mark.parametrize("is_reload", [True, False])
def test_a_dry_run_finds_parameters_that_would_stay_old(
    load: Load, name: str, num: int, is_reload: bool
):
    coverage = dry_run(Toy(load), INFOS, is_reload=is_reload)
    usual = dict.fromkeys(NAMES, 12)
    assert coverage.uncovered(lambda: usual, is_whole=True) == [name]
    # What the model's own checkpoint does not fill either is padding, or set elsewhere.
    assert coverage.uncovered(lambda: usual | {name: num}, is_whole=True) == []
    if num == 0:
        assert coverage.uncovered(lambda: usual, is_whole=False) == []


def test_a_dry_run_finds_uninitialised_parameters_of_a_reloaded_layer():
    coverage = dry_run(Toy(by_loader), INFOS[:1], is_reload=True)
    assert coverage.uncovered(dict, is_whole=False) == ["first.two"]
    # Without a reload, the loaders write only to the named tensor.
    assert dry_run(Toy(by_loader), INFOS[:1], is_reload=False).uncovered(dict, is_whole=False) == []


def replaces_memory(model: Toy, name: str, tensor: torch.Tensor) -> None:
    if name == "second.one":
        model.second.one.data = tensor.clone()
    else:
        by_loader(model, name, tensor)


class Attention(Layer):
    """vLLM reloads layers with this method after all other layers."""

    def process_weights_after_loading(self, dtype: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("kind", ["memory", "attention"])
def test_a_dry_run_finds_writes_that_a_reload_cannot_track(kind: str):
    model = Toy(replaces_memory if kind == "memory" else around_loader)
    if kind == "attention":
        model.second.__class__ = Attention
    objects = {name: one.data_ptr() for name, one in model.named_parameters()}
    coverage = dry_run(model, INFOS, is_reload=True)
    assert "second.one" in coverage.uncovered(dict, is_whole=True)
    assert {name: one.data_ptr() for name, one in model.named_parameters()} == objects


def test_tied_weights_are_covered_once():
    model = Toy(lambda model, name, tensor: name == "second.one" or by_loader(model, name, tensor))
    model.second.one = model.first.one
    for is_reload in (True, False):
        coverage = dry_run(model, INFOS, is_reload=is_reload)
        assert coverage.uncovered(lambda: dict.fromkeys(NAMES, 12), is_whole=True) == []


def loads_twice(model: Toy, name: str, tensor: torch.Tensor) -> None:
    """vLLM counts elements, finishes the layer too early and drops the remaining tensors."""
    by_loader(model, name, tensor)
    if name == "first.one":
        by_loader(model, name, tensor)


def test_a_tensor_that_vllm_drops_is_an_error():
    model = Toy(loads_twice)
    coverage = dry_run(model, INFOS, is_reload=True)
    assert coverage.uncovered(dict, is_whole=True) == []
    with pytest.raises(HalfLoaded, match=r"1 of the model's .* first\.two; start the server with"):
        reload_model(model, tensors(), coverage)
    assert not coverage.is_confirmed


def loads_once(model: Toy, name: str, tensor: torch.Tensor) -> None:
    """Loads the second layer only once."""
    if name != "second.one" or model.seen.count(name) == 1:
        by_loader(model, name, tensor)


def test_a_load_that_writes_less_than_its_dry_run_is_an_error():
    model = Toy(loads_once)
    coverage = dry_run(model, INFOS, is_reload=True)
    model.seen = ["second.one"]
    with pytest.raises(HalfLoaded, match=r"second\.one"):
        reload_model(model, tensors(), coverage)


class Backend:
    """Holds the sinks it was made with, or a copy of them."""

    def __init__(self, sinks: torch.Tensor):
        self.sinks = sinks


def test_copies_of_sinks_are_renewed_or_the_update_is_refused():
    model, fit = Toy(by_loader), Catalogue(INFOS).fit(INFOS, is_partial=False)
    owner = model.second
    owner.sinks = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    owner.attn = torch.nn.Module()
    owner.attn.impl = Backend(owner.sinks)
    assert list(copied_sinks(model)) == []
    with torch.inference_mode():
        copied = owner.attn.impl.sinks = owner.sinks.to(torch.float64)
    owner.sinks.data.fill_(3.0)
    assert [path for path, *_ in copied_sinks(model)] == ["second.attn"]
    renew_sinks(model)
    assert owner.attn.impl.sinks is copied
    assert copied.tolist() == [3.0] * 4
    owner.attn.impl = Backend(torch.ones(5))
    checker = DryRuns(model, Catalogue(INFOS), is_quantized=True)
    with pytest.raises(Refused, match=r"second\.attn \(its sinks\)"):
        checker.check(INFOS, fit, is_partial=False, is_reload=False)


def test_weights_that_a_layer_has_packed_for_amx_are_refused():
    model, fit = Toy(by_loader), Catalogue(INFOS).fit(INFOS, is_partial=False)
    model.second.mla_attn = torch.nn.Module()
    model.second.mla_attn.mla_attn = torch.nn.Module()
    model.second.mla_attn.mla_attn.is_amx_bmm_enabled = True
    checker = DryRuns(model, Catalogue(INFOS), is_quantized=False)
    with pytest.raises(Refused, match=r"second\.kv_b_proj\.weight \(packed for AMX\)"):
        checker.check(INFOS, fit, is_partial=False, is_reload=True)


def reads_values(model: Toy, name: str, tensor: torch.Tensor) -> None:
    if float(tensor.sum()) < 1e9:
        by_loader(model, name, tensor)


def dry_runs(load: Load) -> DryRuns:
    return DryRuns(Toy(load), Catalogue(INFOS), is_quantized=False)


def test_a_refusal_lists_the_parameters_that_would_stay_old():
    fit = Catalogue(INFOS).fit(INFOS, is_partial=False)
    checker = dry_runs(around_loader)
    assert checker.check(INFOS, fit, is_partial=False, is_reload=True) is checker.check(
        INFOS, fit, is_partial=False, is_reload=True
    )
    with pytest.raises(Refused, match=r"1 of the model's parameters would keep .* second\.one;"):
        dry_runs(replaces_memory).check(INFOS, fit, is_partial=False, is_reload=True)
    # The model's own checkpoint would not fill the parameter either.
    with pytest.raises(Refused, match=r"second\.one;"):
        dry_runs(skips_one).check(INFOS, fit, is_partial=False, is_reload=True)
    scales = DryRuns(Toy(skips_one), Catalogue(INFOS), is_quantized=True)
    assert scales.check(INFOS, fit, is_partial=False, is_reload=True) is not None
    partial = Catalogue(INFOS).fit(INFOS[2:], is_partial=True)
    assert checker.check(INFOS[2:], partial, is_partial=True, is_reload=True).written == {
        "second.one": 12
    }


def test_a_partial_update_of_an_unknown_model_is_accepted():
    checker = DryRuns(Toy(by_loader), Catalogue([]), is_quantized=False)
    part = checker.check(INFOS[2:], FIT, is_partial=True, is_reload=True)
    assert part is not None
    assert part.written == {"second.one": 12}
    with pytest.raises(Refused, match=r"2 of the model's .* first\.one, first\.two;"):
        checker.check(INFOS[2:], FIT, is_partial=False, is_reload=True)


def test_a_loader_that_reads_values_has_no_dry_run():
    checker = dry_runs(reads_values)
    fit = Catalogue(INFOS).fit(INFOS, is_partial=False)
    assert checker.check(INFOS, fit, is_partial=False, is_reload=True) is None
    model, sent = Toy(reads_values), tensors()
    reload_model(model, sent)
    assert torch.equal(model.first.two, sent["first.two"])
