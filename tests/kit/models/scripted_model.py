"""A real Qwen3 whose greedy completion is a fixed script, to test parsers.

The layers add nothing to a token's embedding. The head's row of each script token is the embedding
of the token before it. So the last token of a prompt decides the completion, and no token may occur
twice in the script.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from titopool.demo_model import VOCAB_SIZE, make_model

THOUGHT, TALK = "I should look it up.", "Let me see. "
CALL = ["\n{\"name\": \"look_up\", ", "\"arguments\": {\"word\": ", "\"tito\"}}\n"]  # fmt: skip
SCRIPT = ["<think>", THOUGHT, "</think>", TALK, "<tool_call>", *CALL, "</tool_call>"]
# The script begins after one of these tokens: the last one that the template writes, and the last
# one of Qwen3's own template.
CUE, NEW_LINE = "<|assistant|>", "\n"
# Qwen3's template writes these around what a tool returned.
RESPONSE = ["<tool_response>", "</tool_response>"]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + CUE + "' }}{% endif %}"
)


def make_scripted_model(folder: Path, script: Sequence[str] = SCRIPT) -> list[int]:
    """Writes the model to `folder`; returns the script's ids and the end-of-text id."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    added = [CUE, *script, *RESPONSE]
    make_model(folder, vocab_size=VOCAB_SIZE + len(added), tie_word_embeddings=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(added)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = [*tokenizer.convert_tokens_to_ids([CUE, *script]), tokenizer.eos_token_id]
    (new_line,) = tokenizer(NEW_LINE, add_special_tokens=False)["input_ids"]
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        embeddings = torch.nn.functional.normalize(model.model.embed_tokens.weight)
        for before, after in itertools.pairwise(ids):
            model.lm_head.weight[after] = 10 * embeddings[before]
        model.lm_head.weight[ids[1]] += 10 * embeddings[new_line]
    model.save_pretrained(folder)
    return ids[1:]
