"""Writes docs/settings.md from `titopool/settings/config.py`: `python -m tools.settings_page`."""

from pathlib import Path

from titopool.settings.config import GROUPS, SETTINGS, as_text, option_of, variable_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
INTRODUCTION = """\
# Settings

`make docs` writes this page from `titopool/settings/config.py`.

The command line wins over the environment, the environment over a file of settings (`--config` or
`TITOPOOL_CONFIG`, [operators.md](operators.md#a-file-of-settings)), and the file over the defaults.
All other options on the command line go to vLLM's engine, like those in `engine_args`. An unknown or
impossible setting stops the start with an error that names it.

Durations are in seconds, sizes in bytes. Secrets have no option and stand in no file: they come from the environment.
Variables that Kubernetes makes for a Service named `titopool` (`TITOPOOL_PORT=tcp://…`) are
ignored.
"""
HEADER = """
| setting | option | variable | default | meaning |
|---|---|---|---|---|
"""


def settings_page() -> str:
    """The text of docs/settings.md."""
    page = INTRODUCTION
    for name, item in SETTINGS.items():
        if name in GROUPS:
            page += f"\n## {GROUPS[name]}\n{HEADER}"
        option = "" if item.metadata["secret"] else option_of(name)
        cells = (name, option, variable_of(name), as_text(item.default))
        quoted = " | ".join(f"`{cell}`" if cell else "" for cell in cells)
        page += f"| {quoted} | {item.metadata['help']} |\n"
    return page


if __name__ == "__main__":
    PAGE.write_text(settings_page())
