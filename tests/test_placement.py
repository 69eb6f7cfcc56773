"""Which job goes where: prefixes and loads, in one front end."""

import random

import msgspec
import numpy as np
import pytest

from app.pool.pending import Request
from app.pool.placement import MAX_PASSED_OVER, ROUTING_POLICIES
from app.pool.prefix_index import PrefixIndex, as_integers
from app.pool.state import Pool
from tests.test_pool import FACTS, assigned, beat
from titopool.settings import config
from titopool.wire.messages import Completed, Completion, Heartbeat, Image, ImageFacts, Job
from titopool.wire.pool_state import PoolWeights
from titopool.wire.prefixes import BLOCK_TOKENS, completion_hashes, prompt_hashes

NUM_PLACES = 20


def ids(seed: int, num_blocks: float) -> bytes:
    return random.Random(seed).randbytes(int(4 * BLOCK_TOKENS * num_blocks))


def job_of(job_id: int, prompt: bytes, *, cost: int = 100) -> Job:
    return Job(job_id, 1, prompt, 1, cost, b"", None, prompt_hashes(prompt, None))


def ready_beat(name: str, **changes) -> Heartbeat:
    facts = msgspec.structs.replace(FACTS, num_cache_tokens=100_000, max_num_seqs=NUM_PLACES)
    return msgspec.structs.replace(beat(name), facts=facts, **changes)


def pool_of(*names: str, policy: str = "prefix") -> Pool:
    pool = Pool(no_worker_timeout_s=10, policy=ROUTING_POLICIES[policy]())
    for name in names:
        pool.add_worker(name, now=0)
        pool.on_heartbeat(name, ready_beat(name), now=0)
    return pool


def place(pool: Pool, *jobs: Job) -> dict[str, list[int]]:
    pool.submit(Request(list(jobs)))
    return assigned(pool)


def end(pool: Pool, endpoint: str, *job_ids: int, prefix: bytes = b"") -> None:
    nothing = [Completion(b"", "stop", None, [])]
    pool.on_results(endpoint, [Completed(one, 1, nothing, 0, prefix) for one in job_ids])


# ---- digests -----------------------------------------------------------------------------


def test_digests_agree_exactly_as_far_as_the_prompts_do():
    one, other = ids(1, 4.5), bytearray(ids(1, 4.5))
    other[2 * 4 * BLOCK_TOKENS + 7] ^= 1
    first, second = (as_integers(prompt_hashes(bytes(ids_), None)) for ids_ in (one, other))
    assert len(first) == len(second) == 4
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, False]
    assert not set(first) & set(as_integers(prompt_hashes(one, "salt")))


def test_digests_are_the_same_in_every_process():
    assert prompt_hashes(bytes(4 * BLOCK_TOKENS), None).hex() == "094c1996c9020fd7"


@pytest.mark.parametrize("num_blocks", [0.5, 1, 2.25])
def test_a_completions_digests_are_those_of_the_next_turns_prompt(num_blocks):
    prompt, completion = ids(1, num_blocks), ids(2, 1.75)
    job = Job(1, 1, prompt, 1, 1, b"", "salt", prompt_hashes(prompt, "salt"))
    whole = prompt_hashes(prompt + completion, "salt")
    assert job.prefix + completion_hashes(job, completion) == whole


# ---- the index ---------------------------------------------------------------------------


IMAGES = ImageFacts(max_images=4, placeholder_ids=[9], has_placeholders=True)


def with_images(*blocks: int | None) -> bytes:
    """Blocks of one id each, and for each None 64 times the placeholder."""
    rows = [[9 if block is None else block] * BLOCK_TOKENS for block in blocks]
    return np.array(rows, dtype=np.int32).tobytes()


def test_an_image_counts_from_where_it_stands():
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


