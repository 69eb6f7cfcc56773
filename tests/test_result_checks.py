"""Results that do not fit their job fail it; later results are still read."""

import numpy as np
import pytest

from app.pool.result_checks import defect_of
from tests.test_pool import assigned, pool_of, request_of
from titopool.wire.messages import Chunk, Completed, Completion, Logprobs


def floats(num: int) -> bytes:
    return np.zeros(num, np.float32).tobytes()


def ids(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def one(token_ids: bytes = b"", logprobs: Logprobs | None = None) -> Completion:
    return Completion(token_ids, "stop", logprobs, [])


GOOD = [
    Completed(1, 1, [one(), one(ids(1, 2))], 0),
    Completed(1, 1, [one(ids(1, 2), Logprobs(floats(2)))] * 2, 0),
    Completed(1, 1, [one(ids(1, 2), Logprobs(floats(2), ids(1, 2)))] * 2, 0),
    Completed(1, 1, [one(ids(1, 2), Logprobs(floats(3), ids(1, 2, 3), ids(2, 1)))] * 2, 0),
    Completed(1, 1, [one()] * 2, 0, prompt_logprobs=Logprobs(floats(4), ids(1, 2, 3, 4))),
    Chunk(1, 1, [(1, one(ids(1)))]),
    Chunk(1, 1, []),
]
BAD = [
    Completed(1, 1, [], 0),
    Completed(1, 1, [one()] * 3, 0),
    Completed(1, 1, [one(b"\0" * 5), one()], 0),
    Completed(1, 1, [one(), one(ids(1, 2), Logprobs(floats(1)))], 0),
    Completed(1, 1, [one(), one(ids(1), Logprobs(b"\0" * 3))], 0),
    Completed(1, 1, [one(), one(ids(1), Logprobs(floats(1), ids(1, 2)))], 0),
    Completed(1, 1, [one(), one(ids(1, 2), Logprobs(floats(3), ids(1, 2, 3), ids(3, 1)))], 0),
    Completed(1, 1, [one(), one(ids(1, 2), Logprobs(floats(2), ids(1, 2), ids(3, -1)))], 0),
    Completed(1, 1, [one(), one(ids(1, 2), Logprobs(floats(2), ids(1, 2), ids(2)))], 0),
    Completed(1, 1, [one(), one(ids(1), Logprobs(floats(1), counts=b"\1"))], 0),
    Completed(1, 1, [one()] * 2, 0, prompt_token_ids=b"\0"),
    Completed(1, 1, [one()] * 2, 0, prompt_logprobs=Logprobs(b"\0")),
    Chunk(1, 1, [(2, one())]),
    Chunk(1, 1, [(-1, one())]),
    Chunk(1, 1, [(0, one(b"\0"))]),
]


@pytest.mark.parametrize("result", GOOD, ids=repr)
def test_a_fitting_result_is_accepted(result: Completed | Chunk):
    assert defect_of(request_of(5, n=2).jobs[0], result) == ""


@pytest.mark.parametrize("result", BAD, ids=repr)
def test_a_wrong_result_fails_only_its_own_request(result: Completed | Chunk):
    pool = pool_of("a")
    first, second = request_of(5, n=2), request_of(5, first_id=2)
    for request in (first, second):
        pool.submit(request)
    assert assigned(pool) == {"a": [1, 2]}
    pool.on_results("a", [result, Completed(2, 1, [one()], 0)])
    assert first.error is not None
    assert first.error.code == "generation_failed"
    assert "invalid result" in first.error.message
    assert len(second.completed()) == 1
    for request in pool.take_failed():
        pool.withdraw(request)
    assert pool.num_open_jobs == 0


def test_truncated_digests_do_not_fail_the_result():
    pool = pool_of("a")
    request = request_of(5)
    pool.submit(request)
    assert assigned(pool) == {"a": [1]}
    pool.on_results("a", [Completed(1, 1, [one()], 0, b"\0" * 11)])
    assert len(request.completed()) == 1
    assert pool.num_open_jobs == 0
