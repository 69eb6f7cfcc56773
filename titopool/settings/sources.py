"""Reads the settings: command line over `TITOPOOL_…` variables over a file over defaults.

The file is that of `--config`, else of `TITOPOOL_CONFIG` (`titopool/settings/files.py`).

An unknown setting, or a value of the wrong type or out of range, raises `ConfigError`.
"""

import difflib
import ipaddress
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titopool.errors import ConfigError
from titopool.settings import vllm_options
from titopool.settings.config import (
    ENV_PREFIX,
    SETTINGS,
    TYPES,
    ServerConfig,
    is_switch,
    option_of,
    variable_of,
)
from titopool.settings.files import CONFIG_OPTION, CONFIG_VARIABLE, checked_apart, values_of_file

SWITCHES = {"true": True, "1": True, "false": False, "0": False}
SHORT_OPTIONS = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size"}


class _MostOfRange(int):
    """The MAX of `MIN..MAX`; a number of workers that wins over the range wins over it too."""


def parse_value(name: str, text: str, source: str) -> Any:
    """The value of setting `name`.

    Args:
        source: the variable or option that holds `text`.

    Raises:
        ConfigError: `text` is not of the setting's type.
    """
    kind = TYPES[name]
    if kind is str:
        return text
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return SWITCHES[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"{source}: expected {expected}, got {text!r}") from None


def _parse_setting(name: str, text: str, source: str) -> dict[str, Any]:
    """As `parse_value`, by name; `num_workers` may be a range, `MIN..MAX`."""
    least, dots, most = text.partition("..")
    if name == "num_workers" and dots:
        found = {
            "num_workers": parse_value(name, least, source),
            "max_workers": _MostOfRange(parse_value(name, most, source)),
        }
        if not 0 < found["num_workers"] <= found["max_workers"]:
            raise ConfigError(f"{source}: expected MIN..MAX with 0 < MIN <= MAX, got {text!r}")
        return found
    return {name: parse_value(name, text, source)}


# ---- environment ---------------------------------------------------------------------


