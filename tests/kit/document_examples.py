"""The fenced examples of the documents."""

import re
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from harness.servers import REPOSITORY, Server
from tests.kit.trainers.trl_weights_client import GROUP_PORT

DOCUMENTS = (
    "README.md",
    *(f"docs/{path.name}" for path in sorted((REPOSITORY / "docs").glob("*.md"))),
)
BLOCK = re.compile(r"^```(\w+)( [\w-]+)?\n(.*?)^```$", re.M | re.S)
URL, GROUP, FOLDER = "http://127.0.0.1:8000", "group_port=51216", "/weights/step-7"


class Block(NamedTuple):
    document: str
    number: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.document}-{self.number}"

    @property
    def loads_weights(self) -> bool:
        words = ("WeightsClient", "client.weights", "init_communicator", FOLDER)
        return any(word in self.code for word in words)


def blocks(*, run: bool) -> Iterator[Block]:
    for document in DOCUMENTS:
        text = (REPOSITORY / document).read_text()
        for number, match in enumerate(BLOCK.finditer(text), 1):
            language, word, code = match.groups()
            assert word in (None, " not-run"), f"{document}: {word}"
            if language in ("python", "sh") and run == (word is None):
                yield Block(document, number, language, code)


def filled_in(code: str, server: Server, folder: str) -> str:
    code = code.replace(URL, server.url).replace(FOLDER, folder)
    return code.replace(GROUP, f"group_port={GROUP_PORT}")


def run_shell(code: str) -> str:
    """The output of the commands; curl fails on an HTTP error."""
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code.replace("curl -s", "curl -sSf")],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout
