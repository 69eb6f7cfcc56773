"""Routing policies in one front end: prefixes and loads decide which worker gets a job."""

import random

import msgspec
import numpy as np
import pytest

from app.pool.placement import MAX_PASSED_OVER, ROUTING_POLICIES, session_worker
from app.pool.prefix_index import PrefixIndex, as_integers
from app.pool.request import Request
from app.pool.state import Pool
from tests.kit.workers.pools import FACTS, assigned, beat
from titopool.settings import config
from titopool.wire.messages import (
    Completed,
    Completion,
    Heartbeat,
    Image,
    ImageFacts,
    Job,
    JobProgress,
    Load,
)
from titopool.wire.pool_state import PoolWeights
from titopool.wire.prefixes import BLOCK_TOKENS, completion_hashes, prompt_hashes

NUM_SLOTS = 20


def ids(seed: int, num_blocks: float) -> bytes:
    return random.Random(seed).randbytes(int(4 * BLOCK_TOKENS * num_blocks))


def job_of(job_id: int, prompt: bytes, *, cost: int = 100) -> Job:
    return Job(job_id, 1, prompt, 1, cost, b"", None, prompt_hashes(prompt, None))


def ready_beat(name: str, **changes) -> Heartbeat:
    facts = msgspec.structs.replace(FACTS, num_cache_tokens=100_000, max_num_seqs=NUM_SLOTS)
    return msgspec.structs.replace(beat(name), facts=facts, **changes)


def pool_of(*names: str, policy: str = "prefix") -> Pool:
    pool = Pool(no_worker_timeout_s=10, policy=ROUTING_POLICIES[policy]())
    for name in names:
        pool.add_worker(name, now=0)
        pool.on_heartbeat(name, ready_beat(name), now=0)
    return pool


def submit(pool: Pool, *jobs: Job, session: str = "") -> dict[str, list[int]]:
    pool.submit(Request(list(jobs), session=session))
    return assigned(pool)


def complete(pool: Pool, endpoint: str, *job_ids: int, prefix: bytes = b"") -> None:
    nothing = [Completion(b"", "stop", None, [])]
    pool.on_results(endpoint, [Completed(one, 1, nothing, 0, prefix) for one in job_ids])


# ---- digests -----------------------------------------------------------------------------


def test_digests_agree_up_to_the_first_different_block():
    one, other = ids(1, 4.5), bytearray(ids(1, 4.5))
    other[2 * 4 * BLOCK_TOKENS + 7] ^= 1
    first, second = (as_integers(prompt_hashes(bytes(ids_), None)) for ids_ in (one, other))
    assert len(first) == len(second) == 4
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, False]
    assert not set(first) & set(as_integers(prompt_hashes(one, "salt")))


def test_digests_are_the_same_in_every_process():
    assert prompt_hashes(bytes(4 * BLOCK_TOKENS), None).hex() == "094c1996c9020fd7"


@pytest.mark.parametrize("num_blocks", [0.5, 1, 2.25])
def test_digests_of_a_completion_match_the_next_turns_prompt(num_blocks):
    prompt, completion = ids(1, num_blocks), ids(2, 1.75)
    job = Job(1, 1, prompt, 1, 1, b"", "salt", prompt_hashes(prompt, "salt"))
    expected = prompt_hashes(prompt + completion, "salt")
    assert job.prefix + completion_hashes(job, completion) == expected


# ---- the index ---------------------------------------------------------------------------


IMAGES = ImageFacts(max_images=4, placeholder_ids=[9], has_placeholders=True)


def with_images(*blocks: int | None) -> bytes:
    """A block of 64 equal ids for each number, a block of placeholders for each None."""
    rows = [[9 if block is None else block] * BLOCK_TOKENS for block in blocks]
    return np.array(rows, dtype=np.int32).tobytes()


def test_an_image_changes_the_digests_from_its_position_on():
    prompt = with_images(1, None, 2)
    cat, dog = (
        as_integers(prompt_hashes(prompt, None, [digest], IMAGES)) for digest in (b"c", b"d")
    )
    assert cat[0] == dog[0]
    assert not set(cat[1:]) & set(dog[1:])


