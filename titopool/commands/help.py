"""What all commands share: help in groups with examples, and options that several have."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from titopool.settings.config import ServerConfig

WIDTH = 100
# Columns of what is no terminal.
PIPE_WIDTH = 10_000
Function = TypeVar("Function", bound=Callable[..., Any])
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}


class Whole(click.IntRange):
    """A whole number; click would name its own class in the error."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"expected a whole number of at least {self.min}, got {value!r}", param, ctx)


class Seconds(click.FloatRange):
    """A time in seconds, finite."""

    def __init__(self) -> None:
        super().__init__(min=0.1, max=1e9)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            # Every comparison with NaN is false, so that click would let it pass.
            if (found := super().convert(value, param, ctx)) == found:
                return found
        except click.BadParameter:
            pass
        self.fail(f"expected a time of at least {self.min} seconds, got {value!r}", param, ctx)


class Option(click.Option):
    """An option that stands in help below the heading `section`."""

    def __init__(self, *arguments: Any, section: str = "Options", **fields: Any):
        super().__init__(*arguments, **fields)
        self.section = section


class Command(click.Command):
    """A command whose help has headings and examples."""

    def __init__(self, *arguments: Any, examples: Sequence[str] = (), **fields: Any):
        fields["context_settings"] = CONTEXT | fields.get("context_settings", {})
        super().__init__(*arguments, **fields)
        self.examples = examples

    def rows(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Names and help of the options, by heading."""
        found: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            # The usage has the arguments.
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record:
                found.setdefault(getattr(param, "section", "Help"), []).append(record)
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, rows in self.rows(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            # Unwrapped, so that a line can be copied.
            for example in self.examples:
                formatter.write(f"  {example}\n")


def console() -> Any:
    """A rich console; through a pipe it wraps nothing, because what reads it wants whole lines."""
    # Only here: rich takes longer to import than a server to answer.
    from rich.console import Console

    is_fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_fixed else PIPE_WIDTH, highlight=False)


def url_option(function: Function) -> Function:
    """`--url`, of a server that runs."""
    defaults = ServerConfig()
    return click.option(
        "--url", cls=Option, section="Server", default=f"http://{defaults.host}:{defaults.port}",
        show_default=True, metavar="URL",
        help="The server's address. Keys come from TITOPOOL_API_KEY and TITOPOOL_ADMIN_KEY.",
    )(function)  # fmt: skip


def json_option(function: Function) -> Function:
    """`--json`, for scripts."""
    return click.option(
        "--json", "as_json", cls=Option, section="Output", is_flag=True, help="One JSON object."
    )(function)
