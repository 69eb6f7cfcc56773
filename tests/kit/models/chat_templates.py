"""Short chat templates that behave as those of model families, and tokenizers with them."""

from typing import Any

from transformers import PreTrainedTokenizerFast

from titopool.demo_model import TOKENIZER

_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
)  # fmt: skip
_TOOL_ANSWERS = (
    "{% if m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)  # fmt: skip
# A system message by default; answers of tools that follow each other are one turn of a user.
QWEN25 = (
    _TOOLS + "{% if messages[0].role != 'system' and not tools %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}" + _TOOL_ANSWERS +
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
# Drops thinking before the last message of a user. Without thinking, the generation prompt has an
# empty thought, which the template writes for a last turn only.
QWEN3 = (
    _TOOLS + "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}" + _TOOL_ANSWERS +
    "{% elif m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thought = '' %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)  # fmt: skip
# Begins with a token of its own, trims contents, and no line follows an end of a turn.
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)  # fmt: skip
# As DeepSeek-R1's: the generation prompt opens a thought, and no turn's thought is ever rendered.
R1 = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{% if m.role == 'assistant' %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)  # fmt: skip
# As Phi-3's: a conversation that does not go on ends with a token of its own.
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|eot_id|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)  # fmt: skip
TEMPLATES = {"qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "r1": R1, "phi3": PHI3}
END_OF_TURN = {
    "qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "r1": "<|eot_id|>",
    "phi3": "<|eot_id|>",
}  # fmt: skip
ADDED = [
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|user|>", "<|assistant|>", "<|tool|>", "<think>", "</think>", "<tool_response>",
    "</tool_response>",
]  # fmt: skip


def tokenizer_of(family: str) -> Any:
    """The demo model's tokenizer with the special tokens and the template of a family."""
    from tokenizers import Tokenizer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(TOKENIZER)),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=ADDED,
    )
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer
