"""Settings from a file: `--config FILE` and `TITOPOOL_CONFIG`, YAML or TOML by the extension.

The keys of the file are the names of settings. vLLM's options are one table, `vllm`:

    model: Qwen/Qwen3-8B
    num_workers: 4
    vllm: {max-model-len: 8192, enable-lora: true}

An unknown key is refused with its line and a similar key that exists. Secrets are refused too: files
are copied and committed, and workers, which run the model's code, read the same file.
"""

import difflib
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from titopool.errors import ConfigError
from titopool.settings import vllm_options
from titopool.settings.config import ENV_PREFIX, SETTINGS, as_text, variable_of

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
CONFIG_OPTION = "--config"
# The key of vLLM's options.
ENGINE_KEY = "vllm"
# Far above any file of settings.
MAX_FILE_BYTES = 2**20


class Entry(NamedTuple):
    """A key of the file with its value."""

    name: str
    value: Any
    # For messages: file and line.
    place: str


def values_of_file(path: str, parse: Callable[[str, str, str], dict[str, Any]]) -> dict[str, Any]:
    """The settings in the file, by name; vLLM's options are in `engine_args`.

    Args:
        parse: reads a setting's text: its name, the text, and where the text stands.

    Raises:
        ConfigError: the file cannot be read, or has an unknown key, a secret, or a value that is
            not accepted.
    """
    values: dict[str, Any] = {}
    words: list[str] = []
    for entry in _entries(path):
        if entry.name == ENGINE_KEY:
            words = _engine_words(entry, path)
        else:
            name = _setting_name(entry)
            place = f"{entry.place}: {entry.name}"
            values |= checked_apart(
                values, parse(name, _as_setting_text(name, entry), place), place
            )
    if words:
        values["engine_args"] = f"{values.get('engine_args', '')} {shlex.join(words)}".strip()
    return values


def checked_apart(values: dict[str, Any], found: dict[str, Any], place: str) -> dict[str, Any]:
    """`found` at `place`, which sets nothing of the same source's `values` a second time.

    Raises:
        ConfigError: it does: a range of workers and `max_workers` are both set.
    """
    if both := sorted(values.keys() & found.keys()):
        remedy = "remove one of them"
        if {"num_workers", "max_workers"} & set(both):
            remedy = "write either num_workers: MIN..MAX, or num_workers and max_workers"
        raise ConfigError(
            f"{place}: expected {' and '.join(both)} once, got another value before; {remedy}"
        )
    return found


# ---- settings ------------------------------------------------------------------------


def _setting_name(entry: Entry) -> str:
    name = entry.name.replace("-", "_")
    if name not in SETTINGS:
        raise ConfigError(f"{entry.place}: {entry.name}: no such setting{_hint(entry.name)}")
    if SETTINGS[name].metadata["secret"]:
        raise ConfigError(
            f"{entry.place}: {name}: expected no secret in this file, because it is copied and "
            f"committed, and workers read it; set {variable_of(name)}, or api_key_file"
        )
    return name


def _hint(name: str) -> str:
    """A similar key, or where the key belongs."""
    option = "--" + name.replace("_", "-")
    if option in (vllm_options.option_names() or ()):
        return f"; it is an option of vLLM: write it below `{ENGINE_KEY}:`"
    known = [*SETTINGS, ENGINE_KEY]
    close = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean {close[0]}?" if close else "; `titopool serve --help` lists settings"


def _as_setting_text(name: str, entry: Entry) -> str:
    value = entry.value
    is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
    if is_list and isinstance(SETTINGS[name].default, tuple):
        return as_text(tuple(value))
    if isinstance(value, str | bool | int | float):
        return as_text(value)
    raise ConfigError(f"{entry.place}: {entry.name}: expected one value, got {value!r}")


# ---- vLLM's options ------------------------------------------------------------------


def _engine_words(entry: Entry, path: str) -> list[str]:
    if not isinstance(entry.value, dict):
        raise ConfigError(
            f"{entry.place}: {ENGINE_KEY}: expected options of vLLM by name, got {entry.value!r}"
        )
    words: list[str] = []
    lines = _line_finder(path)
    for name, value in entry.value.items():
        place = f"{path}, line {lines((ENGINE_KEY, str(name)))}"
        words += _engine_option(Entry(str(name), value, place))
    return words


