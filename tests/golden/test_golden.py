"""Each URL rule's answers are those of tests/golden/answers, through two front ends."""

import copy
import json
from typing import Any

import pytest

from harness.api_schemas import document
from tests.golden.exchanges import all_exchanges, rules
from tests.golden.play import DOCUMENT, FOLDER, file_of, play, read
from tests.golden.server import golden_server


@pytest.fixture(scope="module")
def answers(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("golden")
    with golden_server(tiny_model, root) as url:
        return play(all_exchanges(), url, tiny_model, str(root))


@pytest.mark.parametrize("rule", rules())
def test_the_answers_of_a_rule(answers: dict[str, Any], rule: str):
    assert answers[rule] == read(rule)


def test_each_file_belongs_to_a_rule():
    assert {file_of(one) for one in rules()} == set(FOLDER.glob("*.json"))


@pytest.mark.parametrize("rule", rules())
def test_one_changed_field_of_a_file_is_seen(answers: dict[str, Any], rule: str):
    changed = copy.deepcopy(read(rule))
    one = changed[list(changed)[-1]]
    one["headers"]["Content-Type"] += "; a=b"
    assert answers[rule] != changed


def test_the_document_is_the_snapshot():
    assert document() == json.loads(DOCUMENT.read_text())
