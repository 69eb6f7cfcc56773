"""What travels between a front-end process and a worker: one MessagePack frame each.

The two unions at the end are the complete list. Numbers of tokens and log-probabilities
travel as the bytes of little-endian arrays: `int32` for token ids and counts, `float32`
for log-probabilities. Structs without a tag are parts of messages.
"""

from typing import Any

import msgspec

from titopool.wire.commands import Command, CommandDone
from titopool.wire.pool_state import Count, PoolState, PoolWeights

# A job's id is unique in its front-end process; the attempt grows each time it is sent again.
JobId = int


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one sequence, all positions after one another.

    At each position the entries are sorted best first and hold the sampled token.
    """

    values: bytes
    # Empty when the only entry at each position is the sampled token: the completion's own ids.
    token_ids: bytes = b""
    # Entries at each position; empty when there is exactly one at each.
    counts: bytes = b""
    # Of a prompt's: the rank of each entry in the vocabulary, from 1.
    ranks: bytes = b""


class Completion(msgspec.Struct, frozen=True, array_like=True):
    """One sampled sequence of a job, or what was added to one that is streamed."""

    token_ids: bytes
    # Empty: it goes on.
    finish_reason: str
    logprobs: Logprobs | None
    # [(weight version, index of the first token that it made), …]; of one that is streamed, of all
    # its tokens so far.
    weight_versions: list[tuple[int, int]]
    # Where it was asked for, up to a stop string.
    text: str = ""
    # The stop string or stop token that ended it; None for the end-of-text token.
    stop_reason: int | str | None = None
    # What vLLM's parsers made of the text (`content`, `reasoning`, `tool_calls`, as OpenAI names
    # and nests them); of a stream, what they add. None without parsers.
    message: dict[str, Any] | None = None


class ImageFacts(msgspec.Struct, frozen=True):
    """What a front end must know of a model that takes images."""

    # Most images in one prompt.
    max_images: int
    # Ids that stand for images in a prompt and mean nothing without one.
    placeholder_ids: list[int]
    # Whether a prompt holds such an id for each image; some models put images elsewhere.
    has_placeholders: bool


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a front end must know of a worker's engine to check requests and to route them."""

    model: str
    tokenizer: str
    tokenizer_revision: str | None
    trust_remote_code: bool
    vllm_version: str
    # Names of vLLM's SamplingParams fields in that version.
    sampling_fields: list[str]
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    # Greatest `logprobs` that the engine accepts; -1: the whole vocabulary.
    max_logprobs: int
    # Tensor- times pipeline-parallel size.
    world_size: int
    # Tokens that it keeps keys and values of, for prompts to come; 0: none.
    num_cache_tokens: int = 0
    # None: the model takes no images.
    images: ImageFacts | None = None
    # LoRA adapters that may be loaded at once; 0: none.
    max_loras: int = 0
    # vLLM's names; empty: text is not searched for tool calls, or for reasoning.
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    # Of the tokenizer's files; empty where they are in no folder.
    tokenizer_digest: str = ""


class WorkerCounters(msgspec.Struct):
    """What a worker process has done since it started; a restart begins at nought again."""

    num_completed_jobs: int = 0
    num_failed_jobs: int = 0
    num_aborted_jobs: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_images: int = 0
    # Time that threads spent on making tensors of them.
    image_seconds: float = 0.0
    # Prompts that came as ids with messages beside them, and those of them that the chat template
    # renders otherwise.
    num_compared_prompts: int = 0
    num_drifted_prompts: int = 0


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image file as the client sent it."""

    data: bytes
    # Of the file and the arguments that it is processed with: its name in all caches.
    digest: bytes


class ChatParsing(msgspec.Struct, frozen=True):
    """What vLLM's parsers of tool calls and reasoning look at beside the text."""

    tools: list[dict[str, Any]] = []
    # "none", "auto", "required", or {"type": "function", "function": {"name": …}}.
    tool_choice: str | dict[str, Any] = "none"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    # Calls that the conversation has already: some parsers count on.
    num_past_calls: int = 0


