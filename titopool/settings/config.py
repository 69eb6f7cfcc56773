"""The settings of the server: their names, defaults, help and checks.

`titopool/settings/sources.py` reads the settings from the command line and the environment.
`ServerConfig.to_environment` hands them on to child processes, so that every process of a server
has the same settings.

vLLM's options are not settings of this server. They stay one string, `engine_args`, which vLLM's
parser reads in the worker.
"""

import dataclasses
import math
import shlex
import sys
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from titopool.errors import ConfigError
from titopool.settings.logs import LOG_FORMATS
from titopool.wire.run_dir import FILE_SCHEME, is_endpoint

ENV_PREFIX = "TITOPOOL_"
PLACEMENTS = ("prefix", "least_loaded", "round_robin")
WEIGHT_PROOFS = ("first", "each")
WEIGHT_STAGINGS = ("auto", "beside", "kv", "in_place", "host")
# Headings of `--help` and docs/settings.md, each by the name of its first setting.
GROUPS = {
    "model": "Model and engines",
    "host": "HTTP server",
    "max_open_requests": "Limits on requests",
    "max_image_pixels": "Images",
    "placement": "Workers",
    "weights_root": "Weight updates",
    "log_level": "Logs",
    "otlp_endpoint": "Traces",
}


def setting(default: Any, help: str, *, at_least: float | None = None, secret: bool = False) -> Any:
    """A field of `ServerConfig`.

    Args:
        help: at most two short sentences, for `--help` and docs/settings.md (`make docs`).
        at_least: the least value that is accepted.
        secret: accepted from the environment only, because all users can see command lines.
    """
    return field(default=default, metadata={"help": help, "at_least": at_least, "secret": secret})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """All settings. Durations are in seconds, sizes in bytes.

    Raises:
        ConfigError: a value is out of range, or contradicts another one.
    """

    model: str = setting(
        "", "Folder or Hugging Face Hub name of the model. Empty: a tiny random demo model."
    )
    num_workers: int = setting(
        0,
        "Workers; each runs one engine. 0: one for each GPU or group of GPUs, or one if there is no GPU.",
        at_least=0,
    )
    max_workers: int = setting(
        0,
        "Workers at most, if more start while prompts wait; also --num-workers MIN..MAX. 0: no more "
        "than num_workers.",
        at_least=0,
    )
    tensor_parallel_size: int = setting(
        1, "GPUs that share each layer of one engine (also -tp).", at_least=1
    )
    pipeline_parallel_size: int = setting(
        1,
        "Pipeline stages of one engine, each on GPUs of its own (also -pp).",
        at_least=1,
    )
    engine_args: str = setting(
        "", "vLLM engine options as one string, for example '--max-model-len 4096'."
    )
    exact: bool = setting(
        False,
        "vLLM's batch-invariant kernels, and logits in float32, for fewer tokens a second. GPUs only.",
    )
    raw_logprobs: bool = setting(
        False,
        "Lets requests ask for the model's own log-probabilities beside the sampler's. Costs one "
        "more pass over the logits.",
    )
    tool_call_parser: str = setting(
        "",
        "Name of vLLM's parser for tool calls in chat completions, for example hermes. Empty: none.",
    )
    reasoning_parser: str = setting(
        "",
        "Name of vLLM's parser for reasoning in chat completions, for example qwen3. Empty: none.",
    )
    chat_template: str = setting(
        "", "File with the chat template (Jinja) of all conversations. Empty: the model's own."
    )
    trust_request_chat_template: bool = setting(
        False,
        "Lets requests bring a chat template, also among the template's variables. It runs in "
        "Jinja's sandbox, in a process apart.",
    )

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on. 0: any free port.", at_least=0)
    num_front_ends: int = setting(
        0, "Front ends (gunicorn processes). 0: one for two cores, at most four.", at_least=0
    )
    api_key: str = setting(
        "", "Key that every route except the health checks requires. Empty: none.", secret=True
    )
    admin_key: str = setting(
        "",
        "Key for weight updates, pauses and adapters, in place of `api_key`. Empty: `api_key`.",
        secret=True,
    )
    api_key_file: str = setting(
        "",
        "File of keys with names, one `NAME KEY [admin] [weight=3]` a line. It is read again when "
        "it changes.",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Names, comma-separated, by which browsers may reach a server without a key, for example "
        "behind a tunnel.",
    )
    tls_cert_file: str = setting(
        "", "PEM file of the certificate, with its chain, to serve HTTPS. Empty: HTTP."
    )
    tls_key_file: str = setting("", "PEM file of the certificate's private key.")

    max_open_requests: int = setting(
        16_384,
        "Requests open at once in one front end. Lowered where the process may not open enough files.",
        at_least=1,
    )
    max_sessions: int = setting(
        10_000, "Sessions that are open at once, in all front ends.", at_least=1
    )
    session_timeout_s: float = setting(
        14_400.0, "Seconds without a call after which a session ends.", at_least=1
    )
    session_bytes: int = setting(
        4 * 1024**3,
        "What the turns of all sessions take at most on run_dir's disk. A session that would exceed it "
        "gets a 429.",
        at_least=1024**2,
    )
    max_queued_prompts: int = setting(
        262_144,
        "Unfinished prompts in one front end. A request that would exceed this limit gets a 429.",
        at_least=1,
    )
    max_body_bytes: int = setting(256 * 2**20, "Size of the largest request body.", at_least=1)
    memory_budget_bytes: int = setting(
        2**30,
        "Memory for bodies, for what is made of them, and for results, in one front end. A request "
        "beyond it waits, or gets a 429.",
        at_least=1,
    )
    idempotency_bytes: int = setting(
        256 * 2**20,
        "Answers kept on disk for repeats with an Idempotency-Key, for each front end, for 10 minutes.",
        at_least=0,
    )
    kept_logprobs_bytes: int = setting(
        64 * 2**20,
        "Log-probabilities kept on disk for POST /mismatch, in one front end, for 10 minutes. 0 "
        "keeps none.",
        at_least=0,
    )
    max_completions_per_request: int = setting(
        65_536, "Largest number of prompts times n in one request.", at_least=1
    )
    client_timeout_s: float = setting(
        60.0,
        "Time without progress in reading a request or writing its response. Then the connection "
        "is closed.",
        at_least=1,
    )
    request_timeout_s: float = setting(3600.0, "Deadline of a request.", at_least=0.001)
    drain_timeout_s: float = setting(
        30.0,
        "Time after SIGTERM for open requests, in front ends, and for jobs, in workers.",
        at_least=0,
    )
    stream_interval: int = setting(
        0,
        "Tokens in a chunk of a stream, after its first; 1 where tools or reasoning are parsed. 0: 1, or "
        "2 from 128 streamed completions of a worker on, 4 from 512.",
        at_least=0,
    )
    grammar_timeout_s: float = setting(
        60.0,
        "CPU time in which a grammar of structured outputs must compile. 0: grammars are refused.",
        at_least=0,
    )

    max_image_pixels: int = setting(
        33_554_432, "Largest number of pixels in one prompt, all images together.", at_least=1
    )
    mm_processor_kwargs: tuple[str, ...] = setting(
        ("min_pixels", "max_pixels"),
        "Arguments of the model's processor that a request may set, comma-separated. An argument "
        "that changes tensor shapes can crash the engine.",
    )
    image_memory_bytes: int = setting(
        8 * 2**30,
        "Bytes of preprocessed images in flight per worker, beyond which prompts wait. Up to 256 MiB "
        "more are kept for equal prompts.",
        at_least=1,
    )
    image_processes: int = setting(
        0,
        "Processes of each worker that preprocess images. 0: half of the worker's cores, at most 8.",
        at_least=0,
    )

    metrics: bool = setting(
        True,
        "Counts of each request and the engines' own metrics in GET /metrics. Without them, it has "
        "the workers' heartbeats.",
    )
    placement: str = setting(
        "prefix",
        "Routing policy: prefix, least_loaded or round_robin. prefix prefers the worker that has "
        "the prompt's prefix cached, unless its load is too high.",
    )
    cluster: str = setting(
        "", "ray: the workers are actors of a Ray cluster. Empty: processes of this host."
    )
    worker_port: int = setting(
        0,
        "Port of the first worker of a cluster; each further one has the next. 0: free ones.",
        at_least=0,
    )
    endpoints: tuple[str, ...] = setting(
        (),
        "Workers that run elsewhere, comma-separated: tcp://host:port (all its addresses), ipc://path "
        "or file:PATH, one a line. Empty: this server starts its workers.",
    )
    worker_command: str = setting(
        "",
        "Command that starts a worker, for example 'numactl -N 0 python -m workers'. Empty: "
        "`python -m workers`.",
    )
    curve_key_file: str = setting(
        "",
        "File with the key that tcp endpoints need on both sides. Created if it does not exist.",
    )
    run_dir: str = setting(
        "", "Folder for the sockets and logs of local workers. Empty: a new private folder."
    )
    scale_up_after_s: float = setting(
        10.0, "How long prompts wait before more workers start, up to max_workers.", at_least=0
    )
    scale_down_after_s: float = setting(
        300.0, "How long a worker is not needed before it leaves, down to num_workers.", at_least=0
    )
    worker_start_timeout_s: float = setting(
        900.0,
        "Time limit for a worker to become ready. Waiting prompts fail when no worker was ready "
        "for this long.",
        at_least=1,
    )
    heartbeat_interval_s: float = setting(
        0.5, "Interval of heartbeats between front ends and workers.", at_least=0.05
    )
    heartbeat_timeout_s: float = setting(
        10.0, "Time without a heartbeat after which a worker counts as lost.", at_least=0.1
    )
    engine_probe_timeout_s: float = setting(
        120.0, "Time without an answer to a probe after which an engine is restarted.", at_least=1
    )
    worker_hang_timeout_s: float = setting(
        30.0,
        "Time for which a worker's event loop may stand, or its process be silent, until it is "
        "restarted. 0: for ever.",
        at_least=0,
    )

    weights_root: str = setting(
        "", "Folder below which /update_weights may read. Empty: the route refuses every call."
    )
    weight_update_timeout_s: float = setting(
        300.0, "Timeout of each step of a weight update.", at_least=0.1
    )
    weight_staging: str = setting(
        "auto",
        "Where new weights wait: beside the model, in the kv cache, in the host's memory. auto: the "
        "first with room; in_place: beside, else kv, else in the model.",
    )
    weight_proof: str = setting(
        "first",
        "Whether the first update with some names is proved to reach all of the model, or each (slow).",
    )
    peer_port: int = setting(
        0,
        "First port at which a worker gives its weights to a new one; each process of an engine takes "
        "one. 0: any free port.",
        at_least=0,
    )

    log_level: str = setting(
        "info", "debug, info, warning or error. debug also shows the output of vLLM."
    )
    log_format: str = setting("text", "text, or json: each line is a JSON object.")

    otlp_endpoint: str = setting(
        "",
        "OpenTelemetry collector that gets traces, for example http://collector:4318 (needs the extra "
        "otel). Empty: no traces.",
    )
    trace_ratio: float = setting(
        1.0,
        "Share of the requests that are traced, of those whose clients send no traceparent.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            least, value = item.metadata["at_least"], getattr(self, item.name)
            # `not >=` also refuses NaN.
            if least is not None and not value >= least:
                raise ConfigError(f"{item.name}: expected at least {least}, got {value}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(
                    f"{item.name}: expected a finite number, got {value}; every wait has a deadline"
                )
        if 0 < self.max_workers < self.num_workers:
            raise ConfigError(
                f"max_workers: expected 0 or at least num_workers ({self.num_workers}), got "
                f"{self.max_workers}; raise it, or leave it out"
            )
        for name in ("port", "peer_port", "worker_port"):
            if getattr(self, name) > 65_535:
                raise ConfigError(f"{name}: expected at most 65535, got {getattr(self, name)}")
        _check_choice("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _check_choice("log_format", self.log_format, LOG_FORMATS)
        if self.trace_ratio > 1:
            raise ConfigError(f"trace_ratio: expected at most 1, got {self.trace_ratio}")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_endpoint: expected http://HOST:PORT or https://, got {self.otlp_endpoint!r}"
            )
        _check_choice("placement", self.placement, PLACEMENTS)
        _check_choice("cluster", self.cluster, ("", "ray"))
        if self.cluster and self.endpoints:
            raise ConfigError(
                f"cluster: expected none where endpoints name the workers, got {self.cluster!r}"
            )
        _check_choice("weight_staging", self.weight_staging, WEIGHT_STAGINGS)
        _check_choice("weight_proof", self.weight_proof, WEIGHT_PROOFS)
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                "heartbeat_timeout_s: expected at least twice heartbeat_interval_s "
                f"({self.heartbeat_interval_s}), got {self.heartbeat_timeout_s}"
            )
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigError("tls_cert_file: expected tls_key_file with it, got only one of them")
        for endpoint in self.endpoints:
            self._check_endpoint(endpoint)
        _split("engine_args", self.engine_args)
        _split("worker_command", self.worker_command)

    def _check_endpoint(self, endpoint: str) -> None:
        if not is_endpoint(endpoint) and not endpoint.startswith(FILE_SCHEME):
            raise ConfigError(
                f"endpoints: expected tcp://host:port, ipc://path or file:PATH, got {endpoint!r}"
            )
        if not endpoint.startswith("ipc://") and not self.curve_key_file:
            raise ConfigError(
                f"endpoints: {endpoint} is reached over the network and needs a key; set "
                "curve_key_file to the same file, or to copies of one file, on both sides"
            )

    @property
    def engine_argv(self) -> list[str]:
        """vLLM's options as a list of words."""
        return _split("engine_args", self.engine_args)

    @property
    def worker_argv(self) -> list[str]:
        """The command that starts a worker."""
        default = [sys.executable, "-m", "workers"]
        return _split("worker_command", self.worker_command) or default

    @property
    def gpus_per_worker(self) -> int:
        """GPUs of one engine; without a GPU: its processes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def to_environment(self) -> dict[str, str]:
        """The settings that differ from their defaults, as variables for a child process."""
        return {
            variable_of(item.name): as_text(value)
            for item in dataclasses.fields(self)
            if (value := getattr(self, item.name)) != item.default
        }


def _split(name: str, value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ConfigError(f"{name}: expected a command line, got {error}") from error


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")


SETTINGS = {item.name: item for item in dataclasses.fields(ServerConfig)}
TYPES: dict[str, Any] = get_type_hints(ServerConfig)


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


# Only front ends need them: processes that run a model's code must not have them.
SECRET_VARIABLES = frozenset(
    variable_of(name) for name, item in SETTINGS.items() if item.metadata["secret"]
)


def option_of(name: str) -> str:
    """The command-line option of a setting; secrets have none."""
    return "--" + name.replace("_", "-")


def is_switch(name: str) -> bool:
    """Whether the option alone turns the setting on. One that is on by default needs a value."""
    return TYPES[name] is bool and not SETTINGS[name].default


def as_text(value: Any) -> str:
    """A setting's value as it is written in the environment."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)
