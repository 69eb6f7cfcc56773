"""PEFT's models: what is sent equals PEFT's own merge, and the trainer's model never changes."""

import copy
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from peft.tuners.lora import LoraLayer
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from harness.servers import Server
from tests.kit.models.weights import TOLERANCE
from tests.kit.trainers.trainer import DEVICE
from tests.kit.trainers.trainer_messages import assert_same, sent
from titopool import Client
from titopool.client.weights.sources import Source
from titopool.client.weights_client import WeightsError

IDS = [42, 139, 14, 7, 99]
SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def base_model(*, is_tied: bool = False) -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=is_tied))


def moe_model() -> Any:
    torch.manual_seed(0)
    shape = {**SHAPE, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, tie_word_embeddings=False))


def shaken(model: Any) -> Any:
    """The model with random values in all that trains: a new adapter changes nothing else."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def lora(base: Any, **options: Any) -> Any:
    return shaken(get_peft_model(base, LoraConfig(r=4, lora_alpha=12, **options)))


def with_two_adapters() -> Any:
    model = lora(base_model(), target_modules=["q_proj", "up_proj"])
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return shaken(model)


def with_one_merged() -> Any:
    model = with_two_adapters()
    model.merge_adapter(["second"])
    return model


def half() -> Any:
    """A base in bfloat16; PEFT keeps the adapter in float32."""
    return lora(base_model().to(torch.bfloat16), target_modules="all-linear")


MODELS: dict[str, Callable[[], Any]] = {
    "attention": lambda: lora(base_model(), target_modules=["q_proj", "v_proj"]),
    "tied": lambda: lora(base_model(is_tied=True), target_modules="all-linear"),
    "embedding": lambda: lora(base_model(), target_modules=["embed_tokens", "lm_head"]),
    "scalings": lambda: lora(
        base_model(), target_modules=["q_proj", "o_proj"], use_rslora=True,
        rank_pattern={"q_proj": 2}, alpha_pattern={"o_proj": 5},
    ),
    "saved-modules": lambda: lora(
        base_model(), target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]
    ),
    "two-adapters": with_two_adapters,
    "one-merged": with_one_merged,
    "bfloat16": half,
    "fused-experts": lambda: lora(
        moe_model(), target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    ),
    "adalora": lambda: shaken(
        get_peft_model(base_model(), AdaLoraConfig(target_modules=["q_proj"], total_step=10))
    ),
}  # fmt: skip


@pytest.mark.parametrize("chunk_bytes", [0, 10**6])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_sent_equals_pefts_own_merge(name: str, chunk_bytes: int):
    model = MODELS[name]()
    before = copy.deepcopy(model.state_dict())
    merged = [one.merged_adapters[:] for one in model.modules() if isinstance(one, LoraLayer)]
    expected = copy.deepcopy(model).merge_and_unload()
    found = sent(Source(model), chunk_bytes)
    assert_same(found, [(name, one.detach()) for name, one in expected.named_parameters()])
    assert_same(list(model.state_dict().items()), list(before.items()))
    after = [one.merged_adapters for one in model.modules() if isinstance(one, LoraLayer)]
    assert after == merged
    base = dict(MODELS[name]().get_base_model().named_parameters())
    assert any(name not in base or not torch.equal(one, base[name]) for name, one in found)


def test_adapters_that_transformers_injected_are_merged():
    config = LoraConfig(target_modules=["q_proj"])
    model = shaken(inject_adapter_in_model(config, base_model()))
    expected = {
        name.replace(".base_layer", ""): one
        for name, one in model.named_parameters()
        if "lora_" not in name
    }
    for index, layer in enumerate(model.model.layers):
        query = layer.self_attn.q_proj
        name = f"model.layers.{index}.self_attn.q_proj.weight"
        expected[name] = query.base_layer.weight + query.get_delta_weight("default")
    assert_same(sent(Source(model), 100), list(expected.items()))


def test_disabled_adapters_are_not_sent():
    model = lora(base_model(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    with model.disable_adapter():
        found = sent(Source(model), 100)
    assert_same(found, list(base_model().named_parameters()))


def test_one_weight_is_merged_at_a_time(monkeypatch: pytest.MonkeyPatch):
    model = lora(base_model(), target_modules="all-linear")
    merged = []
    layer = type(model.get_base_model().model.layers[0].self_attn.q_proj)
    delta = layer.get_delta_weight
    monkeypatch.setattr(layer, "get_delta_weight", lambda *a: merged.append(a) or delta(*a))
    source = Source(model)
    for info in source.infos:
        num_before = len(merged)
        with source.next_tensor(info):
            assert len(merged) - num_before == ("_proj" in info.name)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dora": (
        lambda: lora(base_model(), target_modules=["q_proj"], use_dora=True),
        r"q_proj.*without variants.*got Dora.*merge_and_unload",
    ),
    "ia3": (
        lambda: get_peft_model(
            base_model(), IA3Config(target_modules=["k_proj"], feedforward_modules=[])
        ),
        r"k_proj.*expected LoRA adapters, got peft\.tuners\.ia3",
    ),
    "tokens": (
        lambda: get_peft_model(
            base_model(), TrainableTokensConfig(token_indices=[1], target_modules=["embed_tokens"])
        ),
        r"embed_tokens.*expected LoRA adapters, got .*trainable_tokens",
    ),
    "prompt": (
        lambda: get_peft_model(
            base_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        ),
        "expected LoRA adapters, got .*PROMPT_TUNING",
    ),
    "tied-embedding": (
        lambda: lora(base_model(is_tied=True), target_modules=["embed_tokens"]),
        r"weights that are tied to stay equal, .* serve a checkpoint whose head is its own",
    ),
    "tied-saved-module": (
        lambda: lora(
            base_model(is_tied=True), target_modules=["q_proj"], modules_to_save=["embed_tokens"]
        ),
        r"lm_head\.weight: expected weights that are tied to stay equal",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged_exactly_is_refused(name: str):
    make, text = REFUSED[name]
    with pytest.raises(WeightsError, match=text):
        Source(make())


def test_a_bias_of_an_adapter_is_refused():
    base = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model = lora(base, target_modules=["0"], lora_bias=True)
    with pytest.raises(WeightsError, match="without variants and lora_bias, got lora_bias"):
        Source(model)


def test_a_quantized_base_weight_is_refused():
    model = lora(base_model(), target_modules=["q_proj"])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(
        WeightsError, match=r"q_proj\.weight: expected a base weight of a float dty"
    ):
        Source(model)


def test_adapters_of_zero3_are_gathered_with_their_base_weight(monkeypatch: pytest.MonkeyPatch):
    model = with_two_adapters()
    expected = list(copy.deepcopy(model).merge_and_unload().named_parameters())
    whole = {}
    for index, parameter in enumerate(model.parameters()):
        whole[index] = parameter.data
        parameter.ds_id, parameter.ds_shape = index, parameter.shape
        parameter.data = torch.empty(0)

    @contextmanager
    def gathered(parameters: list[Any]):
        for one in parameters:
            assert one.numel() == 0
            one.data = whole[one.ds_id].clone()
        yield
        for one in parameters:
            one.data.fill_(77)
            one.data = torch.empty(0)

    zero = SimpleNamespace(GatheredParameters=gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
    assert_same(sent(Source(model), 100), expected)


# ---- a real server -------------------------------------------------------------------


def logprobs(model: Any, prompt: list[int], ids: list[int]) -> list[float]:
    """Log-probabilities of `ids` after `prompt` by the trainer's model."""
    with torch.inference_mode():
        tensor = torch.tensor([prompt + ids], device=DEVICE)
        rows = model(tensor).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return rows[range(len(ids)), ids].tolist()


