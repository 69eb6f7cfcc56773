"""The completion scripts of `titopool` in zsh and fish, as users load them; bash is in tests/commands/test_command_help.py."""

import subprocess
from pathlib import Path

from harness.servers import REPOSITORY, TITOPOOL, environment
from tests.all.system.packages import need
from tests.kit.terminal import on_terminal

PATH = f"{Path(TITOPOOL).parent}:/usr/bin:/bin"


def script_of(shell: str) -> str:
    return subprocess.run(
        [TITOPOOL, "completion", shell], env=environment(), capture_output=True, text=True,
        check=True, timeout=60,
    ).stdout  # fmt: skip


def test_fish_completes(tmp_path):
    need("fish")
    script = tmp_path / "titopool.fish"
    script.write_text(script_of("fish"))
    for words, expected in (
        ("titopool sta", "status"),
        ("titopool serve --num-w", "--num-workers"),
    ):
        ended = subprocess.run(
            ["fish", "--no-config", "-c", f"source {script}; complete -C '{words}'"],
            env=environment() | {"PATH": PATH, "HOME": str(tmp_path)}, cwd=REPOSITORY,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert [line.split("\t")[0] for line in ended.stdout.splitlines()] == [expected]


def test_zsh_completes_on_a_terminal(tmp_path):
    need("zsh")
    functions = tmp_path / "functions"
    functions.mkdir()
    (functions / "_titopool").write_text(script_of("zsh"))
    (tmp_path / ".zshrc").write_text(
        f"fpath=({functions} $fpath); autoload -Uz compinit; compinit -u -D; PS1='ready> '\n"
    )
    variables = {"PATH": PATH, "ZDOTDIR": str(tmp_path), "HOME": str(tmp_path), "TERM": "xterm"}
    with on_terminal(
        ["zsh", "-i"], env=environment() | variables, cwd=REPOSITORY
    ) as terminal:  # fmt: skip
        terminal.wait_for("ready>", 20)
        terminal.type(b"titopool serve --num-w\t")
        terminal.wait_for("titopool serve --num-workers", 20)
        # The line is empty again before the next keys come.
        terminal.type(b"\x03")
        terminal.wait_for_last_line("ready>", 20)
        terminal.type(b"titopool sta\t")
        terminal.wait_for("ready> titopool status", 20)
