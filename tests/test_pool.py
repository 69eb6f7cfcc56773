"""The pool's decisions, without sockets or clocks."""

import msgspec

from app.pool import Pool
from app.request import Request
from titopool.errors import GenerationFailed, NoReadyWorker
from titopool.messages import Completed, Failed, Heartbeat, Job, Load, WorkerCounters, WorkerFacts
from titopool.pool_state import PoolWeights

FACTS = WorkerFacts(
    model="m", tokenizer="m", tokenizer_revision=None, trust_remote_code=False, vllm_version="0",
    sampling_fields=[], max_model_len=100, vocab_size=10, max_num_seqs=4, max_logprobs=20,
    world_size=1,
)  # fmt: skip


def beat(name: str, *, incarnation: str = "", phase: str = "ready", others: int = 0) -> Heartbeat:
    return Heartbeat(
        worker_id=name, incarnation=incarnation or name, phase=phase, phase_s=1.0, weights=PoolWeights(),
        facts=FACTS if phase == "ready" else None, loaded_at=0.0, other_sequences=others, other_tokens=others * 10,
        num_sequences=others, counters=WorkerCounters(), num_front_ends=1 + bool(others),
    )  # fmt: skip


def pool_of(*names: str) -> Pool:
    pool = Pool(no_worker_timeout_s=10)
    for name in names:
        pool.add_worker(name, now=0)
        pool.on_heartbeat(name, beat(name), now=0)
    return pool


def request_of(*costs: int, first_id: int = 1, n: int = 1) -> Request:
    return Request(
        [
            Job(job_id=first_id + index, attempt=1, prompt_token_ids=b"", num_sequences=n,
                num_tokens=cost, sampling=b"")
            for index, cost in enumerate(costs)
        ]
    )  # fmt: skip


def assigned(pool: Pool) -> dict[str, list[int]]:
    return {one.worker.endpoint: [job.job_id for job in one.jobs] for one in pool.assign()}


def completed(job_id: int, attempt: int = 1) -> Completed:
    return Completed(job_id, attempt, [], 0)


def test_jobs_go_to_the_worker_with_the_fewest_outstanding_tokens():
    pool = pool_of("a", "b")
    pool.submit(request_of(50, 10, 10, 10))
    assert assigned(pool) == {"a": [1], "b": [2, 3, 4]}


def test_a_report_of_load_counts_before_the_next_heartbeat():
    pool = pool_of("a", "b")
    pool.on_heartbeat("a", beat("a", others=3), now=1)
    pool.on_load("a", Load(0, 0))
    pool.on_load("b", Load(3, 30))
    pool.submit(request_of(10, 10))
    assert assigned(pool) == {"a": [1, 2]}


def test_front_ends_share_a_burst_evenly_though_one_worker_reports_late():
    num_front_ends, num_jobs = 4, 290
    pools = [pool_of("prompt", "late") for _ in range(num_front_ends)]
    for pool in pools:
        for name in pool.workers:
            facts = msgspec.structs.replace(FACTS, max_num_seqs=num_jobs)
            told = msgspec.structs.replace(beat(name), facts=facts, num_front_ends=num_front_ends)
            pool.on_heartbeat(name, told, now=1)
    for number in range(num_jobs):
        pools[number % num_front_ends].submit(request_of(10, first_id=number))
        pools[number % num_front_ends].assign()
        for name, interval in (("prompt", 20), ("late", 300)):
            if number % interval == 0:
                report(pools, name)
    counts = [sum(pool.workers[name].num_sequences for pool in pools) for name in pools[0].workers]
    assert max(counts) < 1.1 * num_jobs / 2, counts


def report(pools: list[Pool], name: str) -> None:
    """What the worker tells each front end of the others."""
    for pool in pools:
        others = [other.workers[name] for other in pools if other is not pool]
        pool.on_load(
            name, Load(sum(o.num_sequences for o in others), sum(o.num_tokens for o in others))
        )


def test_load_by_other_front_ends_counts():
    pool = pool_of("a", "b")
    pool.on_heartbeat("a", beat("a", others=3), now=1)
    pool.submit(request_of(10, 10))
    assert assigned(pool) == {"b": [1, 2]}