def from_environment(environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """The settings of this process.

    Raises:
        ConfigError: a `TITOPOOL_…` variable names no setting, or its value is not accepted.
    """
    return ServerConfig(**_joined(_file_values(environ), _environment_values(environ)))


def _file_values(environ: Mapping[str, str], path: str | None = None) -> dict[str, Any]:
    """The settings of the file at `path`, else of the file that the environment names."""
    path = path or environ.get(CONFIG_VARIABLE, "")
    return values_of_file(path, _parse_setting) if path else {}


def _joined(values: dict[str, Any], winning: dict[str, Any]) -> dict[str, Any]:
    """Both; of a setting in both the second. vLLM's options are added, and vLLM takes the last."""
    both = (values.get("engine_args", ""), winning.get("engine_args", ""))
    return _over(values, winning) | {"engine_args": " ".join(filter(None, both))}


def _over(values: dict[str, Any], winning: dict[str, Any]) -> dict[str, Any]:
    """Both; of a setting in both the second, and none of a range whose other half is in both."""
    if "num_workers" in winning and isinstance(values.get("max_workers"), _MostOfRange):
        values = {name: one for name, one in values.items() if name != "max_workers"}
    return values | winning


def _environment_values(environ: Mapping[str, str]) -> dict[str, Any]:
    ignored = ignored_variables(environ)
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in ignored:
            continue
        if variable == CONFIG_VARIABLE:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in SETTINGS:
            known = [CONFIG_VARIABLE, *map(variable_of, SETTINGS)]
            close = difflib.get_close_matches(variable, known, n=1, cutoff=0.75)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{variable}: no such setting{hint}")
        values |= checked_apart(values, _parse_setting(name, text, variable), variable)
    return values


# Kubernetes gives the containers of a namespace variables for each Service. A Service named
# `titopool`, or `titopool-…`, makes `TITOPOOL_SERVICE_HOST`, `TITOPOOL_PORT=tcp://…` and more,
# unless the pod sets `enableServiceLinks: false`. A variable is ignored only if both its name and
# its value have Kubernetes' form. Source: kubernetes/pkg/kubelet/envvars/envvars.go.


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


# The rest of the Service's name, for example `WORKER_`.
_REST = r"(?:[A-Z0-9_]+_)?"
_PROTOCOL = "(?:TCP|UDP|SCTP)"
_SERVICE_VARIABLES: tuple[tuple[str, Callable[[str], object]], ...] = (
    (f"{_REST}SERVICE_HOST", _is_address),
    # A named port has a variable of its own.
    (f"{_REST}SERVICE_PORT(?:_[A-Z0-9_]+)?", str.isdecimal),
    (f"{_REST}PORT(?:_\\d+_{_PROTOCOL})?", re.compile(r"(?:tcp|udp|sctp)://\S+:\d+").fullmatch),
    (f"{_REST}PORT_\\d+_{_PROTOCOL}_PROTO", re.compile("tcp|udp|sctp").fullmatch),
    (f"{_REST}PORT_\\d+_{_PROTOCOL}_PORT", str.isdecimal),
    (f"{_REST}PORT_\\d+_{_PROTOCOL}_ADDR", _is_address),
)


def ignored_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The variables in `environ` that start like settings but describe a Kubernetes Service."""
    return sorted(
        variable
        for variable, value in environ.items()
        if any(
            re.fullmatch(ENV_PREFIX + form, variable) and is_value(value)
            for form, is_value in _SERVICE_VARIABLES
        )
    )


# ---- command line --------------------------------------------------------------------


def from_command_line(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """The settings of `titopool serve [MODEL] [--setting value …] [vLLM options …]`.

    Words that are no settings are appended to the `engine_args` of the file and the environment, for
    vLLM's parser.

    Raises:
        ConfigError: a value is missing or not accepted, or neither this server nor vLLM has an
            option.
    """
    values: dict[str, Any] = {}
    model = path = ""
    engine_argv: list[str] = []
    words = iter(argv)
    for word in words:
        if name := _setting_of(word):
            values = _over(values, _option_value(name, word, words))
        elif word.partition("=")[0] == CONFIG_OPTION:
            path = _value_of(word, words)
        # A word without a dash behind one of vLLM's options may be the option's value.
        elif word.startswith("-") or engine_argv:
            engine_argv.append(word)
        elif model:
            raise ConfigError(f"expected one MODEL, got {model!r} and {word!r}")
        else:
            values["model"] = model = word
    below = _joined(_file_values(environ, path), _environment_values(environ))
    # `--engine-args` replaces those of file and environment; single options are added to them.
    given = _over(below, values)
    config = ServerConfig(**_joined(given, {"engine_args": shlex.join(engine_argv)}))
    check_engine_options(config)
    return config


def _setting_of(word: str) -> str | None:
    """The setting that `--name` or `--name=value` sets."""
    option = word.partition("=")[0]
    name = SHORT_OPTIONS.get(option) or option.removeprefix("--").replace("-", "_")
    return name if word.startswith("-") and name in SETTINGS else None


def _option_value(name: str, word: str, rest: Iterator[str]) -> dict[str, Any]:
    """What the option `word` sets; its value is taken from `rest` if `word` has none."""
    option, equals, _ = word.partition("=")
    if SETTINGS[name].metadata["secret"]:
        raise ConfigError(
            f"{option}: all users can see a command line; set {variable_of(name)} instead"
        )
    if is_switch(name) and not equals:
        return {name: True}
    return _parse_setting(name, _value_of(word, rest), option)


def _value_of(word: str, rest: Iterator[str]) -> str:
    option, equals, text = word.partition("=")
    value = text if equals else next(rest, None)
    if value is None:
        raise ConfigError(f"{option}: expected a value, got nothing")
    return value


def check_engine_options(config: ServerConfig) -> None:
    """Refuses an unknown engine option before the start, which takes vLLM seconds.

    Raises:
        ConfigError: names the first unknown option and a similar one that exists.
    """
    ours = [CONFIG_OPTION, *map(option_of, SETTINGS)]
    theirs = vllm_options.option_names()
    for word in config.engine_argv:
        option = word.partition("=")[0]
        if theirs is None and option.startswith("--"):
            # vLLM's options are not known here: refuse only what nearly is a setting.
            if close := difflib.get_close_matches(option, ours, n=1, cutoff=0.93):
                raise ConfigError(f"{option}: no such option; did you mean {close[0]}?")
        elif theirs is not None and vllm_options.is_unknown(word):
            close = difflib.get_close_matches(option.replace("_", "-"), [*ours, *theirs], n=1)
            hint = (
                f"did you mean {close[0]}?" if close else "`titopool serve --help` lists settings"
            )
            raise ConfigError(f"{option}: neither titopool nor vLLM has such an option; {hint}")


# huggingface_hub's rule: one owner at most, and no dot or dash at either end of a name.
HUB_NAME = re.compile(r"(?:\b[\w.-]+\b/)?\b[\w.-]+\b")
# What a folder of a model has one of: Hugging Face's form, or Mistral's.
MODEL_FILES = ("config.json", "params.json")


def check_model(config: ServerConfig) -> None:
    """Refuses the path of a model that is not there, before a worker imports vLLM.

    What may be a hub's name passes, and what only vLLM knows: URLs of object stores, and
    `owner/name:quantization` or `owner/name/file.gguf` of the hub.

    Raises:
        ConfigError: names the path.
    """
    model = config.model
    # A worker elsewhere has a disk of its own.
    if not model or config.endpoints or config.cluster:
        return
    path = Path(model)
    if path.is_dir():
        options = {word.partition("=")[0].replace("_", "-") for word in config.engine_argv}
        has_config = any((path / name).exists() for name in MODEL_FILES)
        if not has_config and not options & {"--hf-config-path", "--config-format", "--config"}:
            raise ConfigError(
                f"model: expected a folder with {' or '.join(MODEL_FILES)}, got {model}; name the "
                "folder of a checkpoint"
            )
        return
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if is_path and "://" not in model and not model.endswith(".gguf") and not path.exists():
        home = ", and only a shell replaces ~" if model.startswith("~") else ""
        raise ConfigError(
            f"model: expected a folder that exists, got {model}{home}; a name of the hub is "
            "OWNER/NAME, for example Qwen/Qwen3-8B"
        )
