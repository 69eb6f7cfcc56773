"""Copies learned from a model's loaders, on a model with loaders like vLLM's."""

import torch

from workers.in_model.copies import keeps_checkpoints_layout, load_and_learn


class Fused(torch.nn.Module):
    """q, k and v in one parameter, and an embedding with padding."""

    def __init__(self, *, scales: bool = False):
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(8, 3))
        self.embedding = torch.nn.Parameter(torch.zeros(8, 3, dtype=torch.bfloat16))
        self._scales = scales

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


def state(model: Fused) -> list[torch.Tensor]:
    return [one.clone() for one in model.state_dict().values()]


def test_learned_copies_load_the_same_as_the_loaders():
    model, other = Fused(), Fused()
    plan = load_and_learn(model, tensors(0))
    assert plan is not None
    for seed in (1, 2):
        assert plan.fits(tensors(seed))
        plan.run(tensors(seed))
        other.load_weights(iter(tensors(seed).items()))
        for copied, loaded in zip(state(model), state(other), strict=True):
            assert torch.equal(copied, loaded)


def test_a_partial_update_copies_only_its_tensors():
    model = Fused()
    plan = load_and_learn(model, tensors(0))
    assert plan is not None
    before = state(model)
    k = {"k": tensors(1)["k"]}
    plan.run(k)
    assert torch.equal(model.qkv[4:6], k["k"])
    assert torch.equal(model.qkv[:4], before[0][:4])
    assert not plan.fits({"unknown": torch.zeros(1)})


def test_loaders_that_compute_are_not_learned():
    model = Fused(scales=True)
    assert load_and_learn(model, tensors(0)) is None
    assert torch.equal(model.qkv[:4], tensors(0)["q"] * 2)


def test_a_scalar_parameter_is_not_learned():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(1))

        def load_weights(self, weights):
            for _, tensor in weights:
                self.scale.data.fill_(tensor.item())

    model = Scale()
    assert load_and_learn(model, {"scale": torch.tensor([3.0])}) is None
    assert model.scale.item() == 3.0


def test_only_plain_layers_on_a_gpu_are_copied_into():
    assert not keeps_checkpoints_layout(Fused(), None)
    assert not keeps_checkpoints_layout(Fused(), "fp8")
