"""Families of chat templates: where their template is, and how their models write a turn."""

import functools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from titopool.demo_model import TOKENIZER

# `make tools` puts both packages there.
_TOOLS = Path(sys.prefix)
_PACKAGES = {
    "trl": _TOOLS / "trl" / "1.16.0" / "trl" / "chat_templates",
    "axolotl": _TOOLS / "axolotl" / "axolotl" / "utils" / "chat_templates" / "templates",
}
# Templates that no package ships, as NAME.jinja. They are run by hand.
_FOLDER = os.environ.get("TITOPOOL_TEMPLATES")
# What templates write as one token.
_SPECIAL = re.compile(
    r"<\|[^|<>{}'\"%\s]+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_(?:turn|image)>|</?think>|</?tool_call>"
    r"|</?tool_response>|</?arg_(?:key|value)>|\[/?(?:INST|[A-Z]+_[A-Z]+)\]|\[gMASK\]|<sop>"
    r"|<\|?(?:turn|channel|tool|tool_call|tool_response|image|audio)\|?>|<\|\"\|>"
    r"|\]~!?b\[?\]?|\[e~\[|</?minimax:tool_call>"
)


@dataclass(frozen=True)
class Family:
    """How a model of a family writes; calls are of `add_one`, by its argument `number`."""

    name: str
    # A package, or where a template of `TITOPOOL_TEMPLATES` is from.
    source: str
    # Of the template's file, without its ending.
    file: str
    # Ends a turn, and one that calls; "": the same.
    end: str
    call_end: str = ""
    # What the template writes for `end` where another turn follows; "": the same.
    end_within: str = ""
    bos: str = ""
    # A call of NUMBER that is the turn's INDEXth, what stands around and between calls; "": none.
    call: str = ""
    calls: str = "{}"
    between: str = ""
    # Whether a turn has several calls.
    is_parallel: bool = True
    # Whether the template reads arguments as text.
    arguments_are_text: bool = False
    # Whether calls and thoughts are for the template a part of the content.
    calls_are_text: bool = False
    thoughts_are_text: bool = False
    # A thought before an answer; "": none.
    thought: str = ""
    # What stands in place of a thought where the model has none.
    unthought: str = ""
    # Precedes the text of an answer.
    answer: str = ""
    # The role of what answers a call, and the error over the role `tool` where that is another.
    tool_role: str = "tool"
    refuses_tools: str = ""
    # What the template writes of an image; "": it accepts none.
    image: str = ""
    # Whether the calls of a turn are found without a parser of the caller's.
    reads_calls: bool = True
    # The renderer of the package, without and with tools; "": the difference.
    renderers: tuple[str, str] = ("", "")
    # Tokens that the template does not name.
    special: tuple[str, ...] = ()
    # The cases in which the template writes an earlier turn in another way than it was sampled.
    rewrites: tuple[str, ...] = ()
    # The cases that need the package renderers, with the error that says so.
    needs_renderers: tuple[str, ...] = ()
    # Variables with which the template keeps thoughts.
    keeps_with: tuple[tuple[str, Any], ...] = ()

    @property
    def path(self) -> Path:
        folder = _PACKAGES.get(self.source) or Path(_FOLDER or "/nonexistent")
        return folder / f"{self.file}.jinja"

    @property
    def call_ends(self) -> str:
        return self.call_end or self.end

    @property
    def cells(self) -> list[str]:
        """Its row in docs/models.md, without the last cell."""
        plain, calling = self.renderers
        tools = "—" if not self.call else "✓" if self.reads_calls else "parser"
        if self.refuses_tools and not self.call:
            tools = "refused"
        elif "thought+tool" in self.rewrites:
            tools += ", keep"
        elif self.call and not self.is_parallel:
            tools += ", one a turn"
        thoughts = "keep" if "thought" in self.rewrites else "✓" if self.thought else "—"
        if self.keeps_with:
            ((name, value),) = self.keeps_with
            thoughts = f"keep, or `{name}={value}`"
        found = plain or "difference"
        if self.call and calling != plain:
            found += f"; with tools {calling or 'difference'}"
        return [
            self.name,
            f"{self.source}: {self.file}",
            found,
            "keep" if "several" in self.rewrites else "✓",
            tools,
            thoughts,
            "✓" if self.image else "—",
        ]

    def calling(self, *numbers: int) -> str:
        """The text of a turn that calls, without its end."""
        calls = (
            self.call.replace("NUMBER", str(number)).replace("INDEX", str(index))
            for index, number in enumerate(numbers)
        )
        return self.calls.replace("{}", self.between.join(calls))

    def thinking(self, thought: str | None, prompt: str) -> str:
        """What a turn after a prompt begins with; None: no thought. The prompt may have begun it."""
        text = self.unthought if thought is None else self.thought.replace("{}", thought)
        return text.removeprefix(prompt[prompt.rfind("<think>") :]) if _is_begun(prompt) else text


