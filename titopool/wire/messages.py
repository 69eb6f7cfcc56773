"""Messages between a front end and a worker: one MessagePack frame each.

`ToWorker` and `FromWorker` at the end list all messages. Structs without a tag are fields of
messages. Arrays travel as little-endian bytes: `int32` for token ids, counts and ranks, `float32`
for log-probabilities.
"""

import sys
from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec

from titopool.wire.commands import Command, CommandDone
from titopool.wire.distributions import Distribution, Durations
from titopool.wire.pool_state import Count, Finite, PoolState, PoolWeights

# Of all messages, and of what they contain, the keys of `CommandDone.result` too: it grows with each
# change of them. In every version `Hello` and `Heartbeat` are maps with the keys `type` and `wire`, so that
# processes of different versions know each other. Before the first one they had no `wire`.
WIRE_VERSION = 2
Wire = Annotated[int, msgspec.Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]
# Token ids travel as int32.
ID_BYTES = 4
# Messages are trees. Without `gc=False` for what comes in thousands, a collection that visits all of them
# stops the front end's loop for 0.1 s.
# Memory of a completion without its ids, log-probabilities and text, and of a chunk without its pieces.
COMPLETION_BYTES = CHUNK_BYTES = 512
# Unique in its front end. A job that is sent again keeps its id and gets the next attempt number.
JobId = int


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of one sequence, position after position.

    The entries of each position include the sampled token and are sorted, best first.
    """

    values: bytes
    # Empty if each position has one entry, the sampled token: then they are the completion's ids.
    token_ids: bytes = b""
    # Number of entries at each position; empty if each position has one entry.
    counts: bytes = b""
    # Ranks in the vocabulary, from 1: of a prompt those of all entries, of a completion those of the
    # sampled tokens. Empty if they are not known.
    ranks: bytes = b""
    # Of the sampled tokens, by the model's logits alone; empty without the setting `raw_logprobs`.
    raw: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        return sum(map(len, (self.values, self.token_ids, self.counts, self.ranks, self.raw)))


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """The experts that a mixture of experts used for each token of prompt and completion.

    The last token has no row: the model did not run on it.
    """

    # [rows, layers, experts of a token], in C order; row 0 belongs to token `start` of the prompt.
    data: bytes
    shape: tuple[Count, Count, Count]
    dtype: Literal["uint8", "uint16", "int32"]
    start: Count


class SamplingMask(msgspec.Struct, frozen=True, array_like=True):
    """The token ids that top-k, top-p and min-p left to sample from, position after position."""

    token_ids: bytes
    # Number of ids at each position.
    counts: bytes


class Completion(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
    # Of the whole completion, in a stream with its last piece. None if the server runs without the
    # option of vLLM, or the route does not return them.
    routed_experts: RoutedExperts | None = None
    sampling_mask: SamplingMask | None = None
    # Of each span of `weight_versions`, the oldest version whose keys and values its tokens may have read;
    # empty: those are its own.
    kv_from: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Of its text and of what it has for each token."""
        num_bytes = len(self.token_ids)
        if self.text:
            # A message repeats it.
            num_bytes += sys.getsizeof(self.text) * (1 if self.message is None else 2)
        if self.logprobs is not None:
            num_bytes += self.logprobs.num_bytes
        if self.routed_experts is not None:
            num_bytes += len(self.routed_experts.data)
        if self.sampling_mask is not None:
            num_bytes += len(self.sampling_mask.token_ids) + len(self.sampling_mask.counts)
        return num_bytes


