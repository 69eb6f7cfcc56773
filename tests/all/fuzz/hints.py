"""Likely values for request fields, by the field's name: accepted by the server, and cheap."""

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from tests.all.fuzz.values import Strategy, dump, objects_of
from titopool.settings.sampling import SamplingOptions

VOCAB_SIZE = 2048
# Stand for values that only a running server knows; replaced when a body is sent.
MODEL, ROOT = "@model@", "@root@"
# Name of an adapter that may be loaded from `ROOT/adapter`.
ADAPTER = "tuned"


def one_of(*values: Any) -> Strategy:
    return st.sampled_from(values)


def kind_of(struct: type[msgspec.Struct]) -> inspect.StructType:
    kind = inspect.type_info(struct)
    assert isinstance(kind, inspect.StructType)
    return kind


_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5)
words = one_of("Hello", "a b", "1, 2, 3", "été 日本 𝄞", "<|im_end|>", " ")
# Grammars that end soon; hostile grammars are tested elsewhere.
_regexes = one_of("yes|no", "[ab]{1,3}", "\\d+", "(", "", "a\0", "é?")
_schemas = one_of(
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    {"type": "integer"}, {"enum": ["a", "b"]}, {"type": "array", "maxItems": 2}, {"type": 3},
    {"$ref": "#/nowhere"}, {"properties": []}, {},
)  # fmt: skip
_structured = st.one_of(
    st.fixed_dictionaries({"regex": _regexes}),
    st.fixed_dictionaries({"json": st.one_of(_schemas, _schemas.map(lambda one: dump(one).decode()))}),
    st.fixed_dictionaries({"choice": one_of(["a"], ["yes", "no"], ["é", ""], [])}),
    st.fixed_dictionaries({"grammar": one_of('root ::= "a" | "b"', "root ::= x", "", "(")}),
    st.fixed_dictionaries({"json_object": st.booleans()}),
    st.fixed_dictionaries({"structural_tag": one_of("{}", "a", '{"structures":[],"triggers":[]}')}),
)  # fmt: skip
_part = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": words}),
    st.fixed_dictionaries({"type": st.just("image"), "image": one_of("", "aGVsbG8=", "%")}),
    st.fixed_dictionaries(
        {"type": st.just("image_url"), "image_url": one_of("data:image/png;base64,AA==", "http://a/b", {"url": "x"}, {}, 3)}
    ),
    words,
)  # fmt: skip
_call = st.fixed_dictionaries(
    {
        "id": one_of("call-1", "", None, 7), "type": one_of("function", "x"),
        "function": st.fixed_dictionaries(
            {"name": one_of("look_up", "", None), "arguments": one_of('{"a": 1}', "{", "", "[1]", {"a": 1}, 3, "[" * 965 + "]" * 965)}
        ),
    }
)  # fmt: skip
_message = st.fixed_dictionaries(
    {"role": one_of("user", "assistant", "system", "tool", "developer", "", "\n")},
    optional={
        "content": st.one_of(words, st.none(), st.lists(_part, max_size=3)),
        "tool_calls": st.lists(_call, max_size=2),
        "reasoning": words, "reasoning_content": words, "name": one_of("a", None, 3),
        "tool_call_id": one_of("call-1", 3),
    },
)  # fmt: skip
_text_message = st.fixed_dictionaries({"role": one_of("user", "assistant"), "content": words})
messages = st.lists(st.one_of(_text_message, _message), min_size=1, max_size=3)
_tool = st.fixed_dictionaries(
    {
        "type": one_of("function", "retrieval"),
        "function": st.fixed_dictionaries(
            {"name": one_of("look_up", "b", "", "é")},
            optional={
                "description": one_of("looks up", None), "strict": one_of(True, False, None),
                "parameters": st.one_of(_schemas, st.none()),
            },
        ),
    }
)  # fmt: skip
_named = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": one_of("look_up", "x")})}
)  # fmt: skip
_template_kwargs = one_of(
    {}, {"enable_thinking": False}, {"a": [1]}, {"tokenize": True}, {"messages": []}, {"a": 2**70}
)
_salts = one_of(None, "a", "salt", "")
SAMPLING_HINTS = {
    "n": one_of(1, 1, 2), "max_tokens": one_of(1, 2, 4), "max_completion_tokens": one_of(1, 3, None),
    "temperature": one_of(0, 0.7, 1.0, 2), "top_p": one_of(1, 0.9, 1e-9), "top_k": one_of(-1, 0, 1, 50),
    "min_p": one_of(0, 0.1, 1), "repetition_penalty": one_of(1, 1.3, 0.5), "presence_penalty": one_of(0, 1, -2),
    "frequency_penalty": one_of(0, 1.5), "seed": one_of(None, 0, -1, 2**63 - 2), "logprobs": one_of(None, 0, 1, 3, 128),
    "min_tokens": one_of(0, 1, 2), "stop": one_of(None, "a", ["a", "é"], []), "stop_token_ids": one_of(None, [], [0, 5]),
    "ignore_eos": st.booleans(), "badwords": one_of(None, [], ["a"], [" b", "éé"]),
    "logit_bias": one_of(None, {}, {"5": 100, "6": -100}), "allowed_token_ids": one_of(None, [1, 2, 3], [0]),
    "extra_args": one_of(None, {}, {"a": [1, None]}), "logprob_token_ids": one_of(None, [5], [1, 2, 3]),
    "truncate_prompt_tokens": one_of(None, -1, 1, 3), "structured_outputs_regex": st.one_of(st.none(), st.none(), _regexes),
    "structured_outputs": st.one_of(st.none(), _structured), "prompt_logprobs": one_of(None, 0, 2), "detokenize": one_of(False, True),
    "lora_name": one_of(None, None, ADAPTER, "none"), "mm_processor_kwargs": one_of(None, {}, {"min_pixels": 1}, {"patch_size": 2}),
    "thinking_token_budget": one_of(None, 0, 2), "watermarking": one_of(None, False, True),
    "repetition_detection": one_of(None, {}, {"max_pattern_size": 2, "min_count": 2}, {"max_pattern_size": 1, "min_pattern_size": 3}),
    "skip_reading_prefix_cache": one_of(None, True, False),
}  # fmt: skip
_item_parts = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": one_of("input_text", "output_text", "reasoning_text", "text"), "text": words}),
        st.fixed_dictionaries({"type": st.just("refusal"), "refusal": words}),
        st.fixed_dictionaries({"type": st.just("input_image"), "image_url": one_of("data:image/png;base64,AA==", "http://a/b", None)}),
        one_of({"type": "input_file", "file_id": "a"}, {"type": []}, {}),
    ),
    max_size=2,
)  # fmt: skip
_item = st.one_of(
    _text_message,
    st.fixed_dictionaries({"type": st.just("message"), "role": one_of("user", "assistant", "developer", "tool"), "content": st.one_of(words, _item_parts)}),
    st.fixed_dictionaries({"type": st.just("reasoning"), "summary": _item_parts, "content": st.one_of(st.none(), _item_parts)}),
    st.fixed_dictionaries({"type": st.just("function_call"), "call_id": one_of("c", "", 3), "name": one_of("look_up", ""), "arguments": one_of("{}", "{", {})}),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": one_of("c", None), "output": st.one_of(words, _item_parts)}),
    one_of({"type": "item_reference", "id": "a"}, {"type": ["message"]}, {}),
)  # fmt: skip
RESPONSES_HINTS: dict[str, Strategy] = {
    "input": st.one_of(words, st.lists(_item, max_size=4)), "instructions": one_of(None, "Be brief.", ""),
    "tools": st.lists(
        st.fixed_dictionaries({"type": one_of("function", "function", "web_search"), "name": one_of("look_up", "", "é")}, optional={"parameters": _schemas, "strict": one_of(True, None)}),
        max_size=2,
    ),
    "tool_choice": one_of(None, "auto", "none", "required", "x", {"type": "function", "name": "look_up"}, {"type": "mcp"}, {"type": "function", "name": "look_up", "a": 2**70}),
    "max_output_tokens": one_of(None, 1, 3), "top_logprobs": one_of(0, 2, 20, 21), "include": one_of([], ["message.output_text.logprobs"], ["reasoning.encrypted_content"], ["a"]),
    "text": st.one_of(
        one_of({}, {"format": {"type": "text", "a": 2**70}}, {"format": {"type": "json_object"}}, {"verbosity": "low"}, {"format": {"type": "json_schema"}}),
        _schemas.map(lambda one: {"format": {"type": "json_schema", "name": "a", "schema": one}}),
    ),
    "reasoning": one_of({}, {"effort": "low", "summary": "auto"}, {"effort": "x"}), "metadata": one_of({}, {"a": "b"}, {"a": 1}),
    "prompt_cache_key": one_of(None, "a", "s" * 300), "stream_options": one_of(None, {}, {"include_obfuscation": False}),
}  # fmt: skip
_block = st.one_of(
    st.fixed_dictionaries({"type": one_of("text", "text", "thinking", "document"), "text": words, "thinking": words}),
    st.fixed_dictionaries({"type": st.just("image"), "source": one_of({"type": "base64", "data": "AA=="}, {"type": "base64", "data": 3}, {"type": "url"}, None)}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "id": one_of("a", 3), "name": one_of("look_up", ""), "input": one_of({}, {"a": 1}, "{}")}),
    st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": one_of("a", None), "content": st.one_of(st.none(), words, st.just([{"type": "text", "text": "a"}]), st.just([3]))}),
    one_of({"type": []}, {}, 3),
)  # fmt: skip
_turn = st.one_of(
    _text_message,
    st.fixed_dictionaries({"role": one_of("user", "assistant", "system", "tool"), "content": st.one_of(words, st.none(), st.lists(_block, max_size=3))}),
)  # fmt: skip
MESSAGES_HINTS: dict[str, Strategy] = {
    "messages": st.lists(_turn, max_size=4), "max_tokens": one_of(1, 2, 3),
    "system": one_of(None, "Be brief.", "", [{"type": "text", "text": "a"}], [3], [{"type": "image"}]),
    "tools": st.lists(
        st.fixed_dictionaries({"name": one_of("look_up", "", "é"), "input_schema": _schemas}, optional={"type": one_of("custom", "bash_20250124", None, [])}),
        max_size=2,
    ),
    "tool_choice": one_of(None, {"type": "auto"}, {"type": "none"}, {"type": "any"}, {"type": "tool", "name": "look_up"}, {"type": "tool"}, {}),
    "thinking": one_of(None, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "x"}),
    "output_config": st.one_of(
        one_of(None, {}, {"effort": "low"}, {"effort": "x"}, {"format": {"type": "json_schema"}}),
        _schemas.map(lambda one: {"format": {"type": "json_schema", "schema": one}}),
    ),
    "context_management": one_of(None, {}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, {"edits": 3}, {"edits": [3]}),
    "metadata": one_of(None, {}, {"user_id": "u" * 300}, {"user_id": 3}), "stop_sequences": one_of(None, [], ["a"], [""], ["é"]),
    "stream_options": one_of(None, {}, {"include_usage": True}),
}  # fmt: skip
HINTS: dict[str, Strategy] = {
    **SAMPLING_HINTS,
    "generation_kwargs": objects_of(kind_of(SamplingOptions), SAMPLING_HINTS),
    "sampling_params": objects_of(kind_of(SamplingOptions), SAMPLING_HINTS),
    "token_ids": _ids, "request_id": one_of(None, "a", "cmpl-a"),
    "prompts": st.one_of(
        st.lists(_ids, min_size=1, max_size=3),
        st.lists(words, min_size=1, max_size=2),
        st.lists(
            st.fixed_dictionaries(
                {"prompt_token_ids": _ids},
                optional={
                    "cache_salt": _salts, "mm_processor_kwargs": one_of(None, {}, {"a": 1}),
                    "multi_modal_data": one_of(None, {}, {"image": None}, {"image": []}, {"image": "aGVsbG8="}, {"image": ["", "x"]}),
                },
            ),
            min_size=1, max_size=2,
        ),
    ),
    "prompt": st.one_of(words, _ids, st.lists(_ids, min_size=1, max_size=2), st.lists(words, min_size=1, max_size=2)),
    "images": one_of(None, None, [], [None], ["aGVsbG8="], [["", "x"]], [None, "data:image/png;base64,AA=="]),
    "content_parts": one_of(None, None, [], [{"type": "image_url", "url": "data:image/png;base64,AA=="}]),
    "features": one_of(
        None, None, {"mm_hashes": {"image": []}, "mm_placeholders": {"image": []}, "kwargs_data": {"image": []}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}, "kwargs_data": {"image": ["titopool-image:1:aGk="]}},
    ),
    "messages": messages, "tools": st.one_of(st.none(), st.lists(_tool, max_size=2)),
    "tool_choice": st.one_of(st.none(), one_of("none", "auto", "required", "x"), _named),
    "chat_template_kwargs": _template_kwargs, "model": one_of(None, None, MODEL, ADAPTER, "none"),
    "cache_salt": _salts, "tokens": _ids, "top_logprobs": one_of(0, 1, 5, 20), "stream": st.booleans(),
    "stream_options": one_of(None, {}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}),
    "response_format": st.one_of(
        st.none(), one_of({"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {}, {"type": []}),
        st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"schema": _schemas})}),
    ),
    "sequences": st.lists(_ids, min_size=1, max_size=2), "prompt_lengths": st.lists(one_of(0, 1, 2), min_size=1, max_size=2),
    # For weights, pauses and adapters. Nothing listens at these addresses.
    "session": one_of("first", "second"), "update": one_of("none", "x" * 32), "policy": one_of("keep", "drain", "abort"),
    "host": one_of("127.0.0.1", "localhost", "::1", "127.0.0.1\0", "a" * 300, "256.256.256.256", ".", "a..b", "x" * 300_000),
    "port": one_of(1, 2), "world_size": one_of(1, 2, 3, 4), "lease_s": one_of(0.01, 0.2, 1), "chunk_bytes": one_of(0, 1, 4096),
    "names": one_of(["model.norm.weight"], ["lm_head.weight", "x"], []), "dtypes": one_of(["float32"], ["torch.bfloat16", "x"], []),
    "shapes": one_of([[256]], [[2048, 256], [0]], [[]], []), "version": one_of(None, 0, 1, 2**53), "checksum": one_of(True, False, "0" * 16),
    "path": one_of(None, *(f"{ROOT}/{name}" for name in ("weights", "adapter", "broken", "loop", "missing", "file", "", "a" * 300)), "/etc", "..", "\0"),
    "min_weight_version": one_of(None, None, 0, -1), "weight_version": one_of(None, "", "step-7", "é" * 257),
    "new_version": one_of("", "step-8", "x" * 300), "action": one_of("checksum", "compare", "reset", "x"),
    "baseline": one_of(None, {}, {"dp0:w": "0"}, []), "request_ids": one_of(["none"], ["cmpl-1", "\0"]),
    "weight_dir": one_of(None, None, f"{ROOT}/weights", f"{ROOT}/adapter"),
    "lora_path": one_of(*(f"{ROOT}/{name}" for name in ("adapter", "adapter", "weights", "broken", "loop", "missing", "file", "a" * 300)), "/etc", ""),
    "name": one_of("model.norm.weight", "x"), "dtype": one_of("float32", "torch.float32", "x"), "shape": one_of([256], [0], []),
}  # fmt: skip
# The backend or the number of ranks is always wrong: a group would wait for the trainer.
INIT_INFOS = st.one_of(
    st.fixed_dictionaries(
        {"rank_offset": one_of(1, 2, 0), "world_size": one_of(1, 7), "backend": one_of("gloo", "nccl", "x")},
        optional={
            "master_address": one_of("127.0.0.1", ""), "master_port": one_of(1, 0, 2**16), "packed": st.booleans(),
            "packed_buffer_size_bytes": one_of(0, 1, 2**30), "packed_num_buffers": one_of(2, None),
            "nccl_unique_id_b64": one_of("", "A" * 172, "é", None), "sparse": one_of(True),
        },
    ),
    one_of([], None, {}),
)  # fmt: skip
UPDATE_INFOS = st.one_of(
    st.fixed_dictionaries(
        {"names": one_of([], ["w"], ["w", "w"]), "dtype_names": one_of([], ["float32"], ["x", "y"]), "shapes": one_of([], [[2]], [[2], []])},
        optional={"packed": st.booleans(), "packed_buffer_size_bytes": one_of(0, 1), "patch": one_of(1)},
    ),
    one_of([], [{}], None, {}),
)  # fmt: skip
ADAPTER_HINTS = {**HINTS, "lora_name": one_of(ADAPTER, ADAPTER, "other", "x" * 200)}
_sglang_sampling = {
    name: SAMPLING_HINTS[one]
    for name, one in (
        ("min_new_tokens", "min_tokens"), ("sampling_seed", "seed"), ("n", "n"), ("temperature", "temperature"),
        ("top_p", "top_p"), ("top_k", "top_k"), ("min_p", "min_p"), ("repetition_penalty", "repetition_penalty"),
        ("stop", "stop"), ("stop_token_ids", "stop_token_ids"), ("ignore_eos", "ignore_eos"), ("logit_bias", "logit_bias"),
        ("no_stop_trim", "ignore_eos"),
    )
}  # fmt: skip
# A prompt of SGLang's /generate.
SGLANG_HINTS = {
    **HINTS,
    "input_ids": _ids, "text": words, "rid": one_of(None, "a"), "top_logprobs_num": one_of(0, 0, 1, 128, 129),
    "return_logprob": st.booleans(), "logprob_start_len": one_of(-1, 0, 1, 9), "lora_path": one_of(None, ADAPTER, "none"),
    "token_ids_logprob": one_of(None, [5], [1, 2, 3], [9999]), "image_data": one_of(None, [], "aGVsbG8=", ["", "x"]),
    "sampling_params": st.fixed_dictionaries(
        {"max_new_tokens": one_of(0, 1, 2, 4)},
        optional={
            **_sglang_sampling, "regex": _regexes, "json_schema": st.one_of(_schemas, _schemas.map(lambda one: dump(one).decode())),
            "ebnf": one_of('root ::= "a" | "b"', "root ::= x", ""), "stop_regex": one_of(None, "a"), "beam_width": one_of(1, 2),
        },
    ),
}  # fmt: skip
# TRL's communicator would wait for its rank, so only other world sizes are sent: they are refused.
ALONE_HINTS = {**HINTS, "world_size": one_of(1, 2, 4)}
