"""The facts of a loaded engine that front ends need: its limits, its tokenizer, its parsers."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

from titopool.settings.config import ServerConfig
from titopool.wire.messages import ImageFacts, WorkerFacts

# Files of tokenizers of any kind, and of chat templates.
TOKENIZER_FILES = (
    "tokenizer*", "*.model", "*.tiktoken", "tekken.json", "vocab*", "merges.txt",
    "added_tokens.json", "special_tokens_map.json", "chat_template*",
)  # fmt: skip


def facts_of(
    llm: Any, config: ServerConfig, *, images: ImageFacts | None, max_loras: int
) -> WorkerFacts:
    """The facts of `llm`, vLLM's AsyncLLM."""
    import vllm
    from vllm import SamplingParams

    engine, model = llm.vllm_config, llm.model_config
    cache = engine.cache_config
    # Up to vLLM 0.31 the model's option.
    captured = getattr(engine, "aux_output_config", model)
    num_cache_tokens = cache.kv_cache_size_tokens if cache.enable_prefix_caching else 0
    return WorkerFacts(
        model=str(config.model or model.model),
        tokenizer=str(model.tokenizer),
        tokenizer_revision=model.tokenizer_revision,
        trust_remote_code=bool(model.trust_remote_code),
        vllm_version=vllm.__version__,
        sampling_fields=[
            name for name in SamplingParams.__struct_fields__ if not name.startswith("_")
        ],
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        max_num_seqs=engine.scheduler_config.max_num_seqs,
        max_logprobs=model.max_logprobs,
        world_size=engine.parallel_config.world_size,
        num_cache_tokens=num_cache_tokens or 0,
        images=images,
        max_loras=max_loras,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        tokenizer_digest=digest_of_tokenizer(str(model.tokenizer)),
        dtype=str(model.dtype),
        logprobs_mode=str(model.logprobs_mode),
        weight_backend="gloo" if engine.device_config.device_type == "cpu" else "nccl",
        max_lora_rank=engine.lora_config.max_lora_rank if engine.lora_config else 0,
        routed_expert_bytes=bytes_of_experts(model) if captured.enable_return_routed_experts else 0,
        # vLLM 0.25.1 has no sampling masks.
        has_sampling_masks=getattr(model, "return_sampling_mask", False),
        has_raw_logprobs=config.raw_logprobs,
    )


def bytes_of_experts(model: Any) -> int:
    """Bytes of a token's routed experts: an id for each layer and each expert that is chosen in it.

    Args:
        model: vLLM's ModelConfig.
    """
    if not hasattr(model, "get_num_experts_per_tok"):
        # vLLM 0.25.1's ids have 32 bits at most.
        shape = model.hf_text_config
        return int(4 * shape.num_hidden_layers * shape.num_experts_per_tok)
    num_ids = model.get_total_num_hidden_layers() * model.get_num_experts_per_tok()
    # As vLLM's RoutedExpertsCapturer chooses the dtype.
    return int(num_ids * (1 if model.get_num_experts() <= 256 else 2))


def digest_of_tokenizer(tokenizer: str) -> str:
    """A digest of the contents of a tokenizer's files; "" if `tokenizer` is a hub name, not a folder.

    It distinguishes tokenizers in folders of the same path on different hosts.
    """
    folder = Path(tokenizer)
    files = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
    if not files:
        return ""
    digest = blake2b(digest_size=16)
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