class ImageFacts(msgspec.Struct, frozen=True):
    """What a front end must know about a model that accepts images."""

    # Per prompt.
    max_images: int
    # Token ids that stand for images in a prompt.
    placeholder_ids: list[int]
    # Whether a prompt needs a placeholder for each image. Some models insert images elsewhere.
    has_placeholders: bool
    # Why this engine would compute something else than the model; "": it does not.
    refused_because: str = ""


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
    num_cache_tokens: Count = 0
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
    # Bytes of a token's routed experts; 0: vLLM runs without `--enable-return-routed-experts`.
    routed_expert_bytes: Count = 0
    # vLLM's `--return-sampling-mask`.
    has_sampling_masks: bool = False
    # The setting of this name.
    has_raw_logprobs: bool = False


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
    image_seconds: Finite = 0.0
    # Prompts that were sent as ids and as messages, and how many of these the chat template renders
    # to other ids.
    num_compared_prompts: int = 0
    num_drifted_prompts: int = 0
    # Of `POST /mismatch`: tokens, and their sums of |trainer - sampler|, of the estimates of
    # KL(sampler || trainer), of importance weights and of their squares.
    num_mismatch_tokens: int = 0
    mismatch_difference: Finite = 0.0
    mismatch_kl: Finite = 0.0
    mismatch_weights: Finite = 0.0
    mismatch_squared_weights: Finite = 0.0
    # Completions whose tool calls and reasoning were parsed in part or not at all (`parsing_error`),
    # and ends of the helpers that parse.
    num_unparsed_completions: int = 0
    num_parser_restarts: int = 0


class FrontEndTotals(msgspec.Struct, frozen=True):
    """Of one front end in `Hello`, of all front ends in `Heartbeat`."""

    # Bytes of the memory budget.
    memory_taken: int = 0
    memory_limit: int = 0
    # Prompts that wait in the front end for a worker or for memory.
    num_waiting: int = 0
    # Requests that were answered with an error, by its code; those of front ends that have ended too.
    refused: dict[str, int] = {}

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())


class KeyTotals(msgspec.Struct):
    """What clients with keys of one name have generated since the start of a worker process."""

    num_completed_jobs: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class UpdateTotals(msgspec.Struct):
    """Weight updates of one staging since the start of a worker process."""

    num_applied: int = 0
    num_failed: int = 0
    # Of the last one that was applied, in seconds: from its begin until the new weights served, and
    # how long generation was paused.
    update_s: Finite = 0.0
    paused_s: Finite = 0.0


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image file, unchanged."""

    data: bytes
    # Over the file and the processor's arguments. It is the image's key in all caches.
    digest: bytes


def owned_id(key_name: str, client_id: str) -> str:
    """An id that means requests of one key only; clients' ids have no line feed."""
    return f"{key_name}\n{client_id}"


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