def test_the_next_turn_after_an_image_begins_with_what_the_worker_tells():
    prompt, completion = with_images(1, None)[:-8], with_images(7, 8)
    images = [Image(b"", b"c")]
    chain = prompt_hashes(prompt, None, [b"c"], IMAGES)
    job = Job(1, 1, prompt, 1, 1, b"", None, chain, images)
    told = chain + completion_hashes(job, completion, IMAGES)
    later = prompt_hashes(prompt + completion + with_images(5), None, [b"c"], IMAGES)
    assert later.startswith(told)
    # The image begins in a block that the completion makes full.
    other = msgspec.structs.replace(job, images=[Image(b"", b"d")])
    assert completion_hashes(other, completion, IMAGES)[:8] != told[len(chain) :][:8]


def test_the_index_keeps_the_beginnings_of_what_was_used_last():
    index = PrefixIndex()
    index.resize(4 * BLOCK_TOKENS)
    index.record([1, 2, 3])
    index.record([7, 8])
    assert index.num_found([1, 2, 3]) == 2
    assert index.num_found([7, 8, 9]) == 2
    assert index.num_found([2, 3]) == 1
    assert index.num_found([]) == 0


def test_an_engine_that_caches_nothing_has_an_empty_index():
    index = PrefixIndex()
    index.record([1, 2])
    assert index.num_found([1, 2]) == 0


# ---- choices -----------------------------------------------------------------------------


def test_the_settings_names_are_the_policies():
    assert tuple(ROUTING_POLICIES) == config.PLACEMENTS


def test_a_prompt_goes_where_its_beginning_is():
    pool = pool_of("a", "b")
    shared = ids(1, 4)
    assert place(pool, job_of(1, ids(2, 4)), job_of(2, shared)) == {"a": [1], "b": [2]}
    end(pool, "a", 1)
    end(pool, "b", 2)
    assert place(pool, job_of(3, shared + ids(3, 1))) == {"b": [3]}


def test_the_next_turn_goes_where_the_completion_was_made():
    pool = pool_of("a", "b")
    prompt, completion = ids(1, 0.5), ids(2, 3)
    place(pool, job_of(1, ids(3, 1)))
    job = job_of(2, prompt)
    assert place(pool, job) == {"b": [2]}
    end(pool, "a", 1)
    end(pool, "b", 2, prefix=completion_hashes(job, completion))
    assert place(pool, job_of(3, prompt + completion + ids(4, 1))) == {"b": [3]}


def test_an_idle_worker_gets_a_prompt_that_a_busy_one_holds():
    pool = pool_of("a", "b", "c", "d")
    shared = ids(1, 4)
    for job_id in range(1, 5):
        place(pool, job_of(job_id, shared))
    assert [worker.num_sequences for worker in pool.workers.values()] == [1, 1, 1, 1]


@pytest.mark.parametrize("num_blocks, expected", [(40, "a"), (2, "b")])
def test_a_hit_outweighs_imbalance_by_the_share_of_the_prompt_that_it_is(num_blocks, expected):
    pool = pool_of("a", "b")
    prompt = ids(1, 40)
    place(pool, job_of(1, prompt))
    for name, load in (("a", 1100), ("b", 1000)):
        pool.on_heartbeat(name, ready_beat(name, other_tokens=load), now=1)
    end(pool, "a", 1)
    cut = 4 * BLOCK_TOKENS * num_blocks
    assert place(pool, job_of(2, prompt[:cut] + ids(2, 40 - num_blocks))) == {expected: [2]}


def test_a_prefix_that_all_share_spreads_over_all_workers():
    pool = pool_of("a", "b", "c", "d")
    shared = ids(0, 16)
    for job_id in range(1, 61):
        place(pool, job_of(job_id, shared + ids(job_id, 2)))
    assert [worker.num_sequences for worker in pool.workers.values()] == [15, 15, 15, 15]


