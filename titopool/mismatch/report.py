"""The gap as a table and as a picture."""

from collections.abc import Sequence
from typing import Any

from titopool.errors import ConfigError
from titopool.mismatch.statistics import Group, Mismatch

COLUMNS = f"{'tokens':>8} {'mean':>9} {'greatest':>9} {'KL':>9}"


def table(found: Mismatch) -> str:
    """Differences are |trainer - sampler| in nats; KL is of the sampler from the trainer, a token."""
    lines = [
        f"completions                      {found.num_completions}",
        f"tokens                           {found.num_tokens}",
        f"difference, mean                 {found.mean_difference:.2e}",
        f"difference, greatest             {found.max_difference:.2e}",
        f"KL (k3)                          {found.kl:.2e}",
        f"KL (k1)                          {found.kl_k1:.2e}",
        f"effective samples, by token      {found.token_ess:.4f}",
        f"effective samples, by completion {found.completion_ess:.4f}",
        "",
        f"{'position':<20}{COLUMNS}",
        *_rows(found.by_position, "{:.0f} to {:.0f}", is_open=True),
        "",
        f"{'probability':<20}{COLUMNS}",
        *_rows(found.by_probability, "{:g} to {:g}", is_open=False),
    ]
    return "\n".join(lines)


def _rows(groups: Sequence[Group], form: str, *, is_open: bool) -> list[str]:
    """A line for each group; `is_open`: `high` is not in it."""
    return [
        f"{form.format(one.low, one.high - is_open):<20}{one.num_tokens:>8} "
        f"{one.mean_difference:>9.2e} {one.max_difference:>9.2e} {one.kl:>9.2e}"
        for one in groups
    ]


def draw(found: Mismatch, file: str) -> None:
    """Writes a picture, in the format of the file's ending.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--picture: expected matplotlib, which draws it; install titopool[mismatch], or leave "
            "--picture out"
        ) from None
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, found.by_position, "position in the completion", "{:.0f}", is_open=True)
    _bars(right, found.by_probability, "the sampler's probability", "{:g}", is_open=False)
    left.set_ylabel("|trainer - sampler|, nats")
    left.legend(frameon=False)
    figure.suptitle(
        f"{found.num_tokens} tokens: KL {found.kl:.1e} a token, effective samples "
        f"{found.token_ess:.3f} by token, {found.completion_ess:.3f} by completion"
    )
    figure.savefig(file, dpi=150)


def _bars(axes: Any, groups: Sequence[Group], name: str, form: str, *, is_open: bool) -> None:
    """Mean and greatest difference of each group, on a logarithmic axis."""
    # A logarithm has no 0.
    floor = 1e-8
    places = range(len(groups))
    greatest = [max(one.max_difference, floor) for one in groups]
    mean = [max(one.mean_difference, floor) for one in groups]
    axes.bar(places, greatest, color="#c6d4e8", label="greatest")
    axes.bar(places, mean, color="#2f5d9b", label="mean")
    axes.set_yscale("log")
    ends = [form.format(one.low if is_open else one.high) for one in groups]
    axes.set_xticks(
        list(places), [f"{'≥ ' if is_open else '≤ '}{one}" for one in ends], rotation=45
    )
    axes.set_xlabel(name)
    axes.spines[["top", "right"]].set_visible(False)