class Job(msgspec.Struct, frozen=True, gc=False):
    """One prompt with its n completions. One worker runs all of them."""

    job_id: JobId
    attempt: int
    prompt_token_ids: bytes
    # The job's load: its completions, and the most tokens of prompt and completions together. A job
    # without completions only expands the placeholders of its images; the engine does not run it.
    num_sequences: Count
    num_tokens: Count
    # `titopool.settings.sampling.SamplingOptions`, encoded once for all jobs of a request. On the wire
    # the index in `Generate.sampling`.
    sampling: msgspec.Raw
    cache_salt: str | None = None
    # Digests of the prompt's blocks (`titopool/wire/prefixes.py`); None if the routing policy does
    # not need them.
    prefix: bytes | None = None
    images: list[Image] = []
    # Arguments of the model's image processor.
    mm_processor_kwargs: dict[str, Any] = {}
    # Offset and length of each image's placeholders in `prompt_token_ids`, as the client sent them:
    # the placeholders are expanded. Empty: the worker finds them, expanded or single.
    image_ranges: list[tuple[Count, Count]] = []
    # Whether the worker sends `Chunk`s before `Completed`.
    is_streamed: bool = False
    # `ChatParsing`, encoded; empty: no parsers run.
    chat: bytes = b""
    # Name of the LoRA adapter; empty: none.
    adapter: str = ""
    # The client's id of the request; empty: none. Several requests may have the same.
    client_id: str = ""
    # The name of the client's key; empty: none.
    key_name: str = ""
    # W3C's header, of the front end's span; empty: the request is not traced.
    traceparent: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt, with image placeholders as the client sent them."""
        return len(self.prompt_token_ids) // ID_BYTES

    def num_tokens_of(self, num_sequences: int) -> int:
        """The most tokens of the prompt and of so many of the completions."""
        if num_sequences == self.num_sequences:
            return self.num_tokens
        num_sampled = self.num_tokens - self.num_prompt_tokens
        return self.num_prompt_tokens + num_sampled * num_sequences // self.num_sequences

    def is_named_in(self, ids: Collection[str]) -> bool:
        """Whether `ids`, of any key or as `owned_id` makes them, have the id of its request."""
        return self.client_id in ids or owned_id(self.key_name, self.client_id) in ids


# ---- front end → worker -------------------------------------------------------------


# Until when jobs run apart, because they may end the engine; "": they do not.
Apart = Literal["", "token", "end"]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Sent every `heartbeat_interval_s`. The worker sends heartbeats to front ends that say hello."""

    # As this front end knows it.
    pool: PoolState = PoolState()
    front_end: FrontEndTotals = FrontEndTotals()
    # Whether a client has asked this front end for /metrics lately.
    wants_engine_metrics: bool = False
    wire: Wire = WIRE_VERSION


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Run these jobs. Each job gets exactly one `Completed` or `Failed`, in a `Results`."""

    # A worker process with another incarnation ignores the message.
    incarnation: str
    # Made by `of_jobs`; read by `whole_jobs`.
    jobs: list[Job]
    # Each of the jobs' sampling options once: a grammar of 64 KiB may go with thousands of prompts.
    sampling: list[msgspec.Raw]
    # The jobs start, each with a `JobProgress`, once those that other front ends sent apart have
    # their first tokens or have ended.
    apart: Apart = ""
    # No other job of their requests was sent: they pass those that wait for a slot.
    is_new: bool = False
    # How many completions of each job may start; empty: all.
    granted: list[Count] = []

    @classmethod
    def of_jobs(
        cls,
        incarnation: str,
        jobs: list[Job],
        apart: Apart = "",
        is_new: bool = False,
        granted: list[int] | None = None,
    ) -> "Generate":
        """The message for `jobs`, which share their options as objects."""
        distinct = {id(job.sampling): job.sampling for job in jobs}
        indices = {name: msgspec.Raw(encode(index)) for index, name in enumerate(distinct)}
        packed = [msgspec.structs.replace(job, sampling=indices[id(job.sampling)]) for job in jobs]
        return cls(incarnation, packed, list(distinct.values()), apart, is_new, granted or [])

    def whole_jobs(self) -> list[Job]:
        """The jobs with their sampling options, as objects that they share.

        Raises:
            msgspec.DecodeError, IndexError: a job has no index of sampling options.
        """
        # Copies: the decoder's values keep the whole frame in memory.
        sampling = [one.copy() for one in self.sampling]
        return [
            msgspec.structs.replace(job, sampling=sampling[_decode_index(job.sampling)])
            for job in self.jobs
        ]


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """More completions of jobs that the worker has may start."""

    # (job id, attempt, how many completions may start in all)
    jobs: list[tuple[JobId, int, Count]]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these jobs, because the client left or the deadline passed. No result follows."""

    jobs: list[tuple[JobId, int]]


class Drift(msgspec.Struct, frozen=True, tag="drift"):
    """Counts for `WorkerCounters`, of which /metrics shows the same values at all servers of a pool."""

    num_compared: Count
    num_drifted: Count


class Compared(msgspec.Struct, frozen=True, tag="compared"):
    """Sums for `WorkerCounters`, of one call of `POST /mismatch`."""

    num_tokens: Count
    difference: Finite
    kl: Finite
    weights: Finite
    squared_weights: Finite


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Finish the jobs in flight, and end for good: the supervisor does not start this worker again.

    A worker process with another incarnation ignores the message.
    """

    incarnation: str


class EndedWaiting(msgspec.Struct, frozen=True, tag="ended_waiting"):
    """The answer to `EndWaiting`. Jobs that were sent to the worker before arrive before it."""

    name: str
    num_ended: Count
    # Other ids that jobs of the requests have, for those that run.
    others: list[str] = []


# "checking": the body is read, checked and tokenized, or waits for other weights. "writing": the
# response is made and written.
RequestPhase = Literal["checking", "waiting", "running", "streaming", "writing"]


class RequestInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A request in flight, as its front end knows it."""

    id: str
    # Other ids of its prompts, some if there are many.
    job_ids: list[str]
    route: str
    # The address that its connection comes from, and the name of its key.
    client: str
    key: str
    age_s: Finite
    phase: RequestPhase
    # Of those that are not known before the body is checked: 0.
    num_prompts: Count
    num_completions: Count
    # Of prompts, and of completions so far: those that the front end has, or has sent.
    tokens_in: Count
    tokens_out: Count
    # Names of those that have its jobs.
    workers: list[str]
    # The name of the model, or of the LoRA adapter.
    model: str
    # Whether a client has aborted it before it had jobs.
    is_aborted: bool = False


