"""Bodies of SGLang's native routes, without an engine."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from app.call.call import Call
from app.call.jobs import Prompt, make_jobs
from app.generate import GENERATE_BODY
from app.pool.request import ChunkOfJob, count_nothing
from app.route.decoding import decode_body
from app.sglang import bodies as sglang
from app.sglang import sglang_unused_fields as sglang_fields
from app.sglang.answers import PromptRequest, SGLangRequest
from app.sglang.routes import generate_as_sglang
from app.sglang.stream import SGLangEvents
from app.trl.bodies import GenerateBody
from tests.kit.workers.pools import FACTS
from titopool.errors import InvalidRequest
from titopool.settings.config import ServerConfig
from titopool.settings.sampling import SamplingOptions
from titopool.wire.messages import Chunk, Completion
from titopool.wire.pool_state import PoolWeights

# Of GenerateReqInput and SamplingParams in SGLang 0.5.23, but for those that SGLang sets itself.
THEIR_FIELDS = """
    rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes
    mm_content_hashes use_audio_in_video video_config sampling_params watermark return_logprob
    logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask sampling_logprobs_mode
    return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs
    return_flat_raw_top_logprobs_b64 stream log_metrics return_hidden_states return_routed_experts
    routed_experts_start_len return_indexer_topk modalities session_params lora_path lora_id
    custom_logit_processor positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room
    bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank disagg_prefill_dp_rank
    routing_key conversation_id http_worker_ipc background require_reasoning max_thinking_tokens
    priority extra_key no_logs custom_labels return_bytes return_entropy return_prompt_token_ids
    external_trace_header received_time need_wait_for_mm_inputs num_items_assigned encoder_urls
    max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config
    mm_processor_kwargs multi_item_delimiter_indices token_indices_to_pool cache_salt kv_hints
"""
THEIR_SAMPLING = """
    max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
    presence_penalty repetition_penalty min_new_tokens n beam_width json_schema regex ebnf
    structural_tag ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim
    stream_interval logit_bias sampling_seed custom_params watermark
