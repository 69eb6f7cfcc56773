"""Copies learned from a model's loaders, on a model with loaders like vLLM's."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.stub_tensors import StubModel
from titopool.wire.commands import TensorInfo
from titopool.wire.weight_plan import plan_chunks
from workers.in_model.load.copies import CopyPlan, Tensors, learn, within_layers
from workers.in_model.load.loader import Loader
from workers.in_model.proof.catalogue import Fit
from workers.in_model.receiving.staging import InPlace


class Fused(torch.nn.Module):
    """q, k and v in one parameter, and an embedding with padding."""

    def __init__(self, *, scales: bool = False):
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(8, 3))
        self.embedding = torch.nn.Parameter(torch.zeros(8, 3, dtype=torch.bfloat16))
        self._scales = scales

    is_reloading = False

    def finish(self) -> None:
        """What vLLM does after loading."""

    def load_weights(self, weights):
        rows = {"q": (0, 4), "k": (4, 6), "v": (6, 8)}
        for name, tensor in weights:
            if name == "embedding":
                # Of a tensor twice as large: the other half belongs to another process.
                self.embedding.data[:5].copy_(tensor.narrow(0, 5, 5))
                self.embedding.data[5:].fill_(0)
            else:
                first, end = rows[name]
                self.qkv.data[first:end].copy_(tensor * 2 if self._scales else tensor)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    buffer = torch.rand(24, generator=made)
    return {
        "q": buffer[:12].view(4, 3), "k": buffer[12:18].view(2, 3), "v": buffer[18:].view(2, 3),
        "embedding": torch.rand(10, 3, generator=made),
    }  # fmt: skip


def same(model: Fused, other: Fused) -> bool:
    return all(map(torch.equal, state(model), state(other)))


def state(model: Fused) -> list[torch.Tensor]:
    return [one.clone() for one in model.state_dict().values()]


def learned(model: Any, sent: Tensors, plan: CopyPlan | None = None) -> CopyPlan:
    """Loads `sent` and returns the plan; vLLM's reload is the loaders and a derived tensor."""
    plan = plan or CopyPlan()

    def load() -> None:
        model.load_weights(iter(sent.items()))

    def reload() -> None:
        model.is_reloading = True
        load()
        model.finish()
        model.is_reloading = False

    with torch.no_grad():
        learn(plan, model, sent, load=load, reload=reload)
    return plan


def test_learned_copies_load_the_same_as_the_loaders():
    model, other = Fused(), Fused()
    plan = learned(model, tensors(0))
    other.load_weights(iter(tensors(0).items()))
    assert same(model, other)
    for seed in (1, 2):
        assert plan.fits_tensors(tensors(seed))
        plan.run(tensors(seed))
        other.load_weights(iter(tensors(seed).items()))
        assert same(model, other)


def test_a_partial_update_copies_only_its_tensors():
    model = Fused()
    plan = learned(model, tensors(0))
    before = state(model)
    k = {"k": tensors(1)["k"]}
    plan.run(k)
    assert torch.equal(model.qkv[4:6], k["k"])
    assert torch.equal(model.qkv[:4], before[0][:4])
    assert not plan.fits_tensors({"unknown": torch.zeros(1)})


def test_plans_of_parts_add_up():
    model, plan = Fused(), CopyPlan()
    sent = tensors(0)
    for name, tensor in sent.items():
        learned(model, {name: tensor}, plan)
    assert plan.fits_tensors(sent)


def test_neighbouring_copies_are_joined(monkeypatch):
    class Experts(Fused):
        """The experts of a layer, loaded one after the other in another order."""

        def load_weights(self, weights):
            for _, tensor in weights:
                for expert in (2, 0, 3, 1):
                    self.qkv.data[2 * expert : 2 * expert + 2].copy_(tensor[expert])

    calls: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, of: (calls.append(len(to)), copy(to, of))
    )
    model = Experts()
    plan = learned(model, {"experts": torch.rand(4, 2, 3)})
    sent = {"experts": torch.rand(4, 2, 3)}
    plan.run(sent)
    assert set(calls) == {1}
    assert torch.equal(model.qkv, sent["experts"].reshape(8, 3))


def test_copies_out_of_a_conversion_s_clones_are_learned():
    class Converted(Fused):
        """Experts whose gates and ups transformers separates by chunks, which it clones."""

        def load_weights(self, weights):
            for _, tensor in weights:
                for part, chunk in enumerate(torch.chunk(tensor, 2, dim=1)):
                    for expert, one in enumerate(chunk.contiguous().unbind()):
                        begin = 4 * expert + 2 * part
                        self.qkv.data[begin : begin + 2].copy_(one)

    model = Converted()
    plan = learned(model, {"gate_up": torch.rand(2, 4, 3)})
    sent = {"gate_up": torch.rand(2, 4, 3)}
    assert plan.fits_tensors(sent)
    assert [len(copies) for copies in plan._by_form.values()] == [1]
    plan.run(sent)
    assert torch.equal(model.qkv, sent["gate_up"].reshape(8, 3))