def served(client: Client, **options: Any) -> tuple[list[int], list[float]]:
    """Ids that the server samples, and their log-probabilities."""
    (result,) = client.generate([IDS], max_tokens=16, seed=3, ignore_eos=True, **options)
    done = result.completions[0]
    assert done.logprobs is not None
    return done.ids.tolist(), done.logprobs.tolist()


def tiny_with_adapter(folder: str, **options: Any) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    return lora(base, **options).eval()


def test_a_merged_model_is_served(
    weights_server: Server, tiny_model: str, own: list[tuple[str, Any]]
):
    model = tiny_with_adapter(tiny_model, target_modules=["q_proj", "o_proj", "down_proj"])
    with Client(weights_server.url, timeout_s=120) as client, ExitStack() as stack:
        weights = stack.enter_context(client.weights(device=DEVICE))
        # The server's weights stay those of the fixture for the next test.
        stack.callback(lambda: weights.update(own, policy="keep"))
        assert weights.update(model, policy="keep")["missing"] == []
        ids, found = served(client)
        assert found == pytest.approx(logprobs(model, IDS, ids), abs=TOLERANCE)
        with model.disable_adapter():
            assert found != pytest.approx(logprobs(model, IDS, ids), abs=0.1)


def test_a_failed_update_leaves_nothing_merged(weights_server: Server, tiny_model: str):
    model = tiny_with_adapter(tiny_model, target_modules=["q_proj"])
    before = copy.deepcopy(model.state_dict())
    with Client(weights_server.url, timeout_s=120) as client:
        ids, _ = served(client)
        with client.weights(device=DEVICE, chunk_bytes=0) as weights:
            # The adapter of the last layer does not fit its base weight.
            broken = model.get_base_model().model.layers[3].self_attn.q_proj
            broken.get_delta_weight = lambda adapter: torch.zeros(3, 3, device=DEVICE)
            with pytest.raises(WeightsError, match=r"layers\.3.*expected to .* merge its adapters"):
                weights.update(model, policy="keep")
        assert served(client)[0] == ids
    assert_same(list(model.state_dict().items()), list(before.items()))