def test_a_conversation_keeps_its_digests_when_an_image_is_added():
    first = prompt_hashes(with_images(1, None, 2), None, [b"c"], IMAGES)
    second = prompt_hashes(with_images(1, None, 2, 3, None), None, [b"c", b"d"], IMAGES)
    assert second.startswith(first)
    # Adjacent images are one run of placeholders.
    both, other = (
        prompt_hashes(with_images(None, None), None, [b"c", last], IMAGES) for last in (b"d", b"e")
    )
    assert both[:8] != other[:8]


def test_digests_reported_after_an_image_match_the_next_turns_prompt():
    prompt, completion = with_images(1, None)[:-8], with_images(7, 8)
    images = [Image(b"", b"c")]
    chain = prompt_hashes(prompt, None, [b"c"], IMAGES)
    job = Job(1, 1, prompt, 1, 1, b"", None, chain, images)
    reported = chain + completion_hashes(job, completion, IMAGES)
    later = prompt_hashes(prompt + completion + with_images(5), None, [b"c"], IMAGES)
    assert later.startswith(reported)
    # The image begins in a block that the completion fills.
    other = msgspec.structs.replace(job, images=[Image(b"", b"d")])
    assert completion_hashes(other, completion, IMAGES)[:8] != reported[len(chain) :][:8]


def test_the_index_keeps_the_most_recently_used_prefixes():
    index = PrefixIndex()
    index.resize(4 * BLOCK_TOKENS)
    index.record([1, 2, 3])
    index.record([7, 8])
    assert index.num_found([1, 2, 3]) == 2
    assert index.num_found([7, 8, 9]) == 2
    assert index.num_found([2, 3]) == 1
    assert index.num_found([]) == 0


def test_the_index_of_an_engine_without_a_cache_stays_empty():
    index = PrefixIndex()
    index.record([1, 2])
    assert index.num_found([1, 2]) == 0


# ---- choices -----------------------------------------------------------------------------


def test_the_setting_lists_the_routing_policies():
    assert tuple(ROUTING_POLICIES) == config.PLACEMENTS


def test_a_prompt_goes_to_the_worker_that_has_its_prefix():
    pool = pool_of("a", "b")
    shared = ids(1, 4)
    assert submit(pool, job_of(1, ids(2, 4)), job_of(2, shared)) == {"a": [1], "b": [2]}
    complete(pool, "a", 1)
    complete(pool, "b", 2)
    assert submit(pool, job_of(3, shared + ids(3, 1))) == {"b": [3]}


def test_the_next_turn_goes_to_the_worker_of_the_completion():
    pool = pool_of("a", "b")
    prompt, completion = ids(1, 0.5), ids(2, 3)
    submit(pool, job_of(1, ids(3, 1)))
    job = job_of(2, prompt)
    assert submit(pool, job) == {"b": [2]}
    complete(pool, "a", 1)
    complete(pool, "b", 2, prefix=completion_hashes(job, completion))
    assert submit(pool, job_of(3, prompt + completion + ids(4, 1))) == {"b": [3]}


def test_an_idle_worker_gets_a_prompt_that_a_busy_one_has_cached():
    pool = pool_of("a", "b", "c", "d")
    shared = ids(1, 4)
    for job_id in range(1, 5):
        submit(pool, job_of(job_id, shared))
    assert [worker.num_sequences for worker in pool.workers.values()] == [1, 1, 1, 1]


@pytest.mark.parametrize("num_blocks, expected", [(40, "a"), (2, "b")])
def test_a_long_hit_outweighs_an_imbalance_that_a_short_hit_does_not(num_blocks, expected):
    pool = pool_of("a", "b")
    prompt = ids(1, 40)
    submit(pool, job_of(1, prompt))
    for name, load in (("a", 1100), ("b", 1000)):
        pool.on_heartbeat(name, ready_beat(name, other_tokens=load), now=1)
    complete(pool, "a", 1)
    cut = 4 * BLOCK_TOKENS * num_blocks
    assert submit(pool, job_of(2, prompt[:cut] + ids(2, 40 - num_blocks))) == {expected: [2]}