@pytest.mark.parametrize("with_prefixes", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_without_reuse_the_choices_are_those_of_least_loaded(seed, with_prefixes):
    chance = random.Random(seed)
    pools = [pool_of("a", "b", "c", policy=name) for name in ("prefix", "least_loaded")]
    for job_id in range(1, 200):
        job = job_of(job_id, ids(job_id, 3), cost=chance.randint(1, 500))
        if not with_prefixes:
            job = msgspec.structs.replace(job, prefix=None)
        first, second = (place(pool, job) for pool in pools)
        assert first == second
        name = chance.choice("abc")
        if chance.random() < 0.8 and pools[0].workers[name].jobs:
            ended = chance.choice(list(pools[0].workers[name].jobs))
            for pool in pools:
                end(pool, name, ended)
            assert assigned(pools[0]) == assigned(pools[1])


def full_pool(mine: bytes, others: bytes) -> Pool:
    """All places of worker a are taken by jobs of prompt `mine` (1, 2, …), all of b by jobs of
    `others` (101, 102, …)."""
    pool = pool_of("a", "b")
    for name, prompt in (("a", mine), ("b", others)):
        pool.workers[name].prefixes.record(as_integers(prompt_hashes(prompt, None)))
    for job_id in range(1, NUM_PLACES + 1):
        place(pool, job_of(job_id, mine), job_of(100 + job_id, others))
    return pool


def test_a_free_place_goes_to_a_job_that_belongs_there_first():
    mine, others = ids(1, 4), ids(2, 4)
    pool = full_pool(mine, others)
    assert place(pool, job_of(201, mine), job_of(202, ids(3, 4)), job_of(203, others)) == {}
    end(pool, "b", 101)
    assert assigned(pool) == {"b": [203]}
    # Then what belongs nowhere, then what belongs elsewhere.
    end(pool, "b", 102, 103)
    assert assigned(pool) == {"b": [202, 201]}


def test_a_job_that_belongs_nowhere_is_not_passed_over():
    mine, others = ids(1, 4), ids(2, 4)
    pool = full_pool(mine, others)
    assert place(pool, job_of(201, ids(3, 4)), job_of(202, others)) == {}
    end(pool, "b", 101)
    assert assigned(pool) == {"b": [201]}


def test_the_first_job_is_passed_over_only_so_often():
    mine, others = ids(1, 4), ids(2, 4)
    pool = full_pool(mine, others)
    assert place(pool, job_of(1000, mine)) == {}
    for job_id in range(2000, 2000 + MAX_PASSED_OVER):
        assert place(pool, job_of(job_id, others)) == {}
        end(pool, "b", next(iter(pool.workers["b"].jobs)))
        assert assigned(pool) == {"b": [job_id]}
    assert place(pool, job_of(3000, others)) == {}
    end(pool, "b", next(iter(pool.workers["b"].jobs)))
    assert assigned(pool) == {"b": [1000]}


def test_the_last_waiting_jobs_are_kept_for_places_that_get_free_first():
    pool = pool_of("a", "b")
    place(pool, *(job_of(job_id, ids(job_id, 1)) for job_id in range(1, 3 * NUM_PLACES)))
    assert [worker.num_sequences for worker in pool.workers.values()] == [NUM_PLACES] * 2


def test_round_robin_takes_each_in_turn():
    pool = pool_of("a", "b", "c", policy="round_robin")
    for job_id in range(1, 10):
        place(pool, job_of(job_id, ids(1, 4), cost=job_id**2))
    assert [worker.num_sequences for worker in pool.workers.values()] == [3, 3, 3]


# ---- forgetting --------------------------------------------------------------------------


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
                "b",
                ready_beat(
                    "b",
                    weights=PoolWeights(1, "u", 1, False),
                    prefixes=prompt_hashes(ids(1, 4), None),
                ),
                now=1,
            ),
            id="new-weights",
        ),
    ],
)
def test_an_emptied_cache_is_forgotten(event):
    pool = pool_of("a", "b")
    digests = prompt_hashes(ids(1, 4), None)
    pool.on_heartbeat("b", ready_beat("b", prefixes=digests), now=1)
    assert pool.workers["b"].prefixes.num_found(as_integers(digests)) == 4
    event(pool)
    assert pool.workers["b"].prefixes.num_found(as_integers(digests)) == 0
