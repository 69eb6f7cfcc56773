"""The names of vLLM's engine options, found without importing vLLM, which takes seconds.

The names are the arguments of `add_argument` in vLLM's source. They are unknown if vLLM is not
installed here, if its source has another form, or if a vLLM plugin may add options. Then only
vLLM's parser refuses an unknown option.
"""

import ast
import re
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

SOURCE = "engine/arg_utils.py"
# If these names are not found, the source has another form.
EXPECTED = {"--dtype", "--max-model-len", "--tensor-parallel-size"}
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
# vLLM's parser accepts these without `add_argument`.
ALWAYS = frozenset({"--config", "--help", "-h", "-O"})


@cache
def option_names() -> frozenset[str] | None:
    """All names, for example `--dtype` and `-tp`; None if they are unknown."""
    spec = find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        return None
    try:
        tree = ast.parse((Path(folders[0]) / SOURCE).read_bytes())
    except (OSError, SyntaxError):
        return None
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "add_argument":
            for argument in node.args:
                if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                    return None
                names.add(argument.value)
    return ALWAYS | names if names >= EXPECTED else None


def is_unknown(word: str) -> bool:
    """Whether `word` is an option that vLLM certainly lacks."""
    names = option_names()
    if names is None or not re.match(r"--?[A-Za-z]", word) or " " in word:
        return False
    # Also --compilation-config.mode=3, --lora_target_modules, -O3 and -cc.mode.
    name = re.split("[=.]", word)[0].replace("_", "-")
    if name in names or "--" + name.removeprefix("--no-") in names:
        return False
    is_short = not name.startswith("--")
    return not (is_short and name[:2] in names) and not _plugins_may_add_options()


def _plugins_may_add_options() -> bool:
    return any(
        not plugin.value.startswith("vllm.")
        for group in PLUGIN_GROUPS
        for plugin in entry_points(group=group)
    )
