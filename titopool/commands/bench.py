"""`titopool bench`: the throughput and latency of a running server, by a load of random ids.

For users of a server. `benchmarks/` compares servers, with the conditions that a comparison needs.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from titopool.answers.operators import Models
from titopool.commands.connection import get, keys
from titopool.commands.help import Command, Option, Seconds, Whole, console, json_option, url_option
from titopool.errors import InvalidRequest, TitopoolError

if TYPE_CHECKING:
    from titopool.commands.load import Run, Shape

# Share of a core from which on the client itself may limit the figures.
BUSY_SHARE = 0.9
QUANTILES = (50, 90, 99)


def _count(name: str, default: int, text: str) -> Callable[[Any], Any]:
    return click.option(
        name, cls=Option, section="Load", type=Whole(min=1), default=default, metavar="N",
        show_default=True, help=text,
    )  # fmt: skip


@click.command(
    "bench", cls=Command,
    examples=[
        "titopool bench --num-prompts 512 --concurrency 128",
        "titopool bench --stream --input-len 1024 --output-len 256",
        "titopool bench --url http://host-a:8000 --json > run.json",
    ],
)  # fmt: skip
@url_option
@_count("--num-prompts", 256, "Requests; each has one prompt.")
@_count("--concurrency", 64, "Requests in flight at once. The next is sent when one ends.")
@_count("--input-len", 128, "Random token ids of each prompt. No two prompts share a prefix.")
@_count(
    "--output-len", 128, "Tokens of each completion; the end-of-sequence token does not end it."
)
@click.option(
    "--stream", cls=Option, section="Load", is_flag=True,
    help="Stream the completions. Only then the first token's latency is known.",
)  # fmt: skip
@click.option(
    "--logprobs/--no-logprobs", cls=Option, section="Load", default=True, show_default=True,
    help="Ask for the log-probability of each sampled token, as trainers do.",
)  # fmt: skip
@click.option(
    "--seed", cls=Option, section="Load", type=Whole(min=0), default=0, metavar="N",
    show_default=True, help="Of the ids. The same seed sends the same prompts: the server may have "
    "their prefixes cached.",
)  # fmt: skip
@click.option(
    "--timeout-s", cls=Option, section="Load", type=Seconds(), default=600.0,
    metavar="SECONDS", show_default=True, help="Of one request.",
)  # fmt: skip
@json_option
def bench(url: str, as_json: bool, stream: bool, **load: Any) -> int:
    """Send random prompts to a running server and print its throughput and latency.

    \b
    tokens/s     completion tokens of completed requests, divided by the time from
                 the first sending to the last answer. Ramp-up and tail are in it.
    requests/s   completed requests, divided by the same time.
    latency      from right before a request is sent to its whole answer, decoded;
                 p50, p90 and p99 over the completed requests.
    first token  from the sending to the first event that has a token.
    per token    latency less the first token's, divided by the other tokens.

    One request is sent before and not measured. All requests come from this process: where it takes
    a whole core, the last line says that the figures may be its own limit. Ends with 1 if a request
    failed.
    """
    # numpy and aiohttp.
    from titopool.commands.load import Shape

    shape = Shape(streamed=stream, **load)
    found = report(asyncio.run(_measure(url, shape, has_bar=sys.stderr.isatty())), shape)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return 1 if found["errors"] else 0


async def _measure(url: str, shape: "Shape", *, has_bar: bool) -> "Run":
    from titopool.client.async_client import AsyncClient
    from titopool.commands.load import random_prompts, run

    api_key, admin_key = keys()
    vocab_size = _check_model(url, shape, api_key)
    # The first prompt is the one that is not measured.
    first, *prompts = random_prompts(replaced(shape, num_prompts=shape.num_prompts + 1), vocab_size)
    async with AsyncClient(
        url, api_key=api_key, admin_key=admin_key, timeout_s=shape.timeout_s
    ) as client:
        trial = await run(client, [first], shape, lambda: None)
        if error := trial.outcomes[0].error:
            raise TitopoolError(f"the first request failed: {error}")
        if not has_bar:
            return await run(client, prompts, shape, lambda: None)
        from tqdm import tqdm

        with tqdm(total=len(prompts), unit="request", leave=False) as bar:
            return await run(client, prompts, shape, lambda: bar.update(1) and None)


def replaced(shape: "Shape", **fields: Any) -> "Shape":
    """`shape` with other fields."""
    from dataclasses import replace

    return replace(shape, **fields)


def _check_model(url: str, shape: "Shape", api_key: str) -> int:
    """The size of the vocabulary.

    Raises:
        InvalidRequest: the prompts do not fit the model.
        TitopoolError: the server does not say what it serves.
    """
    answer = get(url, "/v1/models", api_key)
    if answer.status != 200:
        hint = "set TITOPOOL_API_KEY" if answer.status == 401 else "see `titopool status`"
        raise TitopoolError(f"{url}: expected the served model, got status {answer.status}; {hint}")
    model = answer.read(Models).data[0]
    limit, wanted = model.max_model_len, shape.input_len + shape.output_len
    if wanted > limit:
        raise InvalidRequest(
            f"--input-len, --output-len: expected at most {limit} tokens in all, the model's limit, "
            f"got {wanted}"
        )
    size: int = model.vocab_size
    return size


# ---- report --------------------------------------------------------------------------


def report(run: "Run", shape: "Shape") -> dict[str, Any]:
    """The figures; latencies in seconds, None where nothing was measured."""
    done = [one for one in run.outcomes if not one.error_code]
    firsts = [one.first_token_s for one in done if one.first_token_s is not None]
    per_token = [
        (one.latency_s - one.first_token_s) / (one.num_tokens - 1)
        for one in done
        if one.first_token_s is not None and one.num_tokens > 1
    ]
    num_tokens = sum(one.num_tokens for one in done)
    failed = [one for one in run.outcomes if one.error_code]
    return {
        "num_prompts": shape.num_prompts,
        "concurrency": shape.concurrency,
        "input_len": shape.input_len,
        "output_len": shape.output_len,
        "stream": shape.streamed,
        "logprobs": shape.logprobs,
        "seed": shape.seed,
        "wall_s": run.wall_s,
        "completed": len(done),
        "completion_tokens": num_tokens,
        "tokens_per_s": num_tokens / run.wall_s,
        "requests_per_s": len(done) / run.wall_s,
        "latency_s": quantiles([one.latency_s for one in done]),
        "first_token_s": quantiles(firsts),
        "per_token_s": quantiles(per_token),
        "errors": dict(Counter(one.error_code for one in failed)),
        "first_error": failed[0].error if failed else None,
        "client_cpu_share": run.cpu_s / run.wall_s,
    }


def quantiles(values: list[float]) -> dict[str, float] | None:
    """p50, p90 and p99, by linear interpolation; None without values."""
    import numpy as np

    if not values:
        return None
    found = np.percentile(values, QUANTILES)
    return {f"p{name}": float(value) for name, value in zip(QUANTILES, found, strict=True)}


def show(found: Mapping[str, Any]) -> None:
    """Prints the figures as a table."""
    from rich.table import Table

    screen = console()
    screen.print(
        f"{found['completed']:,} of {found['num_prompts']:,} requests completed in "
        f"{found['wall_s']:.2f} s, {found['concurrency']:,} at once, {found['input_len']:,} ids in, "
        f"{found['output_len']:,} out",
        markup=False,
    )
    screen.print(f"tokens/s    {found['tokens_per_s']:>12,.1f}")
    screen.print(f"requests/s  {found['requests_per_s']:>12,.2f}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("milliseconds")
    for quantile in QUANTILES:
        table.add_column(f"p{quantile}", justify="right")
    for name, key in (
        ("latency", "latency_s"), ("first token", "first_token_s"), ("per token", "per_token_s"),
    ):  # fmt: skip
        if values := found[key]:
            table.add_row(name, *(f"{1000 * one:,.1f}" for one in values.values()))
    screen.print(table)
    if not found["stream"]:
        screen.print("first token: not measured; --stream measures it")
    for code, count in found["errors"].items():
        screen.print(f"error {code}: {count:,}", markup=False)
    if found["first_error"]:
        screen.print(f"the first error: {found['first_error']}", markup=False)
    if (share := found["client_cpu_share"]) > BUSY_SHARE:
        screen.print(
            f"this client took {100 * share:.0f} % of a core: the figures may be its limit, not the "
            "server's"
        )