def _engine_option(entry: Entry) -> list[str]:
    option = "--" + entry.name.removeprefix("--").replace("_", "-")
    if option == CONFIG_OPTION:
        raise ConfigError(f"{entry.place}: {entry.name}: expected no file in a file; leave it out")
    if option.removeprefix("--").replace("-", "_") in SETTINGS:
        name = option.removeprefix("--").replace("-", "_")
        raise ConfigError(
            f"{entry.place}: {entry.name}: it is a setting of titopool: write {name} above, without "
            f"`{ENGINE_KEY}`"
        )
    if vllm_options.is_unknown(option):
        names = vllm_options.option_names() or ()
        close = difflib.get_close_matches(option, names, n=1)
        hint = f"; did you mean {close[0].removeprefix('--')}?" if close else ""
        raise ConfigError(f"{entry.place}: {entry.name}: vLLM has no such option{hint}")
    value = entry.value
    if value is True:
        return [option]
    if value is False:
        return ["--no-" + option.removeprefix("--")]
    if isinstance(value, dict):
        return [option, json.dumps(value)]
    if isinstance(value, list):
        return [option, *(_word(one, entry) for one in value)]
    # One word, so that a value may begin with a dash.
    return [f"{option}={_word(value, entry)}"]


def _word(value: Any, entry: Entry) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str | int | float):
        return as_text(value)
    raise ConfigError(f"{entry.place}: {entry.name}: expected a value, got {value!r}")


# ---- files ---------------------------------------------------------------------------


def _entries(path: str) -> Iterator[Entry]:
    content = _content(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected settings by name, got {type(content).__name__}")
    lines = _line_finder(path)
    for name, value in content.items():
        yield Entry(str(name), value, f"{path}, line {lines((str(name),))}")


def _text(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path}: expected at most {MAX_FILE_BYTES} bytes of settings, got more"
            )
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: expected a file of settings that can be read: {error}"
        ) from None


def _is_toml(path: str) -> bool:
    suffix = Path(path).suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(f"{path}: expected a file that ends in .yaml, .yml or .toml")
    return suffix == ".toml"


def _content(path: str) -> Any:
    is_toml, text = _is_toml(path), _text(path)
    if is_toml:
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: expected TOML: {error}") from None
    # Only here: most starts have no file.
    import yaml

    try:
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader), path)
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: expected YAML: {' '.join(str(error).split())}") from None
    return {} if found is None else found


def _refuse_repeated_keys(node: Any, path: str) -> None:
    """PyYAML takes the last of equal keys silently; TOML's parser refuses them."""
    if node is None or node.id != "mapping":
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            raise ConfigError(
                f"{path}, line {line}: {key.value}: line {seen[key.value]} has it too"
            )
        seen[key.value] = line
        if key.value == ENGINE_KEY:
            _refuse_repeated_keys(value, path)


def _line_finder(path: str) -> Callable[[tuple[str, ...]], int]:
    """Finds the line of a key of the file, counted from 1."""
    text = _text(path)
    if _is_toml(path):
        return lambda keys: _toml_line(text, keys)
    import yaml

    root = yaml.compose(text, yaml.SafeLoader)

    def find(keys: tuple[str, ...]) -> int:
        node, line = root, 1
        for name in keys:
            pairs = node.value if node is not None and node.id == "mapping" else ()
            for key, value in pairs:
                if key.value == name:
                    node, line = value, key.start_mark.line + 1
        return line

    return find


def _toml_line(text: str, keys: tuple[str, ...]) -> int:
    """The first line that has the last key, behind the line of its table."""
    line = 1
    lines = text.splitlines()
    for name in keys:
        quoted = re.escape(name)
        pattern = re.compile(
            rf"""^\s*\[\s*["']?{quoted}["']?\s*\]|(?:^|[\s{{,.])["']?{quoted}["']?\s*[=.]"""
        )
        numbers = range(line, len(lines) + 1)
        line = next((number for number in numbers if pattern.search(lines[number - 1])), line)
    return line
