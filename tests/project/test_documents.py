"""Checks of the documents: named files, links, widths and log lines. No server is started."""

import re
from pathlib import Path

import pytest

from harness.servers import REPOSITORY

DOCUMENTS = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
# Generated files are not wrapped.
GENERATED = {"docs/settings.md"}
WIDTH = 100
MAX_SENTENCES = 2
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
PATH = re.compile(r"(?:app|workers|titopool|tests|benchmarks|examples|docs|tools)/[\w./-]*\.\w+")
SENTENCE_END = re.compile(r"[a-z`)\]][.!?](?= [A-Z`]|$)")


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def prose_of(path: Path) -> str:
    """The document's text without fenced code."""
    return FENCED.sub("", path.read_text())


def anchor_of(heading: str) -> str:
    """GitHub's anchor of a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return text.replace(" ", "-")


every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)


@every_document
def test_named_files_exist(path: Path):
    named = {
        found for quoted in re.findall(r"`([^`]+)`", prose_of(path))
        for found in PATH.findall(quoted)
    }  # fmt: skip
    assert [one for one in sorted(named) if not (REPOSITORY / one).exists()] == []


@every_document
def test_named_tests_exist(path: Path):
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", prose_of(path)):
        assert f"\ndef {test}(" in (REPOSITORY / file).read_text(), test


def test_every_promise_has_a_test():
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (REPOSITORY / "SECURITY.md").read_text(), re.M)
    promises = {promise: test for promise, test in rows if promise not in ("promise", "---")}
    assert promises
    assert [one for one, test in promises.items() if "`tests/" not in test] == []


@every_document
def test_links_resolve(path: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(path)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose_of(linked), re.M)
            assert anchor in map(anchor_of, headings), target


@every_document
def test_lines_are_wrapped_and_cells_are_short(path: Path):
    if name_of(path) in GENERATED:
        return
    for line in prose_of(path).splitlines():
        if not line.startswith("|"):
            assert len(line) <= WIDTH, line
            continue
        for cell in line.split("|"):
            assert len(SENTENCE_END.findall(cell.strip())) <= MAX_SENTENCES, cell


@every_document
def test_named_make_targets_and_modules_exist(path: Path):
    # In fenced blocks and in backticks; prose may say "make" too.
    code = "\n".join(FENCED.findall(path.read_text()) + re.findall(r"`[^`]+`", prose_of(path)))
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"^`?make ([a-z][a-z-]*)", code, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for module in re.findall(r"python (?:-P )?-m ((?:benchmarks|tests|tools|workers)[\w.]*)", code):
        name = REPOSITORY / module.replace(".", "/")
        assert name.with_suffix(".py").exists() or (name / "__main__.py").exists(), module


def test_documented_log_lines_are_in_the_sources():
    text = (REPOSITORY / "docs" / "operators.md").read_text()
    lines = re.findall(r"^\| `(.*?)` \|", text[text.index("\n## Logs") :], re.M)
    sources = "\n".join(
        path.read_text()
        for root in ("app", "titopool", "workers")
        for path in (REPOSITORY / root).rglob("*.py")
    )
    assert lines
    for line in lines:
        # The fixed text between the values.
        for fragment in re.split(r"…|\d+", line):
            words = fragment.strip(" :;")
            assert len(words.split()) < 2 or words in sources, line
