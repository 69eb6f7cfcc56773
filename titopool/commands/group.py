"""The list of commands. Each is imported when it is called, or when the shell completes words."""

import difflib
import importlib
from typing import NamedTuple

import click

from titopool import __version__
from titopool.commands.help import CONTEXT


class Entry(NamedTuple):
    """A command: where it is, and its line in `titopool --help`."""

    section: str
    # `module:name` of a click command.
    place: str
    help: str


SERVER, RUNNING, CHECKS, SHELL = (
    "Start a server", "Look at a running server", "Check the surroundings", "Shell"
)  # fmt: skip
COMMANDS = {
    "serve": Entry(SERVER, "titopool.commands.serve:serve", "Serve a model."),
    "demo": Entry(SERVER, "titopool.commands.demo:demo", "Show what the server does, step by step."),
    "status": Entry(RUNNING, "titopool.commands.status:status", "Show workers, load and requests."),
    "scale": Entry(RUNNING, "titopool.commands.scale:scale", "Change the number of workers."),
    "doctor": Entry(CHECKS, "titopool.commands.doctor:doctor", "Check this machine, or a network."),
    "mismatch": Entry(
        CHECKS,
        "titopool.mismatch.command:mismatch",
        "Compare the server's log-probabilities with a trainer's.",
    ),
    "completion": Entry(SHELL, "titopool.commands.completion:completion", "Print a shell's completion."),
}  # fmt: skip


# Words that are no commands, and what to use.
RETIRED = {
    "top": "`titopool status --watch` shows workers and requests",
    "bench": "`vllm bench serve --base-url URL`, of vLLM's GPU package, measures a server",
}


class NoSuchName(click.UsageError):
    """No command has this name."""


class TitopoolGroup(click.Group):
    """Imports commands lazily, shows them below headings, and proposes what a word may have meant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, name = entry.place.partition(":")
        found: click.Command = getattr(importlib.import_module(module), name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not ctx.resilient_parsing:
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else "`titopool --help` lists them"
            hint = RETIRED.get(name, hint)
            raise NoSuchName(f"{name}: no such command; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            rows = [(name, one.help) for name, one in COMMANDS.items() if one.section == section]
            with formatter.section(section):
                formatter.write_dl(rows, col_max=14)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for line in (
                "titopool serve Qwen/Qwen3-8B --max-model-len 8192",
                "titopool status",
                "titopool serve --help",
            ):
                formatter.write(f"  {line}\n")


@click.group(
    "titopool",
    cls=TitopoolGroup,
    context_settings=CONTEXT,
    help="A generation server for reinforcement learning: token ids in, token ids out.",
)
@click.version_option(__version__, message="%(version)s", help="Print the version.")
def titopool() -> None:
    """The group itself does nothing."""
