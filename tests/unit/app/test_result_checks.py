"""Results that do not fit their job fail it; later results are still read."""

import msgspec
import numpy as np
import pytest

from app.pool.result_checks import defect_of
from tests.kit.workers.pools import assigned, pool_of, request_of
from titopool.wire.messages import (
    Chunk,
    Completed,
    Completion,
    Image,
    Logprobs,
    RoutedExperts,
    SamplingMask,
)


def floats(num: int) -> bytes:
    return np.zeros(num, np.float32).tobytes()


def ids(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def one(token_ids: bytes = b"", logprobs: Logprobs | None = None) -> Completion:
    return Completion(token_ids, "stop", logprobs, [])


def replayed(num_bytes: int, *counts: int, num_ids: int = 0) -> Completion:
    """A completion with two rows of routed experts for three layers."""
    experts = RoutedExperts(b"\0" * num_bytes, (2, 3, 2), "uint16", 0)
    mask = SamplingMask(ids(*range(num_ids)), ids(*counts))
    return Completion(ids(1), "stop", None, [], routed_experts=experts, sampling_mask=mask)


GOOD = [
    Completed(1, 1, [one(), one(ids(1, 2))], 0),
    Completed(1, 1, [one(ids(1, 2), Logprobs(floats(2)))] * 2, 0),
    Completed(1, 1, [one(ids(1, 2), Logprobs(floats(2), ids(1, 2)))] * 2, 0),
    Completed(1, 1, [one(ids(1, 2), Logprobs(floats(3), ids(1, 2, 3), ids(2, 1)))] * 2, 0),
    Completed(1, 1, [one(ids(1, 2), Logprobs(floats(2), ranks=ids(1, 9)))] * 2, 0),
    Completed(1, 1, [one(ids(1, 2), Logprobs(floats(2), raw=floats(2)))] * 2, 0),
    Completed(1, 1, [one()] * 2, 0, prompt_logprobs=Logprobs(floats(4), ids(1, 2, 3, 4))),
    Chunk(1, 1, [(1, one(ids(1)))]),
    Chunk(1, 1, []),
    Completed(1, 1, [replayed(24, 2, 0, 1, num_ids=3)] * 2, 0),
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
    Completed(1, 1, [one(), one(ids(1, 2), Logprobs(floats(2), ranks=ids(1)))], 0),
    Completed(1, 1, [one(), one(ids(1, 2), Logprobs(floats(2), raw=floats(1)))], 0),
    Completed(1, 1, [one()] * 2, 0, prompt_token_ids=b"\0"),
    Completed(1, 1, [one()] * 2, 0, prompt_logprobs=Logprobs(b"\0")),
    Chunk(1, 1, [(2, one())]),
    Chunk(1, 1, [(-1, one())]),
    Chunk(1, 1, [(0, one(b"\0"))]),
    Chunk(1, 1, [(0, replayed(12))]),
    Chunk(1, 1, [(0, replayed(24, 2, num_ids=1))]),
    Chunk(1, 1, [(0, replayed(24, 2, -1, num_ids=1))]),
    Chunk(1, 1, [(0, Completion(b"", "", None, [], sampling_mask=SamplingMask(b"", b"\0")))]),
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
    assert len(second.take_results()) == 1
    for request in pool.take_failed():
        pool.withdraw(request)
    assert pool.num_open_jobs == 0


def test_truncated_digests_do_not_fail_the_result():
    pool = pool_of("a")
    request = request_of(5)
    pool.submit(request)
    assert assigned(pool) == {"a": [1]}
    pool.on_results("a", [Completed(1, 1, [one()], 0, b"\0" * 11)])
    assert len(request.take_results()) == 1
    assert pool.num_open_jobs == 0


def test_a_result_without_completions_has_the_place_of_each_image():
    (job,) = request_of(0, n=0).jobs
    job = msgspec.structs.replace(job, images=[Image(b"", b"")])
    assert defect_of(job, Completed(1, 1, [], 0, image_ranges=[(2, 3)])) == ""
    assert "1 images, got 0" in defect_of(job, Completed(1, 1, [], 0))


def test_all_arrays_of_a_result_count_against_the_budget():
    packed = Logprobs(floats(3), ids(1, 2, 3), ids(2, 1), ids(1, 9), floats(2))
    completion = msgspec.structs.replace(replayed(12, 2, 1, num_ids=3), logprobs=packed)
    # Log-probabilities; the completion's id; routed experts; a mask's ids and their counts.
    assert completion.num_bytes == 4 * (3 + 3 + 2 + 2 + 2) + 4 + 12 + 4 * (3 + 2)
    scores = Logprobs(floats(4), ids(1, 2, 3, 4), ranks=ids(1, 2, 3, 4))
    result = Completed(1, 1, [completion], 0, prompt_logprobs=scores)
    assert result.num_bytes == completion.num_bytes + 4 * 12
