"""The matrix of models: `python -m tests.all.matrix`, which goes on where it was stopped.

Each part of a row runs in a process of its own, which may be killed. Each cell is a line of JSON in
`build/matrix/VERSION.jsonl`: row, column, result, seconds of its part, date.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from harness.servers import REPOSITORY
from tests.all.matrix.cells import FOLDER, read, results_file
from tests.all.matrix.image_families import IMAGE_FAMILIES
from tests.all.matrix.row import COLUMNS, PARTS, parts_of
from tests.kit.models.model_families import FAMILIES

PART_TIMEOUT_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", default=[*FAMILIES, *IMAGE_FAMILIES])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--columns", nargs="+", default=[], help="default: all of the parts'")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    given = parser.parse_args()
    logs = FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    results = results_file()
    done = set() if given.again else {(one["row"], one["column"]) for one in read(results)}
    for part in given.parts:
        for row in given.rows:
            columns = [one for one in COLUMNS[part] if one in (given.columns or COLUMNS[part])]
            if part in parts_of(row) and not all((row, one) in done for one in columns):
                run(row, part, columns, results, logs / f"{row}-{part}")


def run(row: str, part: str, columns: list[str], results: Path, log: Path) -> None:
    """Runs columns of a part, and adds their cells to `results`."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.all.matrix.row", row, part, f"{log}.server", *columns]
    with open(f"{log}.err", "w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=REPOSITORY,
            start_new_session=True,
        )  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=PART_TIMEOUT_S)
            end = f"its process ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            printed, _ = process.communicate()
            end = f"not within {PART_TIMEOUT_S} s"
    cells = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    missing = set(columns) - {one["column"] for one in cells}
    cells += [{"row": row, "column": one, "result": end} for one in columns if one in missing]
    seconds, date = round(time.monotonic() - began), datetime.date.today().isoformat()
    with open(results, "a") as file:
        for cell in cells:
            print(json.dumps({**cell, "seconds": seconds, "date": date}), file=file)
    wrong = [f"{one['column']}: {one['result'][:150]}" for one in cells if one["result"] != "exact"]
    print(f"{row} {part}: {seconds} s, {'; '.join(wrong) or 'exact'}", flush=True)


if __name__ == "__main__":
    main()