def _is_begun(prompt: str) -> bool:
    return prompt.rstrip().endswith("<think>")


_HERMES = '<tool_call>\n{"name": "add_one", "arguments": {"number": NUMBER}}\n</tool_call>'
_XML = (
    "<tool_call>\n<function=add_one>\n<parameter=number>\nNUMBER\n</parameter>\n</function>\n"
    "</tool_call>"
)
_LLAMA = '{"name": "add_one", "parameters": {"number": NUMBER}}'
_GLM = (
    "\n<tool_call>add_one\n<arg_key>number</arg_key>\n<arg_value>NUMBER</arg_value>\n</tool_call>"
)
_GLM_5 = "<tool_call>add_one<arg_key>number</arg_key><arg_value>NUMBER</arg_value></tool_call>"
_DEEPSEEK = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add_one\n```json\n"
    '{"number": NUMBER}\n```<｜tool▁call▁end｜>'
)
_DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_GEMMA_4 = "<|tool_call>call:add_one{number:NUMBER}<tool_call|>"
_HARMONY = (
    '<|channel|>commentary to=functions.add_one <|constrain|>json<|message|>{"number": NUMBER}'
)
_KIMI = (
    "<|tool_call_begin|>functions.add_one:INDEX<|tool_call_argument_begin|>"
    '{"number": NUMBER}<|tool_call_end|>'
)
_MINIMAX = '<invoke name="add_one">\n<parameter name="number">NUMBER</parameter>\n</invoke>\n'
_MISTRAL = '{"name": "add_one", "arguments": {"number": NUMBER}, "id": "c0000000INDEX"}'
_LLAMA_CPP = "llama_cpp_python 0.3.36"


_THOUGHT = "<think>\n{}\n</think>\n\n"
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_DEEPSEEK_ENDS = {"end": "<｜end▁of▁sentence｜>", "bos": "<｜begin▁of▁sentence｜>"}
_LLAMA_3 = {
    "end": "<|eot_id|>", "bos": "<|begin_of_text|>",
    "special": ("<|eom_id|>", "<|python_tag|>", "<|end_of_text|>"),
}  # fmt: skip
_ALL = ("plain", "thought", "tool", "tools", "thought+tool", "several", "several with tools")