class ListedRequests(msgspec.Struct, frozen=True, tag="listed_requests"):
    """The answer to `ListRequests`."""

    name: str
    # Of this front end; unique.
    front_end: str
    # In flight; `requests` has the oldest.
    num_requests: Count
    requests: list[RequestInfo]


# ---- worker → front end -------------------------------------------------------------


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent every `heartbeat_interval_s` to every front end that sent a `Hello` recently.

    A thread sends it where the worker's event loop stands.
    """

    worker_id: str
    # New for each process, so that front ends notice a restart.
    incarnation: str
    phase: str
    phase_s: Finite
    # The weights that this worker serves.
    weights: PoolWeights
    # None until the engine is loaded; `loaded_s` is the time since then. A time of day would be that of
    # the worker's host, whose clock another host's clock does not know.
    facts: WorkerFacts | None
    loaded_s: Finite
    # Front ends that use this worker, and the load from front ends other than the receiver.
    num_front_ends: int
    other_sequences: int
    other_tokens: int
    # Completions that the engine runs or holds for all front ends, and totals for all front ends.
    num_sequences: int
    counters: WorkerCounters
    # By staging (`workers/in_model/receiving/staging.py`); "folder", and "none" before any tensor.
    updates: dict[str, UpdateTotals] = {}
    # By name of the clients' keys.
    keys: dict[str, KeyTotals] = {}
    # LoRA adapters of this worker: version by name.
    adapters: dict[str, int] = {}
    # As this worker knows it.
    pool: PoolState = PoolState()
    # Of all front ends that use this worker.
    front_ends: FrontEndTotals = FrontEndTotals()
    # As in `Load`.
    other_risks: int = 0
    apart: Apart = ""
    # How often the supervisor has started this worker again, by reason (`workers/restarts.py`).
    restarts: dict[str, int] = {}
    # Steps of weight updates: "receive", "prepare", "apply", "pause".
    update_phases: dict[str, Durations] = {}
    # Ended pauses by mode, of clients and of updates.
    pauses: dict[str, Durations] = {}
    # Seconds for one prompt's images, by stage: "decode", "preprocess".
    image_stages: dict[str, Distribution] = {}
    # As in `Load`.
    num_wanted_ahead: Count = 0
    # For how long the worker's event loop has stood; then the rest is as the loop last stated it. And
    # the longest that it has stood since the engine was loaded.
    loop_stood_s: Finite = 0.0
    longest_stand_s: Finite = 0.0
    wire: Wire = WIRE_VERSION


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """One metric of an engine in Prometheus' text format."""

    name: str
    # Its HELP and TYPE lines.
    head: bytes
    # Its samples, a line each, with the label `worker`.
    samples: bytes