"""


def decoded(**fields: Any) -> sglang.SGLangBody:
    body = decode_body(msgspec.json.encode(fields), GENERATE_BODY)
    assert isinstance(body, sglang.SGLangBody)
    return body


def prompts_of(**fields: Any) -> list[sglang.SGLangPrompt]:
    return sglang.split_prompts(decoded(**fields))


def options_of(**sampling: Any) -> SamplingOptions:
    (prompt,) = prompts_of(text="a", sampling_params=sampling)
    return prompt.options


def test_each_listed_field_of_sglang_is_in_one_of_the_server_s_tables():
    honoured = {*sglang.RequestFields.__struct_fields__, *sglang.PromptFields.__struct_fields__}
    assert set(THEIR_FIELDS.split()) == (honoured | {*sglang_fields.UNUSED}) - {
        "min_weight_version"
    }
    options = {*sglang.NAMES, *sglang.GRAMMARS}
    assert set(THEIR_SAMPLING.split()) == options | {*sglang_fields.UNUSED_SAMPLING}
    assert not honoured & sglang_fields.UNUSED.keys()
    assert set(sglang.NAMES.values()) <= {*SamplingOptions.__struct_fields__}


def test_nulls_are_left_out():
    nulls = dict.fromkeys(THEIR_FIELDS.split())
    options = dict.fromkeys(THEIR_SAMPLING.split())
    del options["max_new_tokens"]
    plain = decoded(text="a", sampling_params={})
    found = decoded(**{**nulls, "text": "a", "sampling_params": options})
    assert found.fields == plain.fields
    (one,), (other,) = sglang.split_prompts(found), sglang.split_prompts(plain)
    assert one.options == other.options


def test_the_body_decides_between_trl_s_form_and_sglang_s():
    body = decode_body(b'{"prompts": [[1]]}', GENERATE_BODY)
    assert isinstance(body, GenerateBody)
    for fields in ({}, {"prompts": None}, {"prompts": [[1]], "text": "a"}, {"text": "a", "input_ids": [1]}):  # fmt: skip
        with pytest.raises(InvalidRequest, match="expected one of prompts"):  # fmt: skip
            decoded(**fields)
    # TRL's own errors stay.
    with pytest.raises(InvalidRequest, match="unknown field `foo`"):
        decoded(prompts=[[1]], foo=1)


def test_options_have_sglang_s_defaults_and_names():
    assert options_of() == SamplingOptions(max_tokens=128, detokenize=True)
    assert options_of(max_new_tokens=None).max_tokens is None
    found = options_of(
        min_new_tokens=2, sampling_seed=3, no_stop_trim=True, regex="", json_schema='{"type": 1}',
        logit_bias={"5": 1}, top_k=1 << 30, stream_interval=4, beam_width=1, stop_regex=[],
    )  # fmt: skip
    assert (found.min_tokens, found.seed, found.include_stop_str_in_output) == (2, 3, True)
    assert found.structured_outputs is not None
    assert (found.structured_outputs.json, found.structured_outputs.regex) == ('{"type": 1}', None)
    assert (found.logit_bias, found.top_k) == ({5: 1}, 1 << 30)


def test_a_prompt_without_a_completion_is_scored():
    (prompt,) = prompts_of(
        input_ids=[1, 2], return_logprob=True, logprob_start_len=0,
        sampling_params={"max_new_tokens": 0},
    )  # fmt: skip
    assert prompt.is_scored_only
    assert (prompt.options.max_tokens, prompt.options.logprobs, prompt.options.prompt_logprobs) == (1, 0, 0)  # fmt: skip


def test_log_probabilities_need_return_logprob():
    options = prompts_of(text="a", top_logprobs_num=3, logprob_start_len=0)[0].options
    assert options.logprobs is options.prompt_logprobs is None


def test_a_batch_has_a_value_for_all_prompts_or_one_for_each():
    prompts = prompts_of(
        input_ids=[[1], [2, 3]], sampling_params=[{"n": 2}, None], rid="a", cache_salt=["x", None],
        token_ids_logprob=[5], image_data=[None, "file"], return_logprob=True,
    )  # fmt: skip
    first, second = prompts
    assert [first.location, second.location] == ["input_ids[0]", "input_ids[1]"]
    assert [first.options.n, second.options.n] == [2, 1]
    assert [one.fields.rid for one in prompts] == ["a", "a"]
    assert [one.fields.cache_salt for one in prompts] == ["x", None]
    assert [one.options.logprob_token_ids for one in prompts] == [[5], [5]]
    assert (first.fields.image_data, second.fields.image_data) == (None, "file")
    assert second.images == "image_data[1]"
    assert decoded(input_ids=[[1]]).batch_size == 1
    assert decoded(input_ids=[1], image_data=["x", "y"]).batch_size is None


def test_options_that_prompts_share_are_made_and_encoded_once():
    first, second, third = prompts_of(
        text=["a", "b", "c"], sampling_params={"regex": "x"}, return_logprob=[True, True, False],
        token_ids_logprob=[[5], [5], None],
    )  # fmt: skip
    assert first.options is second.options
    assert first.options != third.options
    ids = np.array([1], np.int32)
    prompts = [Prompt(ids, "text", options=one.options) for one in (first, second, third)]
    jobs = make_jobs(prompts, first.options, FACTS, with_prefixes=False)
    assert jobs[0].sampling is jobs[1].sampling
    assert bytes(jobs[1].sampling) != bytes(jobs[2].sampling)


def checked_call(config: ServerConfig) -> Any:
    """A call that nobody has sent, for the checks of bodies."""
    call: Any = SimpleNamespace(config=config, facts=FACTS, identify=lambda *_: None)
    call.check_num_completions = partial(Call.check_num_completions, call)
    return call


def test_too_many_prompts_are_refused_before_there_is_an_object_for_each():
    call = checked_call(ServerConfig(max_completions_per_request=2))
    for source, prompts in (("input_ids", [[1]] * 3), ("text", ["a"] * 3)):
        body = decoded(**{source: prompts, "rid": 5})
        with pytest.raises(InvalidRequest, match=f"{source}: expected at most 2 completions"):
            generate_as_sglang(call, body)


def test_a_salt_is_short_on_all_routes():
    for fields in ({"prompts": [{"prompt_token_ids": [1], "cache_salt": "a" * 1025}]}, {"text": "a", "cache_salt": "a" * 1025}):  # fmt: skip
        with pytest.raises(InvalidRequest, match="cache_salt: expected `str` of length <= 1024"):
            prompts_of(**fields)
    (prompt,) = prompts_of(text="a", cache_salt="a" * 1024)
    assert prompt.fields.cache_salt


def test_chunks_that_wait_are_one_event_for_each_completion():
    (sent,) = prompts_of(text="a", sampling_params={"n": 2})
    prompt = Prompt(np.array([1], np.int32), "text", client_id="r")
    link = SimpleNamespace(weights=PoolWeights(), label_of=str)
    call: Any = SimpleNamespace(link=link, count_results=count_nothing)
    request = SGLangRequest(call, decoded(text="a").fields, [PromptRequest(sent, prompt, 0)], True, None)  # fmt: skip
    chunks = [
        ChunkOfJob(0, Chunk(1, 1, [(index, Completion(ids.tobytes(), end, None, [(0, 0)], text))]))
        for index, ids, text, end in (
            (0, np.array([5, 6], np.int32), "ab", ""), (1, np.array([7], np.int32), "x", ""),
            (0, np.array([8], np.int32), "c", "length"),
        )
    ]  # fmt: skip
    events = SGLangEvents(request)
    found = list(events.write_chunks(chunks))
    assert [(one["index"], one["output_ids"], one["text"]) for one in found] == [(0, [5, 6, 8], "abc"), (1, [7], "x")]  # fmt: skip
    first, second = (one["meta_info"] for one in found)
    assert first["finish_reason"] == {"type": "length", "length": 3}
    assert first["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert second["finish_reason"] is None


BAD = {
    # name of the case: (fields, start of the message, param)
    "text": ({"text": 3}, "text: expected `str", "text"),
    "bool-id": ({"input_ids": [1, True]}, "input_ids[1]: expected `int`, got `bool`", "input_ids"),
    "id-in-batch": ({"input_ids": [[1], ["a"]]}, "input_ids[1][0]: expected `int`", "input_ids"),
    "mixed": ({"input_ids": [1, [2]]}, "input_ids[0]: expected `array", "input_ids"),
    "null-prompt": ({"text": ["a", None]}, "text[1]: expected a prompt, got null", "text"),
    "no-prompts": ({"text": []}, "text: expected at least one prompt", "text"),
    "unknown": ({"text": "a", "temperature": 1}, "object contains unknown field `temperature`", "temperature"),
    "unknown-option": ({"text": "a", "sampling_params": {"max_tokens": 1}}, "sampling_params: object contains unknown field `max_tokens`", "sampling_params"),
    "range": ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens: expected", "sampling_params"),
    "range-in-batch": ({"text": ["a"], "sampling_params": [{"min_new_tokens": -1}]}, "sampling_params[0].min_new_tokens: expected", "sampling_params"),
    "options-list": ({"text": "a", "sampling_params": [{}]}, "sampling_params: expected `object`, got `array`", "sampling_params"),
    "stop-regex": ({"text": ["a"], "sampling_params": [{"stop_regex": "a"}]}, "sampling_params[0].stop_regex: expected \"\" or [] or no value, got \"a\": use stop", "sampling_params"),
    "lengths": ({"text": ["a", "b"], "rid": ["a"]}, "rid: expected one entry for each of the 2 prompts, got 1", "rid"),
    "rid-list": ({"text": "a", "rid": ["a"]}, "rid: expected `str", "rid"),
    "start": ({"text": "a", "logprob_start_len": -2}, "logprob_start_len: expected `int` >= -1", "logprob_start_len"),
    "start-of-stream": ({"text": "a", "return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len: expected none with stream", "logprob_start_len"),
    "best-of-stream": ({"text": "a", "return_logprob": True, "top_logprobs_num": 1, "stream": True}, "top_logprobs_num: expected none with stream", "top_logprobs_num"),
    "chosen-of-stream": ({"text": "a", "return_logprob": True, "token_ids_logprob": [1], "stream": True}, "token_ids_logprob: expected none with stream", "token_ids_logprob"),
    "too-many-chosen": ({"text": "a", "token_ids_logprob": [1] * 129}, "token_ids_logprob: expected `array` of length <= 128", "token_ids_logprob"),
    "image-of-batch": ({"text": ["a", "b"], "image_data": "x"}, "image_data: expected a list with one entry for each of the 2 prompts, got str", "image_data"),
    "rid-with-blank": ({"text": "a", "rid": "a b"}, "rid: expected `str` matching regex", "rid"),
    "rid-with-newline": ({"text": "a", "rid": "a\n"}, "rid: expected `str` matching regex", "rid"),
    "chosen-and-best": ({"text": "a", "token_ids_logprob": [1], "top_logprobs_num": 1}, "token_ids_logprob: expected none", "token_ids_logprob"),
    "embeds": ({"text": "a", "input_embeds": [[0.0]]}, "input_embeds: expected no value, got [[0.0]]: prompts are text or ids", "input_embeds"),
    "video": ({"text": "a", "video_data": "x"}, "video_data: expected [] or false or no value, got \"x\": prompts are text, ids and images", "video_data"),
    "experts": ({"text": "a", "return_routed_experts": [True]}, "return_routed_experts: expected `bool`", "return_routed_experts"),
    "experts-start": ({"text": "a", "routed_experts_start_len": -1}, "routed_experts_start_len: expected `int` >= 0", "routed_experts_start_len"),
    "priority": ({"text": "a", "priority": 1}, "priority: expected 0 or no value, got 1: jobs are sent in", "priority"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_field_is_refused_by_name(case: str):
    fields, message, param = BAD[case]
    with pytest.raises(InvalidRequest) as caught:
        prompts_of(**fields)
    assert caught.value.message.startswith(message)
    assert caught.value.param == param


def test_routed_experts_need_a_server_that_returns_them():
    with pytest.raises(InvalidRequest, match="--enable-return-routed-experts") as caught:
        generate_as_sglang(
            checked_call(ServerConfig()), decoded(input_ids=[1], return_routed_experts=True)
        )
    assert caught.value.param == "return_routed_experts"


def test_errors_about_options_have_the_client_s_names():
    error = InvalidRequest("min_tokens: expected at most max_tokens (1), got 2", param="min_tokens")
    found = sglang.with_sglang_names(error, "sampling_params")
    assert (found.message, found.param) == ("sampling_params: min_new_tokens: expected at most max_new_tokens (1), got 2", "sampling_params")  # fmt: skip
    error = InvalidRequest("logprobs: at most 2; or a greater --max-logprobs", param="logprobs")
    found = sglang.with_sglang_names(error, "sampling_params")
    assert (found.message, found.param) == ("top_logprobs_num: at most 2; or a greater --max-logprobs", "top_logprobs_num")  # fmt: skip


def test_prompts_with_the_same_options_have_their_own_number_of_log_probabilities():
    options = {"temperature": 0.5}
    found = prompts_of(
        text=["a", "b"], sampling_params=options, return_logprob=True, top_logprobs_num=[0, 2]
    )
    assert [one.options.logprobs for one in found] == [0, 2]
    found = prompts_of(
        text=["a", "b"], sampling_params=options, return_logprob=True, logprob_start_len=[-1, 0]
    )
    assert [one.options.prompt_logprobs for one in found] == [None, 0]