def test_a_prefix_shared_by_all_jobs_spreads_over_all_workers():
    pool = pool_of("a", "b", "c", "d")
    shared = ids(0, 16)
    for job_id in range(1, 61):
        submit(pool, job_of(job_id, shared + ids(job_id, 2)))
    assert [worker.num_sequences for worker in pool.workers.values()] == [15, 15, 15, 15]


@pytest.mark.parametrize("with_prefixes", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_without_cache_hits_the_choices_are_those_of_least_loaded(seed, with_prefixes):
    rng = random.Random(seed)
    pools = [pool_of("a", "b", "c", policy=name) for name in ("prefix", "least_loaded")]
    for job_id in range(1, 200):
        job = job_of(job_id, ids(job_id, 3), cost=rng.randint(1, 500))
        if not with_prefixes:
            job = msgspec.structs.replace(job, prefix=None)
        first, second = (submit(pool, job) for pool in pools)
        assert first == second
        name = rng.choice("abc")
        if rng.random() < 0.8 and pools[0].workers[name].jobs:
            ended = rng.choice(list(pools[0].workers[name].jobs))
            for pool in pools:
                complete(pool, name, ended)
            assert assigned(pools[0]) == assigned(pools[1])


def full_pool(prompt_a: bytes, prompt_b: bytes) -> Pool:
    """All slots of worker a run jobs of `prompt_a` (ids 1, 2, …), all slots of b jobs of
    `prompt_b` (ids 101, 102, …)."""
    pool = pool_of("a", "b")
    for name, prompt in (("a", prompt_a), ("b", prompt_b)):
        pool.workers[name].prefixes.record(as_integers(prompt_hashes(prompt, None)))
    for job_id in range(1, NUM_SLOTS + 1):
        submit(pool, job_of(job_id, prompt_a))
        submit(pool, job_of(100 + job_id, prompt_b))
    return pool


def test_a_free_slot_goes_first_to_a_job_with_its_prefix_there():
    prompt_a, prompt_b = ids(1, 4), ids(2, 4)
    pool = full_pool(prompt_a, prompt_b)
    assert submit(pool, job_of(201, prompt_a), job_of(202, ids(3, 4)), job_of(203, prompt_b)) == {}
    complete(pool, "b", 101)
    assert assigned(pool) == {"b": [203]}
    # Next come jobs without a cached prefix, then jobs whose prefix another worker has.
    complete(pool, "b", 102, 103, 104)
    assert assigned(pool) == {"b": [202, 201]}


@pytest.mark.parametrize("num_workers", [2, 4])
def test_a_wide_request_is_shared_evenly_while_reports_of_load_come_one_by_one(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
):
    # However busy the machine is.
    monkeypatch.setattr("app.pool.records.REPORT_WITHIN_S", 60.0)
    names = [f"w{index}" for index in range(num_workers)]
    facts = msgspec.structs.replace(FACTS, max_num_seqs=256)
    pool = Pool(no_worker_timeout_s=10)
    for name in names:
        pool.add_worker(name, now=0)
        one = msgspec.structs.replace(beat(name), facts=facts, num_front_ends=4)
        pool.on_heartbeat(name, one, now=0)
    pool.submit(Request([job_of(index, ids(index, 2)) for index in range(128 * num_workers)]))
    assigned(pool)
    for _ in range(8):
        for name in names:
            # The other front ends have sent nothing.
            pool.on_load(name, Load(0, 0))
            assigned(pool)
    assert [len(worker.jobs) for worker in pool.workers.values()] == [128] * num_workers


def test_a_worker_that_does_not_report_keeps_no_jobs_from_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.pool.records.REPORT_WITHIN_S", 60.0)
    pool = Pool(no_worker_timeout_s=10)
    for name in "ab":
        pool.add_worker(name, now=0)
        pool.on_heartbeat(name, ready_beat(name, num_front_ends=4), now=0)
    pool.submit(Request([job_of(index, ids(index, 2)) for index in range(12)]))
    assigned(pool)
    pool.on_load("b", Load(0, 0))
    assert len(assigned(pool)["b"]) == 1
    pool.on_load("b", Load(0, 0))
    assert not assigned(pool)
    # A new request does not wait for the report.
    assert submit(pool, job_of(100, ids(100, 2))) == {"b": [100]}
    monkeypatch.setattr("app.pool.records.REPORT_WITHIN_S", 0.0)
    assert assigned(pool)["b"]


def test_a_job_without_a_cached_prefix_is_not_passed_over():
    prompt_a, prompt_b = ids(1, 4), ids(2, 4)
    pool = full_pool(prompt_a, prompt_b)
    assert submit(pool, job_of(201, ids(3, 4)), job_of(202, prompt_b)) == {}
    complete(pool, "b", 101)
    assert assigned(pool) == {"b": [201]}


def test_each_first_job_is_passed_over_a_limited_number_of_times():
    prompt_a, prompt_b, later = ids(1, 4), ids(2, 4), ids(3, 4)
    pool = full_pool(prompt_a, prompt_b)
    pool.workers["a"].prefixes.record(as_integers(prompt_hashes(later, None)))
    for first, prompt in ((1000, prompt_a), (3000, later)):
        assert submit(pool, job_of(first, prompt)) == {}
        for job_id in range(first + 1, first + 1 + MAX_PASSED_OVER):
            assert submit(pool, job_of(job_id, prompt_b)) == {}
            complete(pool, "b", next(iter(pool.workers["b"].jobs)))
            assert assigned(pool) == {"b": [job_id]}
        last = first + 1 + MAX_PASSED_OVER
        assert submit(pool, job_of(last, prompt_b)) == {}
        for expected in (first, last):
            complete(pool, "b", next(iter(pool.workers["b"].jobs)))
            assert assigned(pool) == {"b": [expected]}


def test_waiting_jobs_are_held_back_for_the_first_free_slots():
    pool = pool_of("a", "b")
    submit(pool, *(job_of(job_id, ids(job_id, 1)) for job_id in range(1, 3 * NUM_SLOTS)))
    # One slot of each worker is kept for new requests.
    assert [worker.num_sequences for worker in pool.workers.values()] == [NUM_SLOTS - 1] * 2


def test_round_robin_takes_the_workers_in_turn():
    pool = pool_of("a", "b", "c", policy="round_robin")
    for job_id in range(1, 10):
        submit(pool, job_of(job_id, ids(1, 4), cost=job_id**2))
    assert [worker.num_sequences for worker in pool.workers.values()] == [3, 3, 3]


def test_round_robin_counts_jobs_and_not_what_is_granted_to_them_later():
    pool = pool_of("a", "b", policy="round_robin")
    for job_id in range(1, 9):
        prompt = job_of(job_id, ids(1, 4), cost=30_000)
        ((endpoint, _),) = submit(pool, msgspec.structs.replace(prompt, num_sequences=30)).items()
        # One slot is kept for new requests.
        granted = NUM_SLOTS - 1
        progress = JobProgress(job_id, 1, has_token=False, num_started=granted, num_ended=granted)
        pool.on_results(endpoint, [progress])
        assert [list(one.more) for one in pool.assign()] == [[job_id]]
        progress = msgspec.structs.replace(progress, num_started=30, num_ended=30)
        pool.on_results(endpoint, [progress])
    assert [len(worker.jobs) for worker in pool.workers.values()] == [4, 4]


# ---- clearing the index ------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(lambda pool: pool.mark_worker_lost("b", "killed"), id="lost"),
        pytest.param(
            lambda pool: pool.on_heartbeat("b", ready_beat("b", incarnation="second"), now=1),
            id="restarted",
        ),
        pytest.param(
            lambda pool: pool.on_heartbeat(
                "b", ready_beat("b", weights=PoolWeights(1, "u", 1, False)), now=1
            ),
            id="new-weights",
        ),
    ],
)
def test_the_index_is_cleared_with_the_workers_cache(event):
    pool = pool_of("a", "b")
    digests = prompt_hashes(ids(1, 4), None)
    pool.on_load("b", Load(0, 0, prefixes=digests))
    assert pool.workers["b"].prefixes.num_found(as_integers(digests)) == 4
    event(pool)
    assert pool.workers["b"].prefixes.num_found(as_integers(digests)) == 0


