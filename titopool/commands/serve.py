"""`titopool serve [MODEL] …`: gunicorn with settings from command line, environment and file.

click writes the help and completes words. `titopool/settings/sources.py` reads them, because what is
no setting goes to vLLM as it stands.
"""

import os
from typing import Any

import click
from click.shell_completion import CompletionItem

from titopool.commands.help import Command, Option
from titopool.launch import execute
from titopool.settings import vllm_options
from titopool.settings.config import (
    ENV_PREFIX,
    GROUPS,
    PLACEMENTS,
    SETTINGS,
    TYPES,
    WEIGHT_STAGINGS,
    as_text,
    is_switch,
    option_of,
    variable_of,
)
from titopool.settings.files import CONFIG_OPTION, CONFIG_VARIABLE
from titopool.settings.sources import check_model, from_command_line, ignored_variables

# Values that the shell completes.
CHOICES = {
    "placement": PLACEMENTS,
    "weight_staging": WEIGHT_STAGINGS,
    "log_level": ("debug", "info", "warning", "error"),
    "cluster": ("ray",),
}
METAVARS = {str: "TEXT", int: "N", float: "NUMBER", bool: "true|false"}


def _options() -> list[click.Parameter]:
    found: list[click.Parameter] = [
        click.Argument(["served"], required=False, metavar="[MODEL]", type=click.Path()),
        Option(
            [CONFIG_OPTION], section="Configuration file", type=click.Path(), metavar="FILE",
            help=f"YAML or TOML with settings by name, and vLLM's options below `vllm`. Also "
            f"{CONFIG_VARIABLE}.",
        ),
    ]  # fmt: skip
    heading = ""
    for name, item in SETTINGS.items():
        heading = GROUPS.get(name, heading)
        if not item.metadata["secret"]:
            found.append(_option(name, heading))
    return found


def _option(name: str, heading: str) -> Option:
    text = as_text(SETTINGS[name].default)
    shown = SETTINGS[name].metadata["help"] + (f" (default {text})" if text else "")
    is_flag = is_switch(name)
    choices = click.Choice(CHOICES[name]) if name in CHOICES else None
    is_path = name.endswith(("_file", "_dir", "_root"))
    return Option(
        [option_of(name)], section=heading, help=shown, is_flag=is_flag,
        type=choices or (click.Path() if is_path else None),
        metavar=None if is_flag else METAVARS.get(TYPES[name], "A,B"),
    )  # fmt: skip


class Serve(Command):
    """Has all settings as options, and passes all other words on."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and {"-h", "--help"} & set(args):
            click.echo(ctx.get_help())
            ctx.exit()
        ctx.args = list(args)
        return ctx.args

    def invoke(self, ctx: click.Context) -> Any:
        return start(ctx.args)

    def rows(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Secrets stand among the settings by their variables."""
        found = super().rows(ctx)
        heading = ""
        for name, item in SETTINGS.items():
            heading = GROUPS.get(name, heading)
            if item.metadata["secret"]:
                found[heading].append((variable_of(name), item.metadata["help"]))
        return found

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[MODEL]", "[--setting VALUE …]", "[any vLLM engine option]"]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of settings, then those of vLLM's options, if vLLM is installed here."""
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("--"):
            ours = {one.value for one in found}
            names = sorted((vllm_options.option_names() or frozenset()) - ours)
            found += [
                CompletionItem(name, help="vLLM's option")
                for name in names
                if name.startswith(incomplete)
            ]
        return found


serve = Serve(
    "serve", params=_options(),
    help="""Serve MODEL, a folder or a Hugging Face Hub name; by default a tiny random demo model.

    The command line wins over the environment (TITOPOOL_SETTING), the environment over the file.
    Options that are none of titopool's go to vLLM.""",
    examples=[
        "titopool serve Qwen/Qwen3-8B --max-model-len 8192",
        "titopool serve /models/mine --num-workers 1..8 --tensor-parallel-size 2",
        "titopool serve --config titopool.yaml --port 9000",
    ],
)  # fmt: skip


def start(argv: list[str]) -> None:
    """Replaces this process by the server.

    Raises:
        ConfigError: a setting or an option is not accepted, or there is no model at its path.
    """
    config = from_command_line(argv)
    check_model(config)
    ignored = ignored_variables()
    others = {
        key: value
        for key, value in os.environ.items()
        # gunicorn's master warns of the ignored ones.
        if key in ignored or not key.startswith(ENV_PREFIX)
    }
    execute(
        "titopool.launch", "-c", "python:app.gunicorn_hooks", "app:create_app()",
        environ=others | config.to_environment(),
    )  # fmt: skip
