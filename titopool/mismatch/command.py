"""`titopool mismatch MODEL`: samples completions, computes them again as a trainer does, compares.

    titopool mismatch MODEL [--trainer-dtype bfloat16] [--picture FILE] [options of titopool serve]

Starts a server for MODEL, unless `--url` names one, samples, and stops it before the trainer's forward
pass, so that one GPU has room for both. Prints a table.
"""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titopool.client.sync_client import Client
from titopool.errors import TitopoolError
from titopool.launch import child_environment
from titopool.mismatch import trainer
from titopool.mismatch.report import draw, table
from titopool.mismatch.statistics import Mismatch, compare
from titopool.settings.config import ServerConfig, variable_of

STOP_TIMEOUT_S = 60.0


class Sample(NamedTuple):
    """A prompt, one of its completions, and what the sampler says of it."""

    prompt_ids: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray


def main(argv: Sequence[str]) -> int:
    """Measures the gap; returns the exit code."""
    options, server_argv = _parser().parse_known_args(argv)
    if options.url and server_argv:
        print(
            f"titopool: expected no options of a server beside --url, got {' '.join(server_argv)}",
            file=sys.stderr,
        )
        return 2
    try:
        prompts = _prompts(options)
        with _server(options, server_argv) as client:
            samples = _sample(client, options, prompts)
        found = _compare(options, samples)
    except (TitopoolError, OSError, ImportError, ValueError) as error:
        print(f"titopool: {error}", file=sys.stderr)
        return 1
    print(table(found))
    if options.picture:
        draw(found, options.picture)
        print(f"\n{options.picture} has the picture")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titopool mismatch", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder or a name of the hub, for server and trainer")
    add("--url", help="a server that runs already; default: one is started")
    add("--trainer-dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"),
        help="the trainer's precision (default: %(default)s)")  # fmt: skip
    add("--trainer-head-dtype", choices=("model", "float32"), default="model",
        help="float32: the trainer computes logits in float32 (default: %(default)s)")  # fmt: skip
    add("--trainer-device", help="default: cuda if there is one, else cpu")
    add("--trainer-attention", help="attn_implementation; default: transformers' choice")
    add("--prompts", type=Path, help="a file with a prompt on each line; default: random tokens")
    add("--num-prompts", type=_positive, default=32, help="random prompts (default: %(default)s)")
    add("--prompt-tokens", type=_positive, default=64, help="of each (default: %(default)s)")
    add("--n", type=_positive, default=1, help="completions of each prompt (default: %(default)s)")
    add("--max-tokens", type=_positive, default=256, help="default: %(default)s")
    add("--temperature", type=float, default=1.0, help="above 0 (default: %(default)s)")
    add("--seed", type=int, default=0, help="of prompts and samples (default: %(default)s)")
    add("--picture", help="a file for the picture, e.g. gap.png")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def _prompts(options: argparse.Namespace) -> list[Any]:
    """Texts of the file, else random ids."""
    if not options.temperature > 0:
        raise ValueError(f"--temperature: expected a number above 0, got {options.temperature}")
    if options.prompts is not None:
        texts = [one for one in options.prompts.read_text().splitlines() if one.strip()]
        if not texts:
            raise ValueError(
                f"--prompts: expected lines with prompts, got none in {options.prompts}"
            )
        return texts
    vocab_size = trainer.vocab_size_of(options.model)
    numbers = np.random.default_rng(options.seed)
    shape = options.num_prompts, options.prompt_tokens
    return [row.tolist() for row in numbers.integers(0, vocab_size, shape)]


@contextmanager
def _server(options: argparse.Namespace, argv: Sequence[str]) -> Iterator[Client]:
    """A client of the server at `--url`, or of one that lives as long as the block."""
    # As the server reads it; other users can see command lines.
    key = os.environ.get(variable_of("api_key"), "")
    if options.url:
        with Client(options.url, api_key=key) as client:
            yield client
        return
    port = _free_port()
    words = [options.model, "--port", str(port), *argv]
    command = [sys.executable, "-m", "titopool.cli", "serve", *words]
    # The server's own lines would stand between those of the table.
    process = subprocess.Popen(command, env=child_environment(os.environ), stdout=sys.stderr)
    try:
        with Client(f"http://127.0.0.1:{port}", api_key=key) as client:
            _wait(client, process)
            yield client
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _wait(client: Client, process: subprocess.Popen[bytes]) -> None:
    """Returns once the server generates.

    Raises:
        TitopoolError: it ended, or was not ready within `worker_start_timeout_s`.
    """
    left_s = ServerConfig().worker_start_timeout_s
    while True:
        try:
            client.wait_until_ready(min(2.0, left_s))
            return
        except TitopoolError:
            left_s -= 2.0
            if process.poll() is not None:
                raise TitopoolError(
                    f"the server ended with {process.returncode}; its last lines say why"
                ) from None
            if left_s <= 0:
                raise


def _sample(client: Client, options: argparse.Namespace, prompts: list[Any]) -> list[Sample]:
    results = client.generate(
        prompts, n=options.n, max_tokens=options.max_tokens, temperature=options.temperature,
        seed=options.seed, progress=sys.stderr.isatty(),
    )  # fmt: skip
    samples = []
    for result in results:
        for one in result.completions:
            if one.logprobs is None:
                raise TitopoolError("expected log-probabilities, but the server sent none")
            samples.append(Sample(result.prompt_ids, one.ids, one.logprobs))
    return samples


def _compare(options: argparse.Namespace, samples: Sequence[Sample]) -> Mismatch:
    computed = trainer.logprobs_of(
        options.model, [(one.prompt_ids, one.ids) for one in samples],
        dtype=options.trainer_dtype, head_dtype=options.trainer_head_dtype, device=options.trainer_device,
        attention=options.trainer_attention,
        temperature=options.temperature,
    )  # fmt: skip
    return compare([one.logprobs for one in samples], computed)
