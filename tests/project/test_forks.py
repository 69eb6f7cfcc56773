"""Scripts that run in forks end, fail and print as in separate processes."""

from collections.abc import Iterator

import pytest

from tests.kit.forks import Forks


@pytest.fixture
def forks() -> Iterator[Forks]:
    found = Forks("json")
    yield found
    found.end()


def test_each_script_runs_in_a_separate_process(forks: Forks):
    script = """
import atexit, json, sys
assert not hasattr(json, "changed")
json.changed = True
atexit.register(print, "end")
print(*sys.argv[1:])
"""
    for _ in range(2):
        assert forks.run(script, "a", "b") == "a b\nend\n"
    assert forks.run("import os\nprint(1, flush=True)\nos._exit(0)") == "1\n"


@pytest.mark.parametrize("script, part", [
    ("1 / 0", "exit code 1: (.|\n)*ZeroDivisionError"), ("import os; os.abort()", "exit code -6"),
])  # fmt: skip
def test_a_script_that_fails_fails_the_test(forks: Forks, script: str, part: str):
    with pytest.raises(AssertionError, match=part):
        forks.run(script)
    assert forks.run("print(2)") == "2\n"


def test_a_script_that_takes_too_long_is_killed(forks: Forks):
    with pytest.raises(AssertionError, match="no answer within 1 s"):
        forks.run("import time; time.sleep(60)", timeout_s=1)
    assert forks.run("print(3)") == "3\n"