# ---- sessions ----------------------------------------------------------------------------


def session_at(pool: Pool, endpoint: str) -> str:
    """A session that belongs to this worker."""
    ready = list(pool.workers.values())
    names = map(str, range(1000))
    return next(one for one in names if session_worker(one, ready).endpoint == endpoint)


@pytest.mark.parametrize("num_blocks", [0.5, 4])
def test_a_session_stays_at_its_worker_without_a_common_prefix(num_blocks):
    pool = pool_of("a", "b")
    for job_id, endpoint in enumerate("bab", 1):
        session = session_at(pool, endpoint)
        assert submit(pool, job_of(job_id, ids(job_id, num_blocks)), session=session) == {
            endpoint: [job_id]
        }
        complete(pool, endpoint, job_id)


@pytest.mark.parametrize("load_of_home, expected", [(1100, "b"), (2000, "a")])
def test_a_session_leaves_a_worker_whose_load_is_too_high(load_of_home, expected):
    pool = pool_of("a", "b")
    session = session_at(pool, "b")
    for name, load in (("a", 1000), ("b", load_of_home)):
        pool.on_heartbeat(name, ready_beat(name, other_tokens=load), now=1)
    assert submit(pool, job_of(3, ids(3, 4)), session=session) == {expected: [3]}
    for name in ("a", "b"):
        pool.on_heartbeat(name, ready_beat(name), now=2)
    complete(pool, expected, 3)
    # A prompt that goes on is cached there; another one goes to the session's worker.
    assert submit(pool, job_of(4, ids(3, 4) + ids(4, 1)), session=session) == {expected: [4]}
    complete(pool, expected, 4)
    assert submit(pool, job_of(5, ids(5, 4)), session=session) == {"b": [5]}