class Transposed(torch.nn.Module):
    """Experts as vLLM keeps them. They come under one name in the module's form or transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.zeros(4, 6, 8))

    def finish(self) -> None:
        """What vLLM does after loading."""

    def load_weights(self, weights):
        for _, tensor in weights:
            is_swapped = tensor.shape != self.experts.shape
            self.experts.data.copy_(tensor.mT if is_swapped else tensor)


def test_copies_are_those_of_a_tensor_s_shape_and_dtype():
    model, plan = Transposed(), CopyPlan()
    forms: list[Any] = [lambda one: one, lambda one: one.mT.contiguous(), lambda one: one.double()]
    for number, form in enumerate(forms):
        sent = {"experts": form(torch.rand(4, 6, 8))}
        # What was learned of another form does not load this one.
        assert not plan.fits_tensors(sent)
        assert len(plan._by_form) == number
        learned(model, sent, plan)
    for form in (*forms, *forms):
        values = torch.rand(4, 6, 8)
        sent = {"experts": form(values)}
        assert plan.fits_tensors(sent)
        plan.run(sent)
        assert torch.equal(model.experts, values)


class Scaling(Fused):
    """Its loaders compute."""

    def __init__(self) -> None:
        super().__init__(scales=True)


class Deriving(Fused):
    """vLLM's reload computes a tensor from the weights; the loaders do not."""

    def __init__(self) -> None:
        super().__init__()
        self.derived = torch.zeros(8)

    def finish(self) -> None:
        self.derived = self.qkv.sum(dim=1)


class Failing(Fused):
    """Its parameters have lost their loaders, which a reload brings back."""

    def load_weights(self, weights):
        if not self.is_reloading:
            raise AttributeError("weight_loader")
        super().load_weights(weights)


@pytest.mark.parametrize("kind", [Scaling, Deriving, Failing])
def test_what_is_more_than_copies_goes_through_the_reload(kind: type[Fused]):
    model, other = kind(), kind()
    for seed in (0, 0, 1):
        sent = tensors(seed)
        before = {name: one.clone() for name, one in sent.items()}
        plan = learned(model, sent)
        assert not plan.fits_tensors(sent)
        assert not plan.may_learn(sent)
        # The proof has left the received values as they were.
        assert all(torch.equal(one, before[name]) for name, one in sent.items())
        learned(other, tensors(seed))
        assert torch.equal(model.qkv[:4], sent["q"] * (2 if kind is Scaling else 1))


def test_a_scalar_parameter_is_not_learned():
    class Scale(Fused):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(1))

        def load_weights(self, weights):
            for _, tensor in weights:
                self.scale.data.fill_(tensor.item())

    model = Scale()
    sent = {"scale": torch.tensor([3.0])}
    assert not learned(model, sent).fits(sent)
    assert model.scale.item() == 3.0


def test_layers_of_parameters_are_found():
    scope = within_layers(["model.layers.1.self_attn.qkv_proj.weight", "model.norm.weight"])
    assert scope("model.layers.1.self_attn.attn")
    assert not scope("model.layers.11.mlp")
    assert scope("model.norm")


def test_an_update_in_place_uses_learned_copies_chunk_by_chunk():
    model, first, second = Fused(), tensors(1), tensors(2)
    proof: Any = SimpleNamespace(fit=Fit(ignored=["head"]))
    loader = Loader(StubModel(model), proof)
    loader._plan = learned(model, first)
    sent = {**second, "head": torch.ones(2)}
    infos = [TensorInfo(name, "float32", list(one.shape)) for name, one in sent.items()]
    # Chunks of two tensors.
    chunks = plan_chunks(infos, 60)
    assert len(chunks) == 3
    staging = InPlace(torch.device("cpu"), chunks)
    messages = [
        torch.cat([sent[piece.tensor.name].flatten() for piece in chunk.pieces]) for chunk in chunks
    ]
    channel: Any = SimpleNamespace(
        start=lambda buffer: buffer.copy_(messages.pop(0).view(torch.uint8)),
        wait=lambda deadline: None,
    )

    def receive() -> None:
        for chunk in chunks:
            staging.receive(channel, chunk, time.monotonic() + 10)

    thread = threading.Thread(target=receive)
    thread.start()
    assert loader.load_in_place(staging.infos, staging.chunks(10.0)) == 4
    thread.join(10)
    expected = Fused()
    with torch.no_grad():
        expected.load_weights(second.items())
    assert same(model, expected)
