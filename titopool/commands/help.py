"""What all commands share: help in groups with examples, and options that several have."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from titopool.settings.config import ServerConfig

WIDTH = 100
Function = TypeVar("Function", bound=Callable[..., Any])
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}


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


class PassedOn(Command):
    """A command that reads its words itself: `main(argv)` gets them as they are."""

    def __init__(self, name: str, main: Callable[[Sequence[str]], int], **fields: Any):
        super().__init__(name, add_help_option=False, **fields)
        self._main = main

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return ctx.args

    def invoke(self, ctx: click.Context) -> int:
        return self._main(ctx.args)