def test_a_longer_prefix_elsewhere_wins_over_the_session():
    pool = pool_of("a", "b")
    prompt = ids(5, 4)
    # Another front end has sent a turn of the session to "a".
    pool.on_load("a", Load(0, 0, prefixes=prompt_hashes(prompt, None)))
    assert submit(pool, job_of(3, prompt + ids(6, 1)), session=session_at(pool, "b")) == {"a": [3]}


def test_a_session_goes_elsewhere_while_its_worker_is_full_or_lost():
    pool = pool_of("a", "b")
    session = session_at(pool, "b")
    job_ids = range(10, 10 + NUM_SLOTS + 2)
    jobs = [job_of(job_id, ids(job_id, 1), cost=0) for job_id in job_ids]
    # One slot is kept for new requests.
    assert list(submit(pool, *jobs, session=session)["a"]) == list(job_ids[NUM_SLOTS - 1 :])
    pool = pool_of("a", "b")
    pool.mark_worker_lost("b", "it died")
    assert submit(pool, job_of(3, ids(3, 1)), session=session) == {"a": [3]}


def test_front_ends_agree_on_sessions_and_a_loss_moves_only_the_lost_workers():
    # Front ends that know the workers in another order.
    pools = [pool_of(*"abcd"), pool_of(*"dbca")]

    def placed(pool: Pool) -> list[str]:
        found = []
        for session in range(200):
            (endpoint,) = submit(pool, job_of(1, ids(session, 0.5)), session=str(session))
            complete(pool, endpoint, 1)
            found.append(endpoint)
        return found

    before, same = map(placed, pools)
    assert before == same
    assert min(map(before.count, "abcd")) > 30
    pools[0].mark_worker_lost("b", "it died")
    after = placed(pools[0])
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert len(moved) == before.count("b")
    assert set(moved) == set("acd")
    # A worker that is back has its sessions again.
    pools[0].on_heartbeat("b", ready_beat("b", incarnation="second"), now=1)
    assert placed(pools[0]) == before


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_other_policies_ignore_sessions(policy):
    pools = [pool_of("a", "b", policy=policy) for _ in range(2)]
    for job_id in range(1, 20):
        job = job_of(job_id, ids(job_id, 1), cost=job_id)
        assert submit(pools[0], job, session="s") == submit(pools[1], job)
