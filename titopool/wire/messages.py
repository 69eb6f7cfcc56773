"""Messages between a front end and a worker: one MessagePack frame each.

`ToWorker` and `FromWorker` at the end list all messages. Structs without a tag are fields of
messages. Arrays travel as little-endian bytes: `int32` for token ids, counts and ranks, `float32`
for log-probabilities.
"""

from typing import Any

import msgspec

from titopool.wire.commands import Command, CommandDone
from titopool.wire.pool_state import Count, PoolState, PoolWeights

# Unique in its front end. A job that is sent again keeps its id and gets the next attempt number.
JobId = int


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one sequence, position after position.

    The entries of each position include the sampled token and are sorted, best first.
    """

    values: bytes
    # Empty if each position has one entry, the sampled token: then they are the completion's ids.
    token_ids: bytes = b""
    # Number of entries at each position; empty if each position has one entry.
    counts: bytes = b""
    # For a prompt only: the rank of each entry in the vocabulary, from 1.
    ranks: bytes = b""


class Completion(msgspec.Struct, frozen=True, array_like=True):
    """One completion of a job, or in a `Chunk` what a streamed completion has gained."""

    token_ids: bytes
    # Empty: unfinished.
    finish_reason: str
    logprobs: Logprobs | None
    # [(weight version, index of its first token), …]; in a `Chunk` for all tokens so far.
    weight_versions: list[tuple[int, int]]
    # Up to a stop string; empty unless the request asked for text.
    text: str = ""
    # The stop string or stop token; None for the end-of-text token.
    stop_reason: int | str | None = None
    # The output of vLLM's parsers in OpenAI's format (`content`, `reasoning`, `tool_calls`); in a
    # `Chunk` the delta. None without parsers.
    message: dict[str, Any] | None = None


class ImageFacts(msgspec.Struct, frozen=True):
    """What a front end must know about a model that accepts images."""

    # Per prompt.
    max_images: int
    # Token ids that stand for images in a prompt.
    placeholder_ids: list[int]
    # Whether a prompt needs a placeholder for each image. Some models insert images elsewhere.
    has_placeholders: bool


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a front end must know about a worker's engine to check and route requests."""

    model: str
    tokenizer: str
    tokenizer_revision: str | None
    trust_remote_code: bool
    vllm_version: str
    # Fields of SamplingParams in this version of vLLM.
    sampling_fields: list[str]
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    # Greatest accepted value of `logprobs`; -1: the whole vocabulary.
    max_logprobs: int
    # Tensor- times pipeline-parallel size.
    world_size: int
    # Capacity of the prefix cache; 0: prefix caching is off.
    num_cache_tokens: int = 0
    # None: the model does not accept images.
    images: ImageFacts | None = None
    # LoRA adapters that can be loaded at once; 0: adapters are off.
    max_loras: int = 0
    # Names of vLLM's parsers; empty: no parser.
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    # Digest of the tokenizer's files; empty if they are not in a local folder.
    tokenizer_digest: str = ""
    # The model's dtype, as torch names it, e.g. `torch.bfloat16`.
    dtype: str = ""
    # vLLM's `--logprobs-mode`.
    logprobs_mode: str = ""
    # Between the trainer and the processes that hold the model: "nccl" on GPUs, "gloo" on CPUs.
    weight_backend: str = "nccl"
    # Of a LoRA adapter; 0: adapters are off.
    max_lora_rank: int = 0


class WorkerCounters(msgspec.Struct):
    """Totals of a worker process since its start."""

    num_completed_jobs: int = 0
    num_failed_jobs: int = 0
    num_aborted_jobs: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_images: int = 0
    # Seconds that threads spent on preprocessing images.
    image_seconds: float = 0.0
    # Prompts that were sent as ids and as messages, and how many of these the chat template renders
    # to other ids.
    num_compared_prompts: int = 0
    num_drifted_prompts: int = 0


class UpdateTotals(msgspec.Struct):
    """Weight updates of one staging since the start of a worker process."""

    num_applied: int = 0
    num_failed: int = 0
    # Of the last one that was applied, in seconds: from its begin until the new weights served, and
    # how long generation was paused.
    update_s: float = 0.0
    paused_s: float = 0.0


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image file, unchanged."""

    data: bytes
    # Over the file and the processor's arguments. It is the image's key in all caches.
    digest: bytes


class ChatParsing(msgspec.Struct, frozen=True):
    """What vLLM's parsers of tool calls and reasoning need besides the text."""

    tools: list[dict[str, Any]] = []
    # "none", "auto", "required", or {"type": "function", "function": {"name": …}}.
    tool_choice: str | dict[str, Any] = "none"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    # Tool calls in the conversation so far; some parsers number calls from here.
    num_past_calls: int = 0


class Job(msgspec.Struct, frozen=True):
    """One prompt with its n completions. One worker runs all of them."""

    job_id: JobId
    attempt: int
    prompt_token_ids: bytes
    # The job's load: its completions, and the most tokens of prompt and completions together.
    num_sequences: Count
    num_tokens: Count
    # `titopool.settings.sampling.SamplingOptions`, encoded once for all jobs of a request.
    sampling: msgspec.Raw
    cache_salt: str | None = None
    # Digests of the prompt's blocks (`titopool/wire/prefixes.py`); None if the routing policy does
    # not need them.
    prefix: bytes | None = None
    images: list[Image] = []
    # Arguments of the model's image processor.
    mm_processor_kwargs: dict[str, Any] = {}
    # Whether the worker sends `Chunk`s before `Completed`.
    is_streamed: bool = False
    # `ChatParsing`, encoded; empty: no parsers run.
    chat: bytes = b""
    # Name of the LoRA adapter; empty: none.
    adapter: str = ""
    # The client's id of the request; empty: none. Several requests may have the same.
    client_id: str = ""


