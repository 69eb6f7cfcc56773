"""Fields of SGLang's native bodies that this server does not use, as of SGLang 0.5.23.

All others are fields of the structs in `app/sglang/bodies.py`, or in its table of sampling options.
"""

from app.route.unused_fields import TRANSFER, Unused

_NO_EFFECT = Unused("it does not change what is generated", accepted=None)
_MEDIA = Unused("prompts are text, ids and images", ([], False))
_FORM = Unused("log-probabilities have one form", (False,))
_INTERNAL = Unused("SGLang's own processes set it")
_TILES = Unused("images are cut as the model's processor does by default")

# Of `POST /generate`.
UNUSED: dict[str, Unused] = {
    **dict.fromkeys(
        (
            "log_metrics", "no_logs", "custom_labels", "conversation_id", "external_trace_header",
            "received_time", "modalities", "kv_hints",
            # The pool's routing chooses the worker.
            "routing_key", "routed_dp_rank", "data_parallel_rank",
        ),
        _NO_EFFECT,
    ),
    **dict.fromkeys(("video_data", "audio_data", "use_audio_in_video", "video_config"), _MEDIA),
    **dict.fromkeys(
        (
            "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs",
            "return_flat_raw_top_logprobs_b64",
        ),
        _FORM,
    ),
    **dict.fromkeys(
        (
            "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key",
            "decode_tp_size", "disagg_prefill_dp_rank", "need_wait_for_mm_inputs",
            "num_items_assigned", "encoder_urls",
        ),
        TRANSFER,
    ),
    **dict.fromkeys(("lora_id", "http_worker_ipc"), _INTERNAL),
    **dict.fromkeys(
        (
            "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch",
            "video_max_dynamic_patch", "images_config",
        ),
        _TILES,
    ),
    "input_embeds": Unused("prompts are text or ids"),
    "positional_embed_overrides": Unused("prompts are text or ids"),
    "mm_hashes": Unused("the server hashes the images' files", ([],)),
    "mm_content_hashes": Unused("the server hashes the images' files", ([],)),
    "watermark": Unused("completions have no watermark"),
    "return_sampling_mask": Unused("no response has it", (False,)),
    "sampling_logprobs_mode": Unused("it needs return_sampling_mask"),
    "return_hidden_states": Unused("no response has them", (False,)),
    "return_indexer_topk": Unused("no response has it", (False,)),
    "return_entropy": Unused("no response has it", (False,)),
    "return_bytes": Unused("the model returns text", (False,)),
    "session_params": Unused("a prompt is sent whole; the prefix cache finds what is known"),
    "custom_logit_processor": Unused("it would run as code in the server"),
    "background": Unused("a response waits for its completions", (False,)),
    "require_reasoning": Unused("the text is not parsed", (False,)),
    "max_thinking_tokens": Unused("the text is not parsed"),
    "priority": Unused("jobs are sent in the order in which they came", (0,)),
    "extra_key": Unused("use cache_salt", ("",)),
    "multi_item_delimiter_indices": Unused("a prompt is one item"),
    "token_indices_to_pool": Unused("a prompt is one item"),
}  # fmt: skip
# Of its `sampling_params`.
UNUSED_SAMPLING: dict[str, Unused] = {
    "stream_interval": _NO_EFFECT,
    "stop_regex": Unused("use stop, with texts", ("", [])),
    "beam_width": Unused("there is no beam search", (1,)),
    "custom_params": Unused("they are for a custom_logit_processor", ({},)),
    "watermark": Unused("completions have no watermark"),
}
