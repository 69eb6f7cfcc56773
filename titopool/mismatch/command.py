"""`titopool mismatch MODEL`: samples completions, computes them again as a trainer does, compares.

Starts a server for MODEL, unless `--url` names one, samples, and stops it before the trainer's forward
pass, so that one GPU has room for both. Prints a table.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
import numpy as np

from titopool.client.sync_client import Client
from titopool.commands.connection import keys
from titopool.commands.help import Command, Option, Whole
from titopool.commands.own_server import own_server
from titopool.errors import TitopoolError
from titopool.mismatch import trainer
from titopool.mismatch.report import draw, table
from titopool.mismatch.statistics import Mismatch, compare


class Sample(NamedTuple):
    """A prompt, one of its completions, and what the sampler says of it."""

    prompt_ids: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray


def _option(name: str, section: str, **fields: Any) -> Callable[[Any], Any]:
    return click.option(name, cls=Option, section=section, **fields)


def _count(name: str, default: int, text: str) -> Callable[[Any], Any]:
    return _option(
        name, "Sampler", type=Whole(min=1), default=default, show_default=True, metavar="N",
        help=text,
    )  # fmt: skip


@click.command(
    "mismatch", cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    examples=[
        "titopool mismatch Qwen/Qwen3-0.6B --picture gap.png",
        "titopool mismatch Qwen/Qwen3-0.6B --trainer-dtype float32 --max-model-len 4096",
        "titopool mismatch Qwen/Qwen3-0.6B --url http://host-a:8000",
    ],
)  # fmt: skip
@click.argument("model")
@_option(
    "--url", "Sampler", metavar="URL", help="A server that runs already. Default: one is started."
)
@_option("--prompts", "Sampler", type=click.Path(path_type=Path), metavar="FILE",
    help="A file with a prompt on each line. Default: random tokens.")  # fmt: skip
@_count("--num-prompts", 32, "Random prompts.")
@_count("--prompt-tokens", 64, "Tokens of each random prompt.")
@_count("--n", 1, "Completions of each prompt.")
@_count("--max-tokens", 256, "Tokens of each completion.")
@_option("--temperature", "Sampler", type=float, default=1.0, show_default=True, metavar="NUMBER",
    help="Above 0.")  # fmt: skip
@_option("--seed", "Sampler", type=int, default=0, show_default=True, metavar="N",
    help="Of prompts and samples.")  # fmt: skip
@_option("--trainer-dtype", "Trainer", default="bfloat16", show_default=True,
    type=click.Choice(("bfloat16", "float16", "float32")), help="The trainer's precision.")  # fmt: skip
@_option("--trainer-head-dtype", "Trainer", default="model", show_default=True,
    type=click.Choice(("model", "float32")), help="float32: logits are computed in float32.")  # fmt: skip
@_option(
    "--trainer-device", "Trainer", metavar="DEVICE", help="Default: cuda if there is one, else cpu."
)
@_option("--trainer-attention", "Trainer", metavar="NAME",
    help="attn_implementation. Default: transformers' choice.")  # fmt: skip
@_option("--picture", "Output", type=click.Path(), metavar="FILE", help="A file for the picture.")
@click.pass_context
def mismatch(ctx: click.Context, /, **fields: Any) -> int:
    """Sample completions of MODEL, compute them again as a trainer does, and compare.

    MODEL is a folder or a name of the hub, for server and trainer. Starts a server for it, unless
    --url names one, and stops it before the trainer's forward pass, so that one GPU has room for both.
    Options that are not listed go to `titopool serve`.
    """
    options = SimpleNamespace(**fields)
    if options.model.startswith("-"):
        raise click.UsageError(f"expected MODEL first, got {options.model}", ctx)
    if options.url and ctx.args:
        raise click.UsageError(
            f"expected no options of a server beside --url, got {' '.join(ctx.args)}", ctx
        )
    try:
        prompts = _prompts(options)
        with _server(options, ctx.args) as client:
            samples = _sample(client, options, prompts)
        found = _compare(options, samples)
    except (TitopoolError, OSError, ImportError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    print(table(found))
    if options.picture:
        draw(found, options.picture)
        print(f"\n{options.picture} has the picture")
    return 0


def _prompts(options: SimpleNamespace) -> list[Any]:
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
def _server(options: SimpleNamespace, argv: Sequence[str]) -> Iterator[Client]:
    """A client of the server at `--url`, or of one that lives as long as the block."""
    key = keys().api_key
    if options.url:
        with Client(options.url, api_key=key) as client:
            yield client
        return
    # The server's own lines would stand between those of the table.
    with own_server(
        [options.model, *argv], environ=os.environ, output=sys.stderr, api_key=key
    ) as server:
        yield server.client


def _sample(client: Client, options: SimpleNamespace, prompts: list[Any]) -> list[Sample]:
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


def _compare(options: SimpleNamespace, samples: Sequence[Sample]) -> Mismatch:
    computed = trainer.logprobs_of(
        options.model, [(one.prompt_ids, one.ids) for one in samples],
        dtype=options.trainer_dtype, head_dtype=options.trainer_head_dtype, device=options.trainer_device,
        attention=options.trainer_attention,
        temperature=options.temperature,
    )  # fmt: skip
    return compare([one.logprobs for one in samples], computed)
