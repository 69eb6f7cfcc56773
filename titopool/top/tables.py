"""Draws the screen of `titopool top` with rich."""

from collections.abc import Callable
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from titopool.answers.operators import OpenRequest
from titopool.top.snapshot import Snapshot, WorkerRow
from titopool.top.view import View

PHASE_STYLES = {
    "ready": "green", "checking": "cyan", "waiting": "yellow", "running": "green",
    "streaming": "green", "writing": "cyan",
}  # fmt: skip
BAR_CELLS = 10
# Named in a request's row.
MAX_WORKERS = 3
HIDDEN_ID = "(another key's)"
KEYS = "↑↓ select   a abort   s sort   r reverse   / filter   q quit"
# Lines of the screen that are not rows of requests: header, workers' and requests' headings, footer.
FIXED_LINES = 10


def screen(view: View, url: str, height: int) -> RenderableType:
    """The whole screen for a terminal of `height` lines."""
    shown = view.snapshot
    num_rows = max(3, height - FIXED_LINES - max(1, len(shown.workers)))
    return Group(
        header(shown, url), workers_table(shown), Text(),
        requests_table(view.rows, num_rows, view.selected, order_of(view)), footer(view),
    )  # fmt: skip


def once(view: View, url: str) -> RenderableType:
    """The tables without what only a terminal needs."""
    rows = view.rows
    return Group(
        header(view.snapshot, url), workers_table(view.snapshot), Text(),
        requests_table(rows, len(rows), None, order_of(view)),
    )  # fmt: skip


def order_of(view: View) -> str:
    """The title of the requests: how they are sorted and filtered."""
    order = f"by {view.sort}" + (", reversed" if view.is_reversed else "")
    return order + (f", with {view.filter!r}" if view.filter else "")


def header(shown: Snapshot, url: str) -> Text:
    """One line about the whole server, and one about what is wrong."""
    ready = sum(one.phase == "ready" for one in shown.workers)
    rates = [one.tokens_per_s for one in shown.workers if one.tokens_per_s is not None]
    text = Text.assemble(
        ("titopool ", "bold"), (url, "bold cyan"),
        f"   {ready}/{len(shown.workers)} workers ready",
        f"   {shown.num_requests} requests in flight",
        f"   {shown.num_waiting} prompts waiting",
        f"   {sum(rates):,.0f} tokens/s" if rates else "",
    )  # fmt: skip
    if shown.error:
        text.append(f"\n{shown.error}; trying again", "bold red")
    elif shown.num_missing:
        text.append(
            f"\n{shown.num_missing} front ends do not answer: their requests are missing",
            "bold red",
        )
    return text


def workers_table(shown: Snapshot) -> Table:
    """A row for each worker."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name, justify in (
        ("worker", "left"), ("phase", "left"), ("version", "right"), ("load", "left"),
        ("tokens/s", "right"), ("prompt tokens/s", "right"), ("cache hits", "right"),
        ("seen", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for one in shown.workers:
        reason = f" ({one.reason})" if one.reason else ""
        table.add_row(
            one.name, Text(one.phase + reason, PHASE_STYLES.get(one.phase, "red")),
            "–" if one.version is None else str(one.version), _bar(one),
            _number(one.tokens_per_s), _number(one.prompt_tokens_per_s),
            "–" if one.cache_hits is None else f"{one.cache_hits:.0%}", f"{one.silent_s:.1f} s ago",
        )  # fmt: skip
    return table


def _bar(one: WorkerRow) -> Text:
    if not one.num_slots:
        return Text("–")
    share = min(1.0, one.num_running / one.num_slots)
    filled = round(share * BAR_CELLS)
    style = "red" if share > 0.95 else "yellow" if share > 0.7 else "green"
    return Text.assemble(
        ("█" * filled, style), ("░" * (BAR_CELLS - filled), "dim"),
        f" {one.num_running}/{one.num_slots}",
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


class Column(NamedTuple):
    """A column of the requests."""

    name: str
    cell: Callable[[OpenRequest], str | Text]
    is_number: bool = False
    # The least width, and its share of what is left.
    width: int | None = None
    ratio: int | None = None
    # Shown if a row has such a value.
    needs: Callable[[OpenRequest], object] = lambda row: True


COLUMNS = (
    Column("id", lambda row: HIDDEN_ID if row.id is None else row.id, width=20, ratio=6),
    Column("phase", lambda row: Text(row.phase, PHASE_STYLES.get(row.phase, ""))),
    Column("age", lambda row: age(row.age_s), is_number=True),
    Column("in", lambda row: f"{row.tokens_in:,}", is_number=True),
    Column("out", lambda row: f"{row.tokens_out:,}", is_number=True),
    Column("prompts", lambda row: f"{row.num_prompts:,}", is_number=True),
    Column("route", lambda row: row.route, width=10, ratio=4),
    Column("client", lambda row: row.client or "–"),
    Column("key", lambda row: row.key or "–", width=6, needs=lambda row: row.key),
    Column("worker", lambda row: _names(row.workers)),
    Column("model", lambda row: row.model.rpartition("/")[2] or "–"),
)  # fmt: skip


def _names(workers: list[str]) -> str:
    more = f"+{len(workers) - MAX_WORKERS}" if len(workers) > MAX_WORKERS else ""
    return ",".join(workers[:MAX_WORKERS]) + more or "–"


def requests_table(
    rows: list[OpenRequest], num_rows: int, selected: int | None, order: str
) -> Table:
    """At most `num_rows` requests around the selected one."""
    first = 0 if selected is None else max(0, min(selected - num_rows // 2, len(rows) - num_rows))
    part = rows[first : first + num_rows]
    title = f"requests {order}"
    if len(part) < len(rows):
        title += f", {first + 1} to {first + len(part)} of {len(rows)}"
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, expand=True, header_style="bold", title=title,
        title_justify="left", title_style="bold",
    )  # fmt: skip
    columns = [one for one in COLUMNS if not rows or any(map(one.needs, rows))]
    for one in columns:
        table.add_column(
            one.name, justify="right" if one.is_number else "left", no_wrap=True,
            min_width=one.width, ratio=one.ratio, overflow="ellipsis",
        )  # fmt: skip
    for index, row in enumerate(part, first):
        style = "reverse" if index == selected else ""
        table.add_row(*(one.cell(row) for one in columns), style=style)
    if not rows:
        table.add_row(Text("none", "dim"))
    return table


def age(seconds: float) -> str:
    """Seconds with a decimal, or minutes and hours."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
    )


def footer(view: View) -> Text:
    """The question, what was done, or the keys."""
    if view.mode == "filter":
        return Text.assemble(("filter: ", "bold"), view.filter, ("▏", "blink"), ("   Enter keeps, Esc clears", "dim"))  # fmt: skip
    if (asked := view.asked) is not None:
        return Text.assemble(
            ("abort ", "bold red"), (str(asked.id), "bold"),
            f" ({asked.route}, {age(asked.age_s)})? ", ("y", "bold"), " aborts, any other key does not",
        )  # fmt: skip
    return Text(view.message, "bold") if view.message else Text(KEYS, "dim")