def test_jobs_beyond_the_window_wait_in_order():
    pool = pool_of("a")
    request = request_of(*[10] * 8)
    pool.submit(request)
    assert assigned(pool) == {"a": [1, 2, 3, 4, 5]}
    assert assigned(pool) == {}
    pool.on_results("a", [completed(3)])
    assert assigned(pool) == {"a": [6]}


def test_a_backlog_of_another_front_end_does_not_shut_this_one_out():
    pool = pool_of("a")
    pool.on_heartbeat("a", beat("a", others=100), now=1)
    pool.submit(request_of(*[10] * 8))
    # Half of the window of five.
    assert assigned(pool) == {"a": [1, 2]}


def test_cancelled_jobs_do_not_wait_on():
    pool = Pool(no_worker_timeout_s=10)
    request, other = request_of(1, 1), request_of(1, first_id=7)
    pool.submit(request)
    pool.submit(other)
    assert pool.drop_done(request) == []
    assert pool.num_open_jobs == 1
    assert [one.request for one in pool.waiting] == [other]


def test_a_job_wider_than_the_window_runs_alone():
    pool = pool_of("a")
    pool.submit(request_of(10, n=50))
    assert assigned(pool) == {"a": [1]}


def test_results_end_the_request_once_and_in_order():
    pool = pool_of("a")
    request = request_of(1, 1)
    pool.submit(request)
    pool.assign()
    pool.on_results("a", [completed(2), completed(2), completed(9)])
    assert not request.is_done
    pool.on_results("a", [completed(1)])
    assert [one.job_id for one in request.completed()] == [1, 2]
    assert pool.num_open_jobs == 0


def test_a_lost_workers_jobs_go_elsewhere_and_its_late_answers_are_dropped():
    pool = pool_of("a", "b")
    request = request_of(1)
    pool.submit(request)
    assert assigned(pool) == {"a": [1]}
    pool.lose_worker("a", "killed")
    assert assigned(pool) == {"b": [1]}
    pool.on_results("b", [completed(1, attempt=1)])
    assert not request.is_done
    pool.on_results("b", [completed(1, attempt=2)])
    assert request.is_done


def test_a_job_that_two_workers_died_on_fails_by_itself():
    pool = pool_of("a", "b", "c")
    bad, good = request_of(1), request_of(1, first_id=7)
    pool.submit(bad)
    assert assigned(pool) == {"a": [1]}
    pool.lose_worker("a", "killed")
    assert assigned(pool) == {"b": [1]}
    pool.submit(good)
    pool.assign()
    pool.lose_worker("b", "killed")
    assert isinstance(bad.error, GenerationFailed)
    assert not good.is_done
    assert pool.take_failed() == [bad]


def test_a_restarted_worker_has_lost_what_it_had():
    pool = pool_of("a")
    request = request_of(1)
    pool.submit(request)
    pool.assign()
    pool.on_heartbeat("a", beat("a", incarnation="second", phase="loading"), now=5)
    assert assigned(pool) == {}
    pool.on_heartbeat("a", beat("a", incarnation="second"), now=6)
    assert assigned(pool) == {"a": [1]}


def test_a_refused_job_fails_its_request_and_frees_the_others():
    pool = pool_of("a")
    request = request_of(1, 1, 1)
    pool.submit(request)
    pool.assign()
    pool.on_results("a", [Failed(2, 1, "invalid_request", "no")])
    assert request.error is not None
    assert "prompts[1]: no" in request.error.message
    aborts = pool.drop_done(request)
    assert [(worker.endpoint, keys) for worker, keys in aborts] == [("a", [(1, 1), (3, 1)])]
    assert pool.num_open_jobs == 0


def test_waiting_jobs_fail_when_no_worker_comes():
    pool = Pool(no_worker_timeout_s=10)
    request = request_of(1)
    pool.submit(request)
    pool.fail_if_abandoned(now=0)
    pool.fail_if_abandoned(now=9)
    assert not request.is_done
    pool.fail_if_abandoned(now=11)
    assert isinstance(request.error, NoReadyWorker)


def test_only_silence_makes_a_worker_dead():
    pool = pool_of("a")
    assert pool.silent_workers(now=9, timeout_s=10) == []
    assert [worker.endpoint for worker in pool.silent_workers(now=11, timeout_s=10)] == ["a"]
