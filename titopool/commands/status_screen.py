"""What `titopool status` shows of its facts: lines and tables of rich."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

# Lines of the screen that are no rows of workers or requests.
FIXED_LINES = 8
HIDDEN_ID = "(another key's)"
# Named in a request's row.
MAX_WORKERS = 3
Row = Mapping[str, Any]


def of(
    found: Row,
    rates: Mapping[str, float] | None = None,
    *,
    width: int,
    fault: str = "",
    height: int | None = None,
) -> RenderableType:
    """The whole screen.

    Args:
        found: `facts_of`; empty if no server has answered.
        rates: completion tokens a second by worker; None: there is no such column.
        width: columns of the terminal; some of a request are left out if they do not fit.
        fault: why no server answers now.
        height: lines of the terminal; None: all requests are shown.
    """
    lines = [Text(fault, "bold red")] if fault else []
    if not found:
        return Group(*lines)
    reasons = [
        Text(f"{one['worker'] or one.get('endpoint', '?')}: {one['reason']}")
        for one in found["workers"]
        if one.get("reason")
    ]
    parts: list[RenderableType] = [
        *lines,
        *_head(found),
        _workers(found["workers"], rates),
        *reasons,
    ]
    open_requests = found["requests"]
    if open_requests and (open_requests["requests"] or open_requests["num_missing"]):
        used = FIXED_LINES + len(found["workers"]) + len(reasons) + len(lines)
        num_rows = None if height is None else max(3, height - used)
        parts += [Text(), *_requests(open_requests, num_rows, width)]
    return Group(*parts)


def _head(found: Row) -> list[Text]:
    word = "draining" if found["draining"] else "ready" if found["ready"] else "not ready"
    model = found["model"] or ("needs the key" if found["needs_key"] else "none yet")
    facts = [f"model {model}"]
    if found["max_model_len"] is not None:
        facts.append(f"{found['max_model_len']:,} tokens at most")
    if found["waiting_prompts"] is not None:
        facts.append(f"{found['waiting_prompts']:,} prompts wait")
    facts += [f"adapter {name} {version}" for name, version in found["adapters"].items()]
    return [Text.assemble((word, "bold"), f"  {found['url']}"), Text(", ".join(facts))]


def _table(columns: list[tuple[str, bool]]) -> Table:
    """Of names, and whether a column has numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, is_number in columns:
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    return table


def _workers(workers: list[Row], rates: Mapping[str, float] | None) -> Table:
    names = [
        "worker",
        "phase",
        "since",
        "weights",
        "load",
        "tokens/s",
        "jobs",
        "failed",
        "tokens",
        "cached",
    ]
    if rates is None:
        names.remove("tokens/s")
    table = _table([(name, name not in names[:3]) for name in names] + [("last update", False)])
    for one in workers:
        prompt, cached, since = one["prompt_tokens"], one["cached_tokens"], one["phase_s"]
        load = "" if one["sequences"] is None else f"{one['sequences']:,}/{one['slots']:,}"
        rate = None if rates is None else rates.get(one["worker"])
        table.add_row(
            one["worker"] or "?",
            one["phase"] + (", paused" if one["is_paused"] else ""),
            "" if since is None else duration(since),
            _number(one["weight_version"]),
            load,
            *([] if rates is None else ["" if rate is None else f"{rate:,.0f}"]),
            _number(one["completed_jobs"]),
            _number(one["failed_jobs"]),
            _number(one["completion_tokens"]),
            f"{100 * cached / prompt:.0f} %" if prompt else "",
            one["last_update"] or "",
        )
    return table


# Of a request in flight: heading, whether it has numbers, and the cell.
REQUESTS: tuple[tuple[str, bool, Callable[[Row], str]], ...] = (
    ("request", False, lambda one: HIDDEN_ID if one["id"] is None else one["id"]),
    ("phase", False, lambda one: one["phase"]),
    ("age", True, lambda one: age(one["age_s"])),
    ("in", True, lambda one: f"{one['tokens_in']:,}"),
    ("out", True, lambda one: f"{one['tokens_out']:,}"),
    ("prompts", True, lambda one: f"{one['num_prompts']:,}"),
    ("route", False, lambda one: one["route"]),
    ("client", False, lambda one: one["client"] or "–"),
    ("key", False, lambda one: one["key"] or "–"),
    ("workers", False, lambda one: _names(one["workers"])),
    ("model", False, lambda one: one["model"].rpartition("/")[2] or "–"),
)  # fmt: skip


# Left out in this order where the terminal is too narrow.
OPTIONAL = ("model", "key", "client", "route", "prompts")


def _requests(found: Row, num_rows: int | None, width: int) -> list[RenderableType]:
    rows = found["requests"][:num_rows]
    cells = {name: [cell(row) for row in rows] for name, _, cell in REQUESTS}
    for name in OPTIONAL:
        if sum(2 + max(map(len, (name, *column))) for name, column in cells.items()) > width:
            del cells[name]
    table = _table([(name, is_number) for name, is_number, _ in REQUESTS if name in cells])
    for row in zip(*cells.values(), strict=True):
        table.add_row(*map(Text, row))
    title = f"{found['num_requests']:,} requests in flight"
    if len(rows) < found["num_requests"]:
        title += f", the {len(rows)} oldest"
    parts: list[RenderableType] = [Text(title, "bold"), table]
    if found["num_missing"]:
        text = f"{found['num_missing']} front ends do not answer: their requests are missing"
        parts.append(Text(text, "bold red"))
    return parts


def _names(workers: list[str]) -> str:
    more = f"+{len(workers) - MAX_WORKERS}" if len(workers) > MAX_WORKERS else ""
    return ",".join(workers[:MAX_WORKERS]) + more or "–"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def duration(seconds: float) -> str:
    """Seconds as `12 s`, `3 min`, `5 h` or `2 d`."""
    for limit, size, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def age(seconds: float) -> str:
    """Seconds with a decimal, or minutes and hours as `2:05` or `1:02:05`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
    )
