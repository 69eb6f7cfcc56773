"""What `make matrix` (90 minutes) wrote into docs/models.md, and its known limits."""

import re

from harness.servers import REPOSITORY
from tests.all.matrix import limits
from tests.all.matrix.image_families import IMAGE_FAMILIES
from tests.all.matrix.table import DOCUMENT, LABELS, marks_of
from tests.kit.models.model_families import FAMILIES

SCRIPTS = {file.stem: file for file in (REPOSITORY / "tests/all/matrix/limits").glob("[a-z]*.py")}


def test_each_limit_has_a_short_script_without_titopool():
    used = {*limits.CELLS.values(), *(one for row in limits.OLDER.values() for one in row.values())}
    assert SCRIPTS.keys() == limits.LIMITS.keys() == used
    for file in SCRIPTS.values():
        text = file.read_text()
        assert len(text.splitlines()) <= 30
        assert "titopool" not in text
        assert "running_server" not in text


def test_an_older_version_has_its_limit_with_its_own_error_only():
    for version, rows in limits.OLDER.items():
        for row, name in rows.items():
            for error in limits.ERRORS[name]:
                assert limits.limit_of(row, "greedy", version, f"no start: {error}") == name
            assert limits.limit_of(row, "greedy", version, "worker 0 ended") is None
            assert limits.limit_of(row, "greedy", "0.32.0", limits.ERRORS[name][0]) is None


def test_at_most_eight_rows_are_limited_besides_adapters():
    assert len({row for row, column in limits.CELLS if column != "LoRA"}) <= 8


def test_the_document_has_every_row_and_no_open_cell():
    begin, end = marks_of("matrix")
    text = DOCUMENT.read_text().partition(begin)[2].partition(end)[0]
    rows = re.findall(r"^\| ([^|]+) \|(.*)\|$", text, re.M)
    expected = [LABELS[one] for one in (*FAMILIES, *IMAGE_FAMILIES)]
    assert [name for name, _ in rows if name not in ("Text", "Images")] == expected
    cells = {cell.strip() for name, line in rows for cell in line.split("|") if name in expected}
    numbers = {str(one) for one in range(1, len(limits.LIMITS) + 1)}
    assert cells <= {"✓", *numbers}
