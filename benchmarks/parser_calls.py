"""One call as the models of each of vLLM's tool call parsers write it, and the parsers without an engine."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from titopool.demo_model import make_tokenizer
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.wire.messages import ChatParsing, Job
from workers.engine.parsing.parsers import Parsers

WORD = "word "
# A word's token.
WORD_ID = 7
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
CHAT = msgspec.msgpack.encode(ChatParsing(tools=[TOOL], tool_choice="auto"))
OPTIONS = encode_options(SamplingOptions())
PROMPT_IDS = np.int32([5, 6]).tobytes()

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "…"}}\n</tool_call>'
LIST = '[{"name": "f", "arguments": {"a": "…"}}]'
LLAMA = '{"name": "f", "parameters": {"a": "…"}}'
XML = "<tool_call>\n<function=f>\n<parameter=a>\n…\n</parameter>\n</function>\n</tool_call>"
KEYS = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>…</arg_value>\n</tool_call>"
INVOKE = '\n<invoke name="f">\n<parameter name="a">…</parameter>\n</invoke>\n'
DSML = (
    '<｜DSML｜{calls}>\n<｜DSML｜{s}invoke name="f">\n<｜DSML｜{s}parameter name="a" string="true">…'
    "</｜DSML｜{s}parameter>\n</｜DSML｜{s}invoke>\n</｜DSML｜{calls}>"
)
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
COHERE = '[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "…"}}]'
# Of the parsers of vLLM 0.32; "…" is the string. Others are taken to read Hermes' form.
CALLS = {
    "apertus": '<|tools_prefix|>[{"f": {"a": "…"}}]<|tools_suffix|>',
    "cohere_command3": f"<|START_ACTION|>{COHERE}<|END_ACTION|>",
    "cohere_command4": f"<|START_ACTION|>{COHERE}<|END_ACTION|>",
    "deepseek_v3": DEEPSEEK.replace("{}", 'function<｜tool▁sep｜>f\n```json\n{"a": "…"}\n```'),
    "deepseek_v31": DEEPSEEK.replace("{}", 'f<｜tool▁sep｜>{"a": "…"}'),
    "deepseek_v32": DSML.format(calls="function_calls", s=""),
    "deepseek_v4": DSML.format(calls="tool_calls", s=""),
    "deepseek_v41": DSML.format(calls=" calls", s=" "),
    "dots": f"<dots_function_call>{INVOKE}</dots_function_call>",
    "functiongemma": "<start_function_call>call:f{a:<escape>…<escape>}<end_function_call>",
    "gemma4": '<|tool_call>call:f{a:<|"|>…<|"|>}<tool_call|>',
    "gigachat3": '<|function_call|>{"name": "f", "arguments": {"a": "…"}}',
    "glm45": KEYS,
    "glm47": KEYS,
    "granite": f"<|tool_call|>{LIST}",
    "granite-20b-fc": '<function_call> {"name": "f", "arguments": {"a": "…"}}',
    "hunyuan_a13b": f"<tool_calls>{LIST}</tool_calls>",
    "hy_v3": "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>…</arg_value>\n"
    "</tool_call>\n</tool_calls>",
    "hy_v4": "<tool_calls><tool_call>f<arg_key>a</arg_key><arg_value>…</arg_value></tool_call>"
    "</tool_calls>",
    "inkling": '<|message_model|><|content_invoke_tool_json|>{"name":"f","args":{"a":"…"}}'
    "<|end_message|>",
    "internlm": f"<|action_start|><|plugin|>{LLAMA}<|action_end|>",
    "jamba": f"<tool_calls>{LIST}</tool_calls>",
    "k2_horizon": "<ifm|tool_calls>\n<ifm|tool_call>f\n<ifm|arg_key>a</ifm|arg_key>\n<ifm|arg_value>…"
    "</ifm|arg_value>\n</ifm|tool_call>\n</ifm|tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"a": "…"}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" '
    'type="string"<|sep|>…<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "lfm2": '<|tool_call_start|>[f(a="…")]<|tool_call_end|>',
    "ling3": KEYS,
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "llama4_pythonic": '<|python_start|>[f(a="…")]<|python_end|>',
    "longcat": '<longcat_tool_call>{"name": "f", "arguments": {"a": "…"}}</longcat_tool_call>',
    "mimo": XML,
    "minicpm5": '<function name="f"><param name="a">…</param></function>',
    "minimax_m2": f"<minimax:tool_call>{INVOKE}</minimax:tool_call>",
    "minimax_m3": "N<tool_call>\nN<invoke name=\"f\">\nN<a>…N</a>\nN</invoke>\nN</tool_call>".replace(
        "N<", "]<]minimax[>[<"
    ),
    # Of tokenizers older than v11, such as transformers'.
    "mistral": f"[TOOL_CALLS]{LIST}",
    "muse_glimmer": '<|start|>assistant to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n'
    '<atem:parameter name="a">…</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>',
    "olmo3": '<function_calls>f(a="…")</function_calls>',
    "phi4_mini_json": f"functools{LIST}",
    "plamo3": "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
    "<|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
    '<|plamo:constrain|>json<|plamo:msg|>{"a": "…"}<|plamo:end_tool_arguments:plamo|>'
    "<|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>",
    "poolside_v1": KEYS,
    "pythonic": '[f(a="…")]',
    "qwen3_coder": XML,
    "qwen3_xml": XML,
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=a>…</parameter>\n</function>\n"
    "</seed:tool_call>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="f"><steptml:parameter name="a">…</steptml:parameter></steptml:invoke>'
    "<｜tool_call_end｜><｜tool_calls_end｜>",
    "step3p5": XML,
    "xlam": LIST,
}  # fmt: skip
# For the parser `hf`, which reads the form that the tokenizer names.
TEMPLATE = {
    "start_anchor": "assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}  # fmt: skip
MARKUP = re.compile(r"""["'](<[^"'\s{}()\\]{1,40}>|\[[A-Z_]{3,20}\])["']""")
# Parts of markup that the reasoning parser olmo3 asks of the vocabulary.
PARTS = ["Ġ</", "</", "think", ">"]

# Text and id of each token.
Tokens = list[tuple[str, int]]


def all_markup() -> set[str]:
    """What parsers may ask of the vocabulary."""
    import vllm

    folder = Path(vllm.__file__).parent
    found = {
        found
        for name in ("parser", "tool_parsers", "reasoning")
        for path in (folder / name).rglob("*.py")
        for found in MARKUP.findall(path.read_text())
    }
    names = ("function_calls", "tool_calls", " calls")
    return found | {f"<{end}｜DSML｜{name}>" for name in names for end in ("", "/")}


class Calls:
    """The parsers with a tokenizer that has all markup, and the tokens of a call."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        with TemporaryDirectory() as folder:
            make_tokenizer(Path(folder))
            tokenizer = AutoTokenizer.from_pretrained(folder)
        markup = sorted(all_markup(), key=len, reverse=True)
        tokenizer.add_tokens(markup + PARTS)
        tokenizer.response_template = TEMPLATE
        self._vocabulary = tokenizer.get_vocab()
        self._split = re.compile(f"({'|'.join(map(re.escape, markup))})").split
        config = SimpleNamespace(
            model="m",
            architecture="Cohere2ForCausalLM",
            max_model_len=2**17,
            hf_config=SimpleNamespace(model_type="qwen3"),
            try_get_generation_config=dict,
        )
        outputs = SimpleNamespace(backend="xgrammar", disable_any_whitespace=False)
        self._llm = SimpleNamespace(
            renderer=SimpleNamespace(tokenizer=tokenizer),
            model_config=config,
            vllm_config=SimpleNamespace(structured_outputs_config=outputs),
        )

    def parsers(self, name: str, reasoning: str = "") -> Parsers:
        """Raises ConfigError where a parser needs more than a tokenizer with its tokens."""
        return Parsers(name, reasoning, self._llm)

    def words(self, text: str) -> Tokens:
        """Tokens of a text that is not only a call: its markup, words, and other characters."""
        parts = (one for part in self._split(text) for one in self._words(part))
        return [(part, self._vocabulary.get(part, WORD_ID)) for part in parts]

    def _words(self, part: str) -> list[str]:
        return [part] if part in self._vocabulary else re.findall(r" ?\w+|\W", part)

    def tokens(self, name: str, num_bytes: int) -> Tokens:
        """A call with a string of so many bytes; markup is one token, as in a model's vocabulary."""
        head, tail = (self._split(part) for part in CALLS.get(name, HERMES).split("…"))
        parts = [*head, *[WORD] * (num_bytes // len(WORD)), *tail]
        return [(part, self._vocabulary.get(part, WORD_ID)) for part in parts if part]


def parsed_job(*, is_streamed: bool) -> Job:
    """A chat with the tool, for `ParserProcesses`."""
    return Job(
        1,
        1,
        PROMPT_IDS,
        1,
        9,
        msgspec.Raw(OPTIONS),
        is_streamed=is_streamed,
        chat=msgspec.Raw(CHAT),
    )


def called(message: dict[str, Any]) -> bool:
    """Whether the message is the call."""
    try:
        (call,) = message["tool_calls"]
        arguments = msgspec.json.decode(call["function"]["arguments"])
    except (KeyError, ValueError):
        return False
    # Some parsers strip it, or repeat a blank.
    return call["function"]["name"] == "f" and set(arguments["a"].split()) == {WORD.strip()}
