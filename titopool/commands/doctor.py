"""`titopool doctor`: what this machine lacks; `workers/doctor.py` in this process's place."""

import os

import click

from titopool.commands.help import Command, Option
from titopool.launch import execute


@click.command(
    "doctor", cls=Command,
    examples=[
        "titopool doctor",
        "titopool doctor --endpoints tcp://host-a:5555,tcp://host-b:5555 --curve-key-file curve.key",
        "titopool doctor --url http://host-a:8000",
    ],
)  # fmt: skip
@click.option(
    "--endpoints", cls=Option, section="Network", metavar="A,B",
    help="Check the connections to these workers instead.",
)  # fmt: skip
@click.option(
    "--curve-key-file", cls=Option, section="Network", type=click.Path(), metavar="FILE",
    help="Their key. Default: TITOPOOL_CURVE_KEY_FILE.",
)  # fmt: skip
@click.option(
    "--url", cls=Option, section="Network", metavar="URL",
    help="Check a trainer's connections to the front end at URL, and its workers' to each other.",
)  # fmt: skip
def doctor(**options: str | None) -> None:
    """Print versions, GPUs, NCCL, ports, and the parts of vLLM that a worker needs.

    Ends with 1 when something is missing that a server on this machine needs. With --endpoints or
    --url it prints which hosts cannot connect.
    """
    words = []
    for name, value in options.items():
        if value is not None:
            words += ["--" + name.replace("_", "-"), value]
    execute("workers.doctor", *words, environ=os.environ)
