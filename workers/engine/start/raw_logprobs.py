"""`--raw-logprobs`: the model's own log-probabilities beside those of the sampler."""

from collections.abc import MutableMapping
from typing import Any

from titopool.errors import ConfigError
from titopool.settings.config import variable_of

# vLLM 0.32 may choose a runner whose sampler `workers/in_model/logprobs_patch.py` does not patch.
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def choose_runner(environ: MutableMapping[str, str]) -> None:
    """Sets the variables of vLLM's processes that hold the model.

    Raises:
        ConfigError: the user chose the runner whose sampler is not patched.
    """
    given = environ.setdefault(RUNNER_VARIABLE, "0")
    if given != "0":
        raise ConfigError(
            f"raw_logprobs: expected {RUNNER_VARIABLE} unset or 0, got {given!r}; unset it"
        )
    environ[variable_of("raw_logprobs")] = "true"


def check_raw_logprobs(engine_args: Any) -> None:
    """Checks vLLM's options.

    Raises:
        ConfigError: with one of them, the sampler gives no raw log-probabilities.
    """
    if engine_args.speculative_config:
        raise ConfigError(
            "raw_logprobs: expected no --speculative-config, because vLLM samples drafts elsewhere; "
            "leave one of the two out"
        )
    if engine_args.max_logprobs == -1:
        raise ConfigError(
            "raw_logprobs: expected --max-logprobs of 0 or more, got -1, the whole vocabulary; set "
            "the largest number that a request may ask for"
        )
