"""transformers in float32: the reference for ids and log-probabilities."""

from functools import cache

import torch
from transformers import AutoModelForCausalLM


@cache
def reference_model(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(folder: str, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation, without stopping at the end-of-text token."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        logits = reference_model(folder)(torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits.argmax()))
    return ids[len(prompt_ids) :]


@torch.inference_mode()
def logprobs(
    folder: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary at each completion token, as a sampler sees
    them: penalty on every id seen so far, then temperature. Shape [tokens, vocabulary]."""
    ids = prompt_ids + completion_ids
    logits = reference_model(folder)(torch.tensor([ids])).logits[0].float()
    rows = []
    for position in range(len(prompt_ids), len(ids)):
        row = logits[position - 1].clone()
        seen = torch.tensor(sorted(set(ids[:position])))
        penalized = row[seen]
        row[seen] = torch.where(
            penalized > 0, penalized / repetition_penalty, penalized * repetition_penalty
        )
        rows.append(torch.log_softmax(row / temperature, dim=-1))
    return torch.stack(rows)
