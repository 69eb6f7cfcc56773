"""`titopool completion SHELL`: the script with which a shell completes commands and options."""

import click
from click.shell_completion import get_completion_class

from titopool.commands.help import Command

VARIABLE = "_TITOPOOL_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion", cls=Command,
    examples=[
        "titopool completion bash > ~/.local/share/bash-completion/completions/titopool",
        "titopool completion zsh > ~/.zfunc/_titopool",
        "titopool completion fish > ~/.config/fish/completions/titopool.fish",
    ],
)  # fmt: skip
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options, values and files.

    Write it where the shell looks for completions, or load it for one session:
    `source <(titopool completion bash)`. zsh needs ~/.zfunc in fpath, before compinit.
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, "titopool", VARIABLE).source())
