"""transformers in float32: the reference for token ids and log-probabilities."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
)

from titopool.settings.gpus import visible_gpus

# On a GPU, attention kernels multiply float32 with 10 bits of mantissa (TF32).
TOLERANCE = 5e-3 if visible_gpus() else 1e-3
PROMPT = [42, 1393, 14, 535, 78, 70]


@cache
def reference_model(folder: str):
    config = AutoConfig.from_pretrained(folder)
    # transformers' other kernels leave out the cap on attention's scores (Gemma 2).
    capped = getattr(config, "attn_logit_softcapping", None)
    options = {"attn_implementation": "eager"} if capped else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


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


@dataclass
class SeenWithImages:
    """transformers' results for text and images: expanded ids, greedy ids and their logprobs."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]


@cache
def vision_model(folder: str) -> tuple[Any, Any]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return AutoProcessor.from_pretrained(folder), model


@torch.inference_mode()
def see(
    folder: str, text: str, images: list, num_tokens: int, **processor_kwargs
) -> SeenWithImages:
    """The greedy continuation, without stopping at the end-of-text token."""
    processor, model = vision_model(folder)
    inputs = processor(text=[text], images=images or None, return_tensors="pt", **processor_kwargs)
    length = inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs, do_sample=False, max_new_tokens=num_tokens,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    completion = output.sequences[0, length:].tolist()
    rows = torch.log_softmax(torch.stack(output.logits)[:, 0].float(), dim=-1)
    return SeenWithImages(
        inputs["input_ids"][0].tolist(), completion, rows[range(num_tokens), completion].tolist()
    )
