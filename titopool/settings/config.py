"""The settings of the server: one frozen object, read once by each process, strictly.

Priority: command line, then `TITOPOOL_…` variables, then the defaults below. The command
line of `titopool serve` is handed on to the other processes as variables, so that
`from_environment` gives every process of a server the same object. A name that is no
setting, or a value that is none of its type and range, raises `ConfigError`.

vLLM's own options are not settings of ours: they travel as they are in `engine_args` and
vLLM's parser reads them in the worker.
"""

import dataclasses
import difflib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from titopool.errors import ConfigError
from titopool.settings import vllm_options
from titopool.settings.kubernetes import service_variables

ENV_PREFIX = "TITOPOOL_"
# In `run_dir`: written by a supervisor that gives up, for gunicorn's master to read.
FAILURE_FILE = "failure"
PLACEMENTS = ("prefix", "least_loaded", "round_robin")


def setting(default: Any, help: str, *, at_least: float | None = None, secret: bool = False) -> Any:
    """A field with its line for `--help` and the README; `at_least` is its least value.

    A secret is read from the environment only: command lines are visible to all users.
    """
    return field(default=default, metadata={"help": help, "at_least": at_least, "secret": secret})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """All settings. Durations are seconds, sizes bytes."""

    model: str = setting("", "folder or hub name of the model; empty: a tiny random demo model")
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: any free one", at_least=0)
    num_workers: int = setting(
        0, "engine processes; 0: one for each GPU or group of GPUs, one on a CPU", at_least=0
    )
    num_front_ends: int = setting(
        0, "gunicorn processes; 0: one for two cores, four at most", at_least=0
    )
    max_open_requests: int = setting(
        16_384,
        "requests that one gunicorn process holds open at once; fewer where it may not open as many files",
        at_least=1,
    )
    tensor_parallel_size: int = setting(1, "GPUs that share each layer of one engine", at_least=1)
    pipeline_parallel_size: int = setting(
        1, "groups of layers of one engine, each on its own GPUs", at_least=1
    )
    engine_args: str = setting(
        "", "vLLM engine options as on its command line, e.g. '--max-model-len 4096'"
    )
    tool_call_parser: str = setting(
        "", "vLLM's parser of tool calls in chat answers, by its name, e.g. hermes; empty: none"
    )
    reasoning_parser: str = setting(
        "", "vLLM's parser of reasoning in chat answers, by its name, e.g. qwen3; empty: none"
    )
    endpoints: tuple[str, ...] = setting(
        (),
        "comma-separated worker endpoints of a pool that runs elsewhere, tcp://host:port or "
        "ipc://path; a host name stands for all its addresses; empty: start workers here",
    )
    run_dir: str = setting(
        "", "folder for the sockets and logs of local workers; empty: a new private one"
    )
    curve_key_file: str = setting(
        "", "file with the key that tcp endpoints need on both sides; made when it is missing"
    )
    api_key: str = setting("", "key that every route but health asks for", secret=True)
    admin_key: str = setting(
        "",
        "key that weight updates, pauses and adapters ask for in place of `api_key`; empty: the same",
        secret=True,
    )
    max_body_bytes: int = setting(256 * 2**20, "largest request body", at_least=1)
    max_completions_per_request: int = setting(
        65_536, "largest number of prompts times n in one request", at_least=1
    )
    max_image_pixels: int = setting(
        33_554_432, "pixels of a prompt's images, all together", at_least=1
    )
    mm_processor_kwargs: tuple[str, ...] = setting(
        ("min_pixels", "max_pixels"),
        "comma-separated arguments of the model's processor that a request may set; one that "
        "changes the shape of what the model expects ends the engine",
    )
    image_memory_bytes: int = setting(
        8 * 2**30,
        "tensors of images that a worker holds for prompts under way; more prompts with images wait",
        at_least=1,
    )
    image_threads: int = setting(
        0,
        "threads of each worker that decode and process images; 0: half of its cores, 8 at most",
        at_least=0,
    )
    max_queued_prompts: int = setting(
        262_144,
        "prompts that may be open in one gunicorn process before it answers 429",
        at_least=1,
    )
    client_timeout_s: float = setting(
        60.0,
        "silence of a client amid its request or its answer, after which it is left",
        at_least=1,
    )
    request_timeout_s: float = setting(3600.0, "deadline of a request", at_least=0.001)
    worker_start_timeout_s: float = setting(
        900.0, "how long a worker may take to be ready, or the pool to be without one", at_least=1
    )
    placement: str = setting(
        "prefix",
        "how prompts are spread over workers: prefix (least load, but where a prompt's beginning "
        "is cached if the load allows it), least_loaded or round_robin",
    )
    heartbeat_interval_s: float = setting(0.5, "time between signs of life", at_least=0.05)
    heartbeat_timeout_s: float = setting(
        10.0, "silence after which a worker counts as dead", at_least=0.1
    )
    engine_probe_timeout_s: float = setting(
        120.0, "how long an engine may leave a probe unanswered before it is restarted", at_least=1
    )
    weights_root: str = setting(
        "", "folder below which /update_weights may read weights; empty: it is refused"
    )
    weight_update_timeout_s: float = setting(
        300.0, "how long each step of a weight update may take", at_least=0.1
    )
    log_level: str = setting(
        "info", "debug, info, warning or error; debug also shows what vLLM writes"
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            least, value = item.metadata["at_least"], getattr(self, item.name)
            if least is not None and not value >= least:
                raise ConfigError(f"{item.name}: expected at least {least}, got {value}")
        if self.port > 65_535:
            raise ConfigError(f"port: expected at most 65535, got {self.port}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(
                f"log_level: expected debug, info, warning or error, got {self.log_level!r}"
            )
        if self.placement not in PLACEMENTS:
            raise ConfigError(
                f"placement: expected {', '.join(PLACEMENTS[:-1])} or {PLACEMENTS[-1]}, "
                f"got {self.placement!r}"
            )
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigError(
                "heartbeat_timeout_s: expected at least twice heartbeat_interval_s "
                f"({self.heartbeat_interval_s}), got {self.heartbeat_timeout_s}"
            )
        for endpoint in self.endpoints:
            self._check_endpoint(endpoint)
        self._split_engine_args()

    def _check_endpoint(self, endpoint: str) -> None:
        scheme, _, rest = endpoint.partition("://")
        port = rest.rpartition(":")[2]
        if scheme == "ipc" and rest:
            return
        if scheme != "tcp" or not port.isdigit() or not 0 < int(port) < 65_536:
            raise ConfigError(
                f"endpoints: expected tcp://host:port or ipc://path, got {endpoint!r}"
            )
        if not self.curve_key_file:
            raise ConfigError(
                f"endpoints: {endpoint} leaves this host and needs a key; set curve_key_file to "
                "the same file, or to a copy of it, on both sides"
            )

    def _split_engine_args(self) -> list[str]:
        try:
            return shlex.split(self.engine_args)
        except ValueError as error:
            raise ConfigError(f"engine_args: expected a command line, got {error}") from error

    @property
    def engine_argv(self) -> list[str]:
        """vLLM's options as a list of words."""
        return self._split_engine_args()

    @property
    def gpus_per_worker(self) -> int:
        """GPUs (on a CPU: processes) of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def to_environment(self) -> dict[str, str]:
        """The settings that differ from the defaults, as variables for a child process."""
        variables = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                text = ",".join(value) if isinstance(value, tuple) else str(value)
                variables[ENV_PREFIX + item.name.upper()] = text
        return variables


TYPES: dict[str, Any] = get_type_hints(ServerConfig)
SETTINGS = {item.name: item for item in dataclasses.fields(ServerConfig)}


def parse_value(name: str, text: str, source: str) -> Any:
    """The value of setting `name` from its text.

    Raises:
        ConfigError: `text` is not of the setting's type; names `source`, where it stood.
    """
    wanted = TYPES[name]
    if wanted is str:
        return text
    if wanted == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return wanted(text)
    except ValueError:
        kind = "a whole number" if wanted is int else "a number"
        raise ConfigError(f"{source}: expected {kind}, got {text!r}") from None


def from_environment(environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """The settings of this process.

    Raises:
        ConfigError: a `TITOPOOL_…` variable is no setting, or its value is impossible.
    """
    return ServerConfig(**_environment_values(environ))


def _environment_values(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    ignored = ignored_variables(environ)
    for key, text in environ.items():
        if not key.startswith(ENV_PREFIX) or key in ignored:
            continue
        name = key[len(ENV_PREFIX) :].lower()
        if name not in SETTINGS:
            raise ConfigError(f"{key}: no such setting{_did_you_mean(key, _variable_names())}")
        values[name] = parse_value(name, text, key)
    return values


def ignored_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that look like settings and are Kubernetes' own."""
    return service_variables(environ, ENV_PREFIX)


def _variable_names() -> list[str]:
    return [ENV_PREFIX + name.upper() for name in SETTINGS]


def _did_you_mean(name: str, candidates: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def from_command_line(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """The settings of `titopool serve [MODEL] [--setting value …] [vLLM options …]`.

    Options that are no settings of ours go to `engine_args`, behind those of the
    environment, where vLLM's parser reads them.

    Raises:
        ConfigError: a value is missing or impossible, or an option is neither ours nor vLLM's.
    """
    values = _environment_values(environ)
    words = list(argv)
    engine_argv: list[str] = []
    model = ""
    aliases = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size"}
    while words:
        word = words.pop(0)
        # Behind one of vLLM's options it may be that one's value.
        if not word.startswith("-") and not engine_argv:
            if model:
                raise ConfigError(f"expected one MODEL, got {model!r} and {word!r}")
            values["model"] = model = word
            continue
        flag, equals, inline = word.partition("=")
        name = aliases.get(flag) or flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("-") or name not in SETTINGS:
            engine_argv.append(word)
            continue
        if SETTINGS[name].metadata["secret"]:
            raise ConfigError(
                f"{flag}: a command line is visible to all users; set {ENV_PREFIX}{name.upper()}"
            )
        if not equals and not words:
            raise ConfigError(f"{flag}: expected a value, got nothing")
        values[name] = parse_value(name, inline if equals else words.pop(0), flag)
    if engine_argv:
        values["engine_args"] = f"{values.get('engine_args', '')} {shlex.join(engine_argv)}".strip()
    config = ServerConfig(**values)
    check_engine_options(config)
    return config


def check_engine_options(config: ServerConfig) -> None:
    """Refuses options that neither we nor vLLM have, seconds before vLLM would.

    Raises:
        ConfigError: names the first such option, and the one that was perhaps meant.
    """
    ours = ["--" + name.replace("_", "-") for name in SETTINGS]
    theirs = vllm_options.option_names()
    for word in config.engine_argv:
        flag = word.partition("=")[0]
        if theirs is None and flag.startswith("--"):
            # Of vLLM's names nothing is known here, but this one is nearly one of ours.
            if close := difflib.get_close_matches(flag, ours, n=1, cutoff=0.93):
                raise ConfigError(f"{flag}: no such option; did you mean {close[0]}?")
        elif theirs is not None and vllm_options.is_unknown(word):
            close = difflib.get_close_matches(flag.replace("_", "-"), [*ours, *theirs], n=1)
            hint = f"did you mean {close[0]}?" if close else "`titopool serve --help` lists ours"
            raise ConfigError(f"{flag}: neither titopool nor vLLM has such an option; {hint}")


def usage() -> str:
    """The text of `titopool serve --help`."""
    lines = [
        "usage: titopool serve [MODEL] [--setting VALUE …] [any vLLM engine option]",
        "",
        "Serves MODEL, a folder or a hub name; without one, a tiny random demo model.",
        "Each setting can also be given as TITOPOOL_SETTING in the environment.",
        "",
    ]
    for name, item in SETTINGS.items():
        flag = (
            ENV_PREFIX + name.upper() if item.metadata["secret"] else "--" + name.replace("_", "-")
        )
        shown = f" (default {default})" if (default := shown_default(name)) else ""
        lines.append(f"  {flag:32}{item.metadata['help']}{shown}")
    return "\n".join(lines)


def shown_default(name: str) -> str:
    """The default of a setting as one would write it."""
    default = SETTINGS[name].default
    return ",".join(default) if isinstance(default, tuple) else str(default)
