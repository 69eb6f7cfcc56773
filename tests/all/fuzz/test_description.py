"""schemathesis sends what the OpenAPI document allows and forbids, and compares every answer with it.

The server has workers with stub engines: weights, pauses and aborts cost nothing there.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import schemathesis
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schemathesis import BaseSchema, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from harness.api_schemas import closed_document
from tests.all.fuzz.exploring import SEED, TIMEOUT_S, explore
from tests.all.fuzz.hints import VOCAB_SIZE
from tests.all.fuzz.stub_pool import StubPool, stub_pool

pytestmark = pytest.mark.timeout(TIMEOUT_S)

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance,
    response_schema_conformance,
]  # fmt: skip
NUM_WORKERS = 2
SETTINGS = {
    "request_timeout_s": "2", "weight_update_timeout_s": "1", "heartbeat_interval_s": "0.1",
    "max_completions_per_request": "64", "drain_timeout_s": "1",
}  # fmt: skip
# A request may wait for `request_timeout_s`, and a machine may stand still.
CALL_TIMEOUT_S = 30
# After them nothing is generated until somebody resumes.
PAUSES = ("/pause", "/pause_generation")
# A deadline that has passed is no fault of the server: a request waits for a version of the weights
# that never comes, or for a trainer.
UNAVAILABLE = {503, 504}
# Of a line or a header that is too long: gunicorn answers before a route is known.
BEFORE_ROUTES = {414, 431}


@pytest.fixture
def pool(tiny_model: str, tmp_path: Path) -> Iterator[StubPool]:
    """Two stub workers with a real tokenizer, whose ids stage no faults."""
    arguments = (
        "--tokenizer",
        tiny_model,
        "--vocab-size",
        str(VOCAB_SIZE),
        "--max-model-len",
        "512",
    )
    with stub_pool(tmp_path, *arguments, num_workers=NUM_WORKERS, **SETTINGS) as running:
        yield running


def strategies_of(described: BaseSchema) -> Iterator[st.SearchStrategy[Case]]:
    """Cases of each operation that its schemas allow, and others."""
    for found in described.get_all_operations():
        operation = found.ok()
        yield operation.as_strategy()
        # Any text is a header or a part of a path: nothing of these is forbidden.
        if len(operation.body) or len(operation.query):
            yield operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)


def test_the_server_answers_as_its_description_says(pool: StubPool) -> None:
    url = pool.server.url
    strategies = list(strategies_of(schemathesis.openapi.from_dict(closed_document())))
    random.Random(SEED).shuffle(strategies)
    workers = {str(index) for index in range(NUM_WORKERS)}
    statuses: Counter[int] = Counter()
    unavailable: Counter[str] = Counter()
    numbers = itertools.count()

    def check_next() -> None:
        number = next(numbers)

        @hypothesis.seed(f"{SEED}/description/{number}")
        @settings(max_examples=3)
        @given(case=strategies[number % len(strategies)])
        def check_case(case: Case) -> None:
            # A worker that drains does not come back.
            assume(not workers & set((case.path_parameters or {}).values()))
            answer = case.call(base_url=url, timeout=CALL_TIMEOUT_S)
            statuses[answer.status_code] += 1
            if answer.status_code in BEFORE_ROUTES:
                return
            if answer.status_code in UNAVAILABLE:
                unavailable[f"{case.path}: {answer.json()['error']['message'][:100]}"] += 1
            if answer.status_code == 200 and case.path in PAUSES:
                pool.server.post("/resume", None)
            checks = CHECKS[1:] if answer.status_code in UNAVAILABLE else CHECKS
            case.validate_response(answer, checks=checks)

        check_case()

    num_batches = explore(
        check_next, check_next, name="description", share=0.5, between=pool.check_processes
    )
    print(
        f"{sum(statuses.values())} requests, {num_batches / len(strategies):.1f} times each of "
        f"{len(strategies)} operations and modes; by status: {dict(sorted(statuses.items()))}; "
        f"unavailable: {dict(unavailable)}"
    )
    # There are requests that are served, and requests that are refused.
    assert statuses[200] > num_batches / 4
    assert statuses[400] > num_batches / 4
