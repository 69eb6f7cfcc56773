"""`titopool completion SHELL`: the script with which a shell completes commands and options."""

import click
from click.shell_completion import get_completion_class

from titopool.commands.help import Command

VARIABLE = "_TITOPOOL_COMPLETE"
# click 8.5 asks zsh whether the file is being autoloaded, which holds for the first call only: the
# second Tab would complete nothing. Every later call has the function's name.
AUTOLOADED, CALLED = "$zsh_eval_context[-1] == loadautofunc", "$funcstack[1] == _titopool"
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
    script = found(ctx.find_root().command, {}, "titopool", VARIABLE).source()
    click.echo(script.replace(AUTOLOADED, CALLED))
