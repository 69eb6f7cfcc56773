"""Help, near misses, exit codes and completion of the command `titopool`."""

import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from harness.servers import REPOSITORY, TITOPOOL, environment
from titopool import cli
from titopool.commands.group import COMMANDS, titopool
from titopool.commands.help import WIDTH
from titopool.settings.config import SETTINGS, option_of
from titopool.settings.sources import from_command_line

ROOT = click.Context(titopool, info_name="titopool")
NO_SERVER = (
    "titopool: http://127.0.0.1:9: no server answers (Connection refused); start one with `titopool "
    "serve`, or name it with --url\n"
)
# CPU seconds of a command that starts nothing.
MAX_START_S = 0.6


def command(name: str) -> click.Command:
    found = titopool.get_command(ROOT, name)
    assert found is not None
    return found


def help_of(name: str) -> str:
    return command(name).get_help(click.Context(command(name), info_name=name, parent=ROOT))


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("columns", [80, WIDTH, 200])
def test_help_fits_and_has_groups_and_examples(name, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_of(name)
    head, examples = text.split("\nExamples:\n")
    # Examples are lines to copy.
    assert max(map(len, head.splitlines())) <= min(columns, WIDTH)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "\nHelp:\n" in head
    assert examples.strip().startswith("titopool ") or "titopool" in examples
    assert f"titopool {name}" in examples


def test_the_groups_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert f"{entry.section}:" in shown
        assert any(line.split()[:1] == [name] for line in shown.splitlines())
        assert help_of(name)
    assert max(map(len, shown.splitlines())) <= WIDTH


def test_the_help_of_serve_has_every_setting():
    shown = help_of("serve")
    for name, item in SETTINGS.items():
        flag = f"TITOPOOL_{name.upper()}" if item.metadata["secret"] else option_of(name)
        assert f"\n  {flag}" in shown, name


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_help_parse(name, monkeypatch):
    monkeypatch.chdir(REPOSITORY / "examples")
    lines = help_of(name).split("\nExamples:\n")[1].strip().splitlines()
    for line in lines:
        # Without what the shell does with it.
        words = shlex.split(line[line.index("titopool ") :].partition(" > ")[0])
        assert words[1] == name
        if name == "serve":
            from_command_line(words[2:], {})
        else:
            command(name).make_context(name, words[2:], parent=ROOT)


@pytest.mark.parametrize(
    "words, code, expected",
    [
        pytest.param(["sevre"], 2, "titopool sevre: no such command; did you mean serve?", id="command"),
        pytest.param(["zzz"], 2, "titopool zzz: no such command; `titopool --help`", id="unknown"),
        pytest.param(["status", "--jsno"], 2, "titopool status: No such option", id="option"),
        pytest.param(["status", "--jsno"], 2, "--json", id="similar-option"),
        pytest.param(["scale", "two"], 2, "titopool scale: Invalid value for 'N': expected a whole number of at least 1, got 'two'", id="no-number"),
        pytest.param(["top"], 2, "titopool top: no such command; `titopool status --watch`", id="top"),
        pytest.param(["bench"], 2, "titopool bench: no such command; `vllm bench serve", id="bench"),
        pytest.param(["status", "--watch", "--json"], 2, "--watch: expected a screen, got --json", id="watch"),
        pytest.param(["scale", "2", "--timeout-s", "nan"], 2, "at least 0.1 seconds, got 'nan'", id="seconds"),
        pytest.param(["scale"], 2, "titopool scale: Missing argument 'N'", id="missing"),
        pytest.param(["completion", "tcsh"], 2, "'bash', 'zsh', 'fish'", id="shell"),
        pytest.param(["serve", "--prot", "1"], 2, "titopool: --prot: ", id="setting"),
        pytest.param(["serve", "--config", "no.yaml"], 2, "titopool: no.yaml: ", id="file"),
        pytest.param(["status", "--url", "host:1"], 1, "expected http://host:port", id="url"),
        *(
            pytest.param([*words, "--url", "http://127.0.0.1:9"], code, NO_SERVER, id=f"{words[0]}-no-server")
            for words, code in ((["scale", "2"], 1), (["status"], 3))
        ),
        pytest.param(["mismatch", "--n", "2", "--max-model-len"], 2, "expected MODEL first", id="model"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_its_exit_code(capsys, words, code, expected):
    assert cli.main(words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert expected in captured.err


def test_without_a_command_the_help_is_shown(capsys):
    assert cli.main([]) == 2
    assert "Usage: titopool [OPTIONS] COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--version"], ["serve", "--help"], ["status", "--help"]])
def test_help_imports_nothing_heavy_and_starts_fast(words):
    code = f"""
import resource, sys
from titopool.cli import main
main({words!r})
used = resource.getrusage(resource.RUSAGE_SELF)
heavy = {{"numpy", "aiohttp", "rich", "flask", "gunicorn", "torch", "transformers", "yaml", "zmq"}}
print(used.ru_utime + used.ru_stime, *(heavy & set(sys.modules)), file=sys.stderr)
"""
    best = float("inf")
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment(), cwd=REPOSITORY, text=True,
            capture_output=True, timeout=60,
        )  # fmt: skip
        seconds, *heavy = ended.stderr.split()
        assert heavy == []
        best = min(best, float(seconds))
    assert best < MAX_START_S


# ---- completion ----------------------------------------------------------------------


def completed(words: list[str], folder: Path = REPOSITORY) -> list[str]:
    """What bash proposes for the last of `words`, by the script that is sourced as users do."""
    script = """
source <("$TITOPOOL" completion bash)
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"
declare -p COMP_WORDS > /dev/null
titopool_function=$(complete -p titopool | sed -E 's/.*-F ([^ ]+).*/\\1/')
"$titopool_function" titopool
printf '%s\\n' "${COMPREPLY[@]}"
"""
    # The function calls the command by its name.
    path = f"{Path(TITOPOOL).parent}:/usr/bin:/bin"
    ended = subprocess.run(
        ["bash", "-c", script, "bash", "titopool", *words],
        env=environment(TITOPOOL=TITOPOOL, PATH=path) | {"TITOPOOL": TITOPOOL},
        cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


@pytest.mark.parametrize(
    "words, expected",
    [
        (["s"], {"serve", "status", "scale"}),
        (["serve", "--num-w"], {"--num-workers"}),
        (["serve", "--max-model"], {"--max-model-len"}),
        (["serve", "model", "--placement", "r"], {"round_robin"}),
        (["status", "--i"], {"--interval-s"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)  # fmt: skip
def test_bash_completes(words, expected):
    assert set(completed(words)) == expected
