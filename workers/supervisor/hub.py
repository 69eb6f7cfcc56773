"""Which files of a model on the hub a worker reads, and what the hub's errors mean.

The choice of weight files is vLLM's (`vllm/model_executor/model_loader/default_loader.py`). A file that
is missing here is downloaded by the worker that needs it.
"""

import difflib
import errno
import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from titopool.settings.config import ServerConfig
from titopool.settings.sources import HUB_NAME

# vLLM's values of --load-format whose files are chosen here, with their patterns in order.
WEIGHTS = {
    "auto": ("*.safetensors", "*.bin", "*.pt"),
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
    "dummy": (),
}
MISTRAL = "consolidated*.safetensors"
INDEX = "model.safetensors.index.json"
# Configurations, tokenizers, chat templates and modules of the model.
OTHERS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "*.spm")
# Other forms of the same model.
LEFT_OUT = ("onnx/*", "openvino/*", "*.index.json.*")
MIN_SIMILARITY = 0.6
# Models of an owner that are looked through for a similar name.
MAX_LISTED = 500


class Wanted(NamedTuple):
    """A model of the hub, with vLLM's options that say which of its files and where to."""

    model: str
    revision: str | None
    # None: the hub's default.
    cache_dir: str | None
    load_format: str
    token: str | None


def wanted_model(config: ServerConfig, environ: Mapping[str, str]) -> Wanted | None:
    """What the workers will load from the hub; None if it is elsewhere, or in a form of its own."""
    model = config.model
    is_name = HUB_NAME.fullmatch(model) is not None and not Path(model).exists()
    if not is_name or environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return None
    options = _options(config.engine_argv)
    load_format = options.get("--load-format", "auto")
    if load_format not in WEIGHTS or "--config" in options:
        return None
    return Wanted(
        model, options.get("--revision"), options.get("--download-dir"), load_format,
        options.get("--hf-token"),
    )  # fmt: skip


def _options(argv: Sequence[str]) -> dict[str, str]:
    """Values by option; "" for an option without one."""
    found: dict[str, str] = {}
    for index, word in enumerate(argv):
        if word.startswith("-"):
            option, equals, value = word.partition("=")
            following = argv[index + 1] if index + 1 < len(argv) else ""
            if not equals and not following.startswith("-"):
                value = following
            found[option.replace("_", "-")] = value
    return found


def needed_files(
    sizes: Mapping[str, int], load_format: str, read_index: Callable[[], str]
) -> dict[str, int]:
    """Names and sizes in bytes of the files that a worker reads.

    Args:
        sizes: of all files of the model.
        read_index: the text of the index of the weight files; called if there is one.
    """
    patterns = WEIGHTS[load_format]
    if load_format == "auto" and any(fnmatch(name, MISTRAL) for name in sizes):
        patterns = (MISTRAL,)
    weights: set[str] = set()
    if INDEX in sizes and "*.safetensors" in patterns:
        weights = set(json.loads(read_index()).get("weight_map", {}).values()) & sizes.keys()
    for pattern in patterns:
        weights = weights or {name for name in sizes if fnmatch(name, pattern)}
    others = {
        name
        for name in sizes
        if any(fnmatch(name, one) for one in OTHERS)
        and not any(fnmatch(name, one) for one in LEFT_OUT)
    }
    return {name: sizes[name] for name in sorted(weights | others)}


# ---- errors --------------------------------------------------------------------------


def explain(error: BaseException, model: str, folder: str, similar: Callable[[], str]) -> str:
    """One sentence on why a model was not downloaded, with what to do.

    Args:
        folder: where downloads go.
        similar: the name of a model that the hub has, or "".
    """
    kinds = {one.__name__ for one in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 10:
        chain.append(cause)
    if any(getattr(one, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for one in chain):
        return (
            f"{model}: the disk of {folder} is full; free some, or set HF_HOME to a folder on another "
            "disk"
        )
    if "GatedRepoError" in kinds:
        return (
            f"{model}: its owner gives access on request; accept the conditions on its page of the "
            "hub, and set HF_TOKEN to a token of that account"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{model}: the hub has no such --revision of it; leave it out, or name another"
    if "RepositoryNotFoundError" in kinds or status == 404:
        name = similar()
        hint = f"did you mean {name}?" if name else "check the name"
        return (
            f"{model}: neither a folder here nor a model that the hub shows; {hint} For a private "
            "model set HF_TOKEN"
        )
    if status in (401, 403):
        return (
            f"{model}: the hub refuses the token ({status}); set HF_TOKEN to one that may read it"
        )
    if any(type(one).__name__ == "OfflineModeIsEnabled" for one in chain):
        return (
            f"{model}: not in the cache {folder}, and HF_HUB_OFFLINE forbids its download; unset it, or "
            "name a folder"
        )
    text = " ".join(str(error).split()) or "no message"
    return (
        f"{model}: the hub cannot be reached or answers wrongly ({type(error).__name__}: {text[:200]}); "
        "check the network and HF_ENDPOINT, or name a folder"
    )


def similar_name(api: Any, model: str) -> str:
    """A model of the hub with a similar name, or ""; never fails."""
    owner, slash, name = model.partition("/")
    try:
        searches = [{"author": owner}] if slash else []
        for search in [*searches, {"search": name or owner}]:
            names: list[str] = [one.id for one in api.list_models(limit=MAX_LISTED, **search)]
            if close := difflib.get_close_matches(model, names, n=1, cutoff=MIN_SIMILARITY):
                return close[0]
    except Exception:
        # Only a hint.
        return ""
    return ""