# ---- front end → worker -------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Sent every `heartbeat_interval_s`. The worker sends heartbeats to front ends that say hello."""

    # As this front end knows it.
    pool: PoolState = PoolState()


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Run these jobs. Each job gets exactly one `Completed` or `Failed`, in a `Results`."""

    # A worker process with another incarnation ignores the message.
    incarnation: str
    jobs: list[Job]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these jobs, because the client left or the deadline passed. No result follows."""

    jobs: list[tuple[JobId, int]]


class Drift(msgspec.Struct, frozen=True, tag="drift"):
    """Counts for `WorkerCounters`: front ends keep no totals, /metrics shows the workers'."""

    num_compared: Count
    num_drifted: Count


class EndedWaiting(msgspec.Struct, frozen=True, tag="ended_waiting"):
    """The answer to `EndWaiting`. Jobs that were sent to the worker before arrive before it."""

    name: str
    num_ended: Count


# ---- worker → front end -------------------------------------------------------------


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent every `heartbeat_interval_s` to every front end that sent a `Hello` recently."""

    worker_id: str
    # New for each process, so that front ends notice a restart.
    incarnation: str
    phase: str
    phase_s: float
    # The weights that this worker serves.
    weights: PoolWeights
    # None until the engine is loaded; `loaded_at` is the Unix time of that.
    facts: WorkerFacts | None
    loaded_at: float
    # Front ends that use this worker, and the load from front ends other than the receiver.
    num_front_ends: int
    other_sequences: int
    other_tokens: int
    # Completions in flight for all front ends, and totals for all front ends.
    num_sequences: int
    counters: WorkerCounters
    # Digests of prefixes that jobs of other front ends have added to the prefix cache since the
    # last heartbeat; some are left out if there are too many.
    prefixes: bytes = b""
    # By staging (`workers/in_model/receiving/staging.py`); "folder", and "none" before any tensor.
    updates: dict[str, UpdateTotals] = {}
    # LoRA adapters of this worker: version by name.
    adapters: dict[str, int] = {}
    # As this worker knows it.
    pool: PoolState = PoolState()


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The load from front ends other than the receiver; sent within 10 ms of a change.

    Heartbeats alone are too slow. When a batch ends and many requests follow, all of them would go
    to the worker whose heartbeat came first.
    """

    other_sequences: int
    other_tokens: int


NO_LOAD = Load(0, 0)


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """What a streamed job has sampled since its last chunk. Its `Completed` repeats only the ids."""

    job_id: JobId
    attempt: int
    # (index of the completion in the job, what it has gained)
    pieces: list[tuple[int, Completion]]
    num_cached_tokens: int = 0
    # As in `Completed`; in the first chunk only.
    prompt_token_ids: bytes = b""
    # Of the job's LoRA adapter.
    adapter_version: int | None = None


class Completed(msgspec.Struct, frozen=True, tag="completed"):
    """The result of a job that succeeded."""

    job_id: JobId
    attempt: int
    completions: list[Completion]
    num_cached_tokens: int
    # The digests that follow `Job.prefix`, of all completions, concatenated. For a prompt with
    # images all digests from the first block on.
    prefix: bytes = b""
    # The prompt with expanded image placeholders; empty for a prompt without images.
    prompt_token_ids: bytes = b""
    # If requested: k + 1 entries at each prompt token but the first, the prompt token's own before
    # the best k.
    prompt_logprobs: Logprobs | None = None
    # Of the job's LoRA adapter.
    adapter_version: int | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine refused a job or failed on it. `code` is one of `titopool/errors.py`."""

    job_id: JobId
    attempt: int
    code: str
    message: str
    # The field of the request that is wrong.
    param: str | None = None


class Results(msgspec.Struct, frozen=True, tag="results"):
    """Results and chunks since the last such message, in order."""

    results: list[Completed | Failed | Chunk]


class EndWaiting(msgspec.Struct, frozen=True, tag="end_waiting"):
    """End the jobs that wait for a worker, as aborted before their first token.

    Sent to every front end for a client's call, which only one front end has received.
    """

    # Of this call, for the answer.
    name: str
    # The clients' ids; None: all jobs.
    client_ids: list[str] | None


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """The worker stops. It accepts no more jobs and drops its jobs."""

    # For the log; empty after a signal.
    reason: str
    # Whether a job may be the cause.
    blames_jobs: bool = False


ToWorker = Hello | Generate | Abort | Drift | EndedWaiting | Command
FromWorker = Heartbeat | Load | Results | EndWaiting | Stopping | CommandDone

encode = msgspec.msgpack.Encoder().encode
decode_chat_parsing = msgspec.msgpack.Decoder(ChatParsing).decode
# What the decoders raise for an undecodable frame, also for invalid UTF-8 and deep nesting.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
