"""A trainer's log-probabilities: transformers' forward pass in the trainer's precision."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from titopool.errors import ConfigError


def vocab_size_of(model: str) -> int:
    """The number of ids that the model knows.

    Raises:
        ConfigError: transformers is not installed.
    """
    config = _transformers().AutoConfig.from_pretrained(model)
    size: int = config.get_text_config().vocab_size
    return size


def logprobs_of(
    model: str,
    samples: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    dtype: str,
    head_dtype: str,
    device: str | None,
    attention: str | None,
    temperature: float,
) -> list[np.ndarray]:
    """Log-probabilities of each completion's tokens after its prompt.

    The logits are divided by the temperature and normalized in float32, whatever their precision is.

    Args:
        samples: int32 ids of prompt and completion, each of shape [tokens].
        head_dtype: "float32" computes logits in float32, "model" in `dtype`.

    Returns:
        float32 of shape [tokens] for each completion.

    Raises:
        ConfigError: transformers or torch is not installed.
        ValueError: an id is outside the trainer's vocabulary.
    """
    transformers = _transformers()
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    module = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), **options
    )
    module = module.to(device).eval()
    if head_dtype == "float32":
        _compute_logits_in_float32(module)
    vocab_size = module.get_input_embeddings().weight.shape[0]
    found = []
    with torch.inference_mode():
        for prompt, completion in samples:
            ids = np.concatenate([prompt, completion]).astype(np.int64)
            if len(ids) and ids.max() >= vocab_size:
                raise ValueError(
                    f"expected ids below {vocab_size}, the trainer's vocabulary, got {ids.max()}; "
                    "the server runs another model"
                )
            logits = module(torch.from_numpy(ids)[None].to(device)).logits[0]
            rows = logits[len(prompt) - 1 : -1].float() / temperature
            chosen = torch.from_numpy(completion.astype(np.int64)).to(device)
            values = torch.log_softmax(rows, -1).gather(1, chosen[:, None])[:, 0]
            found.append(values.cpu().numpy())
    return found


def _compute_logits_in_float32(module: Any) -> None:
    """Replaces the head's product; the weights, which may be tied, keep their precision."""
    import torch

    head = module.get_output_embeddings()
    bias = getattr(head, "bias", None)

    def product(hidden: Any) -> Any:
        return torch.nn.functional.linear(
            hidden.float(), head.weight.float(), None if bias is None else bias.float()
        )

    head.forward = product


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "titopool mismatch: expected transformers and torch, which compute the trainer's side; "
            "install titopool[cpu] or titopool[gpu]"
        ) from None
    return transformers