class Job(msgspec.Struct, frozen=True):
    """One prompt with its n completions; goes whole to one worker."""

    job_id: JobId
    attempt: int
    prompt_token_ids: bytes
    # Completions, and the most tokens that prompt and completions may come to: its load.
    num_sequences: Count
    num_tokens: Count
    # A `titopool.settings.sampling.SamplingOptions`, encoded once for all jobs of a request.
    sampling: msgspec.Raw
    cache_salt: str | None = None
    # Digests of the prompt's blocks (`titopool.wire.prefixes`); None where nobody looks at them.
    prefix: bytes | None = None
    images: list[Image] = []
    # For the model's processor of images.
    mm_processor_kwargs: dict[str, Any] = {}
    # Whether to send `Chunk`s before the end.
    is_streamed: bool = False
    # A ChatParsing, encoded; empty: the text is nobody's message.
    chat: bytes = b""
    # Name of the LoRA adapter that it runs with; empty: none.
    adapter: str = ""


# ---- front end → worker -------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Sent every `heartbeat_interval_s`: this front end is there; answer with a Heartbeat."""

    # What it knows of the pool.
    pool: PoolState = PoolState()


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Run these jobs; each is ended exactly once, in a `Results`."""

    # The worker process that the front end means: another ignores the message.
    incarnation: str
    jobs: list[Job]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these jobs (client gone, deadline); they are not answered any more."""

    jobs: list[tuple[JobId, int]]


class Drift(msgspec.Struct, frozen=True, tag="drift"):
    """Prompts that came as ids and as messages, for the worker to count: /metrics asks it."""

    num_compared: Count
    num_drifted: Count


# ---- worker → front end -------------------------------------------------------------


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent every `heartbeat_interval_s` to every front end that said Hello lately."""

    worker_id: str
    # New for each process: tells a restarted worker from the one before.
    incarnation: str
    phase: str
    phase_s: float
    # Those that serve here.
    weights: PoolWeights
    # Known once the engine is loaded, and when that was (Unix time).
    facts: WorkerFacts | None
    loaded_at: float
    # Front ends that use this worker, and the load that the others put on it.
    num_front_ends: int
    other_sequences: int
    other_tokens: int
    # Completions under way for all front ends, and what was done for them.
    num_sequences: int
    counters: WorkerCounters
    # Digests of the prefixes that jobs of other front ends left in the cache since the last
    # heartbeat; not all of them if they are many.
    prefixes: bytes = b""
    # LoRA adapters by name, and the version of each that serves here.
    adapters: dict[str, int] = {}
    # What this worker knows of the pool.
    pool: PoolState = PoolState()


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Sent within 10 ms of a change: what the other front ends have under way here.

    A heartbeat's figures are half a second old, and those of two workers not equally so: when
    a batch ends and many requests follow, all of them would go where its end was told first.
    """

    other_sequences: int
    other_tokens: int


NO_LOAD = Load(0, 0)


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """What a streamed job made since the last one; its `Completed` repeats the ids only."""

    job_id: JobId
    attempt: int
    # (index among the job's n, what was added to that completion)
    pieces: list[tuple[int, Completion]]
    num_cached_tokens: int = 0
    # In the first chunk, as in `Completed`.
    prompt_token_ids: bytes = b""
    # Of the LoRA adapter that it runs with.
    adapter_version: int | None = None


class Completed(msgspec.Struct, frozen=True, tag="completed"):
    """A job ended well."""

    job_id: JobId
    attempt: int
    completions: list[Completion]
    num_cached_tokens: int
    # Digests that each completion adds to `Job.prefix`, after one another; for a prompt with
    # images all of them from the first block on.
    prefix: bytes = b""
    # The prompt with each image's placeholder expanded; empty for a prompt without images.
    prompt_token_ids: bytes = b""
    # Where they were asked for: k + 1 at each token of the prompt but the first, its own before
    # the best k.
    prompt_logprobs: Logprobs | None = None
    # Of the LoRA adapter that it ran with.
    adapter_version: int | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A job was refused by the engine or failed in it; `code` is one of `titopool.errors`."""

    job_id: JobId
    attempt: int
    code: str
    message: str
    # The field of the request that it is about.
    param: str | None = None


class Results(msgspec.Struct, frozen=True, tag="results"):
    """Jobs that ended, and what streamed ones made, since the last such message, in order."""

    results: list[Completed | Failed | Chunk]


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """The worker takes no more jobs and drops those it has."""

    # Why the worker ends, for the log; empty when it was asked to.
    reason: str
    # Whether one of its jobs may be the cause.
    blames_jobs: bool = False


ToWorker = Hello | Generate | Abort | Drift | Command
FromWorker = Heartbeat | Load | Results | Stopping | CommandDone

encode = msgspec.msgpack.Encoder().encode
decode_chat_parsing = msgspec.msgpack.Decoder(ChatParsing).decode
# What a decoder raises over a frame that is no message, text that is no UTF-8 and depth included.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