class EngineMetrics(msgspec.Struct, frozen=True, tag="engine_metrics"):
    """The metrics of vLLM, to front ends that want them; sent every 2 s."""

    families: list[MetricFamily]
    # Families that are too large to be sent.
    num_left_out: int = 0


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load and prefixes of front ends other than the receiver; sent within 10 ms of a change.

    Heartbeats alone are too slow. When a batch ends and many requests follow, all of them would go
    to the worker whose heartbeat came first. The next turn of a conversation may come at once.
    """

    other_sequences: int
    other_tokens: int
    # Jobs of the others that have started and may end the engine: without a token, or with a grammar.
    other_risks: int = 0
    # Of the jobs of another front end that run apart now.
    apart: Apart = ""
    # Digests of prompts that have come and of completions that have ended since the last report:
    # chains, one after the other. Some are left out if there are too many.
    prefixes: bytes = b""
    # How many completions the worker wants ahead of free slots, so that no slot waits for a message.
    num_wanted_ahead: Count = 0


NO_LOAD = Load(0, 0)


class Chunk(msgspec.Struct, frozen=True, tag="chunk", gc=False):
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
    # As in `Completed`; in the first chunk only.
    image_ranges: list[tuple[Count, Count]] = []

    @property
    def num_bytes(self) -> int:
        """As decoded, with what it has besides arrays and texts."""
        of_pieces = sum(COMPLETION_BYTES + piece.num_bytes for _, piece in self.pieces)
        return CHUNK_BYTES + of_pieces


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
    # Offset and length of each image in `prompt_token_ids`.
    image_ranges: list[tuple[Count, Count]] = []

    @property
    def num_bytes(self) -> int:
        """Of the log-probabilities of the prompt and of the completions."""
        of_prompt = self.prompt_logprobs.num_bytes if self.prompt_logprobs is not None else 0
        return of_prompt + sum(one.num_bytes for one in self.completions)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine refused a job or failed on it. `code` is one of `titopool/errors.py`."""

    job_id: JobId
    attempt: int
    code: str
    message: str
    # The field of the request that is wrong.
    param: str | None = None


class JobProgress(msgspec.Struct, frozen=True, tag="progress"):
    """How far a job has come: which slots are free, and which job may have ended an engine.

    Sent when completions start that may have waited, when some of a job's completions have ended, and for
    every job that is not streamed some time after its first token.
    """

    job_id: JobId
    attempt: int
    has_token: bool
    # Of its completions so far; 0 if they start without waiting.
    num_started: Count = 0
    num_ended: Count = 0


Result = Completed | Failed | Chunk | JobProgress


class Results(msgspec.Struct, frozen=True, tag="results"):
    """Results, chunks and progress since the last such message, in order."""

    results: list[Result]


class EndWaiting(msgspec.Struct, frozen=True, tag="end_waiting"):
    """End the jobs that wait for a worker, as aborted before their first token.

    Sent to every front end for a client's call, which only one front end has received.
    """

    # Of this call, for the answer.
    name: str
    # The clients' ids, of any key or as `owned_id` makes them; None: all jobs.
    client_ids: list[str] | None


class ListRequests(msgspec.Struct, frozen=True, tag="list_requests"):
    """Answer with the oldest requests in flight, `limit` at most.

    As `EndWaiting`, for a client's call that only one front end has received.
    """

    name: str
    limit: Count


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """The worker stops. It accepts no more jobs and drops its jobs."""

    # For the log; empty after a signal.
    reason: str
    # Whether a job may be the cause.
    blames_jobs: bool = False


ToWorker = (
    Hello
    | Generate
    | Grant
    | Abort
    | Drift
    | Compared
    | EndedWaiting
    | ListedRequests
    | Leave
    | Command
)
FromWorker = (
    Heartbeat | EngineMetrics | Load | Results | EndWaiting | ListRequests | Stopping | CommandDone
)

encode = msgspec.msgpack.Encoder().encode
decode_chunk = msgspec.msgpack.Decoder(Chunk).decode
_decode_index = msgspec.msgpack.Decoder(Count).decode
decode_chat_parsing = msgspec.msgpack.Decoder(ChatParsing).decode
# What the decoders raise for an undecodable frame, also for invalid UTF-8 and deep nesting.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


class _Greeting(msgspec.Struct):
    """What `Hello` and `Heartbeat` are in every version."""

    type: Literal["hello", "heartbeat"]
    wire: int = 0


_decode_greeting = msgspec.msgpack.Decoder(_Greeting).decode


def explain_other_wire(frame: bytes) -> str:
    """For logs: the version of an unreadable `Hello` or `Heartbeat`; "" if it is not the cause."""
    try:
        wire = _decode_greeting(frame).wire
    except UNREADABLE:
        return ""
    if wire == WIRE_VERSION:
        return ""
    return (
        f"its messages have version {wire}, this process's {WIRE_VERSION}; "
        "run releases of titopool whose messages have one version"
    )