# fmt: off
FAMILIES = [
    Family("Qwen 2.5", "trl", "qwen2_5", "<|im_end|>", call=_HERMES, between="\n",
           renderers=("qwen3", "qwen3")),
    Family("Qwen 3", "trl", "qwen3", "<|im_end|>", call=_HERMES, between="\n", thought=_THOUGHT,
           renderers=("qwen3", "qwen3"), rewrites=("thought",)),
    Family("Qwen 3 2507", "trl", "qwen3_instruct_2507", "<|im_end|>", call=_HERMES, between="\n",
           renderers=("qwen3", "qwen3")),
    Family("Qwen 3.5", "trl", "qwen3_5_think", "<|im_end|>", call=_XML, between="\n",
           thought=_THOUGHT, unthought=_NO_THOUGHT, image=_QWEN_IMAGE,
           renderers=("qwen3.5", "qwen3.5"), rewrites=("plain", "thought", "several", "several with tools")),
    Family("Qwen 3.5, no thinking", "trl", "qwen3_5_nothink", "<|im_end|>", call=_XML, between="\n",
           image=_QWEN_IMAGE, renderers=("qwen3", "qwen3.5"), rewrites=("plain", "several", "several with tools")),
    Family("Qwen 3.6", "trl", "qwen3_6", "<|im_end|>", call=_XML, between="\n",
           thought=_THOUGHT, unthought=_NO_THOUGHT, image=_QWEN_IMAGE,
           renderers=("qwen3.5", "qwen3.5"), rewrites=("plain", "thought", "several", "several with tools"),
           keeps_with=(("preserve_thinking", True),)),
    Family("Qwen 2.5-VL", "trl", "qwen2_5_vl", "<|im_end|>", call=_HERMES, between="\n",
           calls_are_text=True, image=_QWEN_IMAGE),
    Family("Qwen 3-VL", "trl", "qwen3_vl", "<|im_end|>", call=_HERMES, between="\n",
           image=_QWEN_IMAGE, renderers=("qwen3", "qwen3")),
    Family("Nemotron 3", "trl", "nemotron_3_nano", "<|im_end|>", call=_XML, between="\n",
           thought="<think>\n{}\n</think>\n", unthought="<think>\n</think>\n",
           renderers=("nemotron-3", "nemotron-3"), rewrites=("thought",),
           keeps_with=(("truncate_history_thinking", False),)),
    Family("Llama 3", "trl", "llama3", renderers=("llama-3", ""), **_LLAMA_3),
    Family("Llama 3.1", "trl", "llama3_1", call=_LLAMA, is_parallel=False,
           renderers=("llama-3", "llama-3"), **_LLAMA_3),
    Family("Llama 3.2", "trl", "llama3_2", call=_LLAMA, is_parallel=False,
           renderers=("llama-3", "llama-3"), **_LLAMA_3),
    Family("Llama 4", "axolotl", "llama4", "<|eot|>", bos="<|begin_of_text|>", reads_calls=False, call=_LLAMA,
           calls="<|python_start|><|python_end|>{}", image="<|image|>"),
    Family("Gemma 3", "trl", "gemma3", "<end_of_turn>", bos="<bos>", image="<start_of_image>",
           refuses_tools="TemplateRefused"),
    Family("Gemma 4", "trl", "gemma4_v5", "<turn|>", "<|tool_response>", bos="<bos>",
           call="<|tool_call>call:add_one{number:NUMBER}<tool_call|>",
           thought="<|channel>thought\n{}\n<channel|>", image="<|image|>",
           renderers=("gemma4", "gemma4"), rewrites=("thought",),
           needs_renderers=("tool", "tools", "thought+tool"),
           special=("<eos>", "<|think|>", "<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>",
                    "<audio|>", "<|video|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
                    "<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|turn>",
                    '<|"|>')),
    Family("GLM 4.5", "trl", "glm4moe", "<|user|>", "<|observation|>", call=_GLM,
           thought="\n<think>{}</think>", unthought="\n<think></think>", answer="\n",
           renderers=("glm-4.5", "glm-4.5"), rewrites=("thought",),
           special=("<|endoftext|>", "/nothink")),
    Family("gpt-oss", "trl", "gptoss", "<|return|>", "<|call|>", "<|end|>", call=_HARMONY,
           is_parallel=False, answer="<|channel|>final<|message|>",
           thought="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
           rewrites=("thought",), special=("<|constrain|>", "<|endoftext|>"),
           needs_renderers=_ALL),
    Family("DeepSeek V3", "axolotl", "deepseek_v3", call=_DEEPSEEK, calls=_DEEPSEEK_CALLS,
           between="\n", arguments_are_text=True, renderers=("deepseek-v3", "deepseek-v3"),
           **_DEEPSEEK_ENDS),
    Family("DeepSeek R1", "trl", "deepseekv3", reads_calls=False, call=_DEEPSEEK, calls=_DEEPSEEK_CALLS,
           between="\n", arguments_are_text=True, thought=_THOUGHT, unthought=_NO_THOUGHT,
           renderers=("deepseek-r1", ""), rewrites=_ALL, **_DEEPSEEK_ENDS),
    Family("DeepSeek R1 Distill", "trl", "deepseek_r1_distill", thought=_THOUGHT,
           unthought=_NO_THOUGHT, renderers=("deepseek-r1", ""), rewrites=_ALL, **_DEEPSEEK_ENDS),
    Family("Mistral", "axolotl", "mistral_v3_tekken", "</s>", bos="<s>", call=_MISTRAL,
           calls="[TOOL_CALLS][{}]", between=", ", rewrites=("several", "several with tools"),
           ),
    Family("Phi-4", "axolotl", "phi_4", "<|im_end|>", thought="<think>{}</think>",
           thoughts_are_text=True, refuses_tools="MessageDropped"),
    Family("GLM 4.7 Flash", _LLAMA_CPP, "glm_4_7", "<|user|>", "<|observation|>", call=_GLM_5,
           thought="<think>{}</think>", unthought="<think></think>", renderers=("glm-5", "glm-5"),
           rewrites=("plain", "thought", "tool", "tools", "several", "several with tools"), special=("<|endoftext|>",),
           keeps_with=(("clear_thinking", False),)),
    Family("GLM 5.3 Flash", "https://github.com/sfxnz/GLM-5.3-Flash-NVFP4-vLLM-2x-DGX-Spark 4859b6a",
           "glm_5_3", "<|user|>", "<|observation|>", call=_GLM_5, image="<|image|>",
           thought="<think>{}</think>", unthought="<think></think>", renderers=("glm-5", "glm-5"),
           special=("<|endoftext|>",)),
    Family("DeepSeek V3.1", _LLAMA_CPP, "deepseek_v3_1",
           reads_calls=False, call='<｜tool▁call▁begin｜>add_one<｜tool▁sep｜>{"number": NUMBER}<｜tool▁call▁end｜>',
           calls=_DEEPSEEK_CALLS, **_DEEPSEEK_ENDS),
    Family("Kimi K2", _LLAMA_CPP, "kimi_k2", "<|im_end|>", reads_calls=False, call=_KIMI, image="<|media_pad|>",
           calls="<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
           renderers=("kimi-k2", "")),
    Family("MiniMax M2", _LLAMA_CPP, "minimax_m2", "[e~[", call=_MINIMAX,
           calls="\n<minimax:tool_call>\n{}</minimax:tool_call>", thought=_THOUGHT,
           unthought=_NO_THOUGHT, renderers=("minimax-m2", "minimax-m2"),
           needs_renderers=("tool", "tools", "thought+tool"),
           rewrites=("plain", "thought", "tool", "tools", "several", "several with tools")),
    Family("Mistral Small 3.2", _LLAMA_CPP, "mistral_small_3_2", "</s>", bos="<s>", image="[IMG]",
           call='[TOOL_CALLS]add_one[CALL_ID]c0000000INDEX[ARGS]{"number": NUMBER}',
           rewrites=("several with tools",)),
    Family("OLMo 3", "https://github.com/allenai/open-instruct e6c3044", "olmo3", "<|im_end|>",
           reads_calls=False, call="<function_calls>add_one(number=NUMBER)</function_calls>", calls_are_text=True,
           tool_role="environment", refuses_tools="MessageDropped"),
    Family("OLMo 3 Think", "https://github.com/allenai/open-instruct e6c3044", "olmo3_think",
           "<|im_end|>", reads_calls=False, call="<function_calls>add_one(number=NUMBER)</function_calls>",
           calls_are_text=True, thoughts_are_text=True, thought=_THOUGHT,
           unthought=_NO_THOUGHT, tool_role="environment",
           refuses_tools="MessageDropped"),
    Family("SmolLM3", _LLAMA_CPP, "smollm3", "<|im_end|>", call=_HERMES, between="\n",
           thought=_THOUGHT, calls_are_text=True, thoughts_are_text=True),
]
# fmt: on
HERE = [family for family in FAMILIES if family.source in _PACKAGES or family.path.is_file()]


@functools.cache
def tokenizer_of(family: Family) -> Any:
    """The demo model's tokenizer with a family's special tokens and its template; shared by tests."""
    return new_tokenizer(family)


def new_tokenizer(family: Family) -> Any:
    from tokenizers import Tokenizer

    template = family.path.read_text()
    eos = "<|endoftext|>" if family.end == "<|user|>" else family.end
    named = {*_SPECIAL.findall(template), "<think>", "</think>", "<|endoftext|>"}
    named |= {family.end, family.call_ends, *family.special}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(TOKENIZER)),
        eos_token=eos,
        pad_token="<|endoftext|>",
        **({"bos_token": family.bos} if family.bos else {}),
        additional_special_tokens=sorted(named - {"", eos, family.bos}),
    )
    tokenizer.chat_template = template
    return tokenizer
