"""The pool's decisions, without sockets or clocks."""

import itertools
import time
from typing import Any

import msgspec
import pytest

from app.call.open_requests import OpenRequest
from app.pool.pool_view import MAX_LABELS
from app.pool.records import MAX_RENDERS
from app.pool.request import Request
from app.pool.result_checks import defect_of
from app.pool.state import Pool
from app.pool.suspects import RESTART_S
from tests.kit.workers.pools import FACTS, assigned, beat, completed, pool_of, request_of
from titopool.errors import (
    GenerationFailed,
    ModelChanged,
    ModelNotFound,
    NoReadyWorker,
    WeightsLost,
)
from titopool.settings.sampling import SamplingOptions, encode_options
from titopool.wire.messages import (
    Chunk,
    Completed,
    Completion,
    Failed,
    Heartbeat,
    Job,
    JobProgress,
    Load,
    WorkerFacts,
)
from titopool.wire.pool_state import AdapterRecord, PoolAdapters, PoolPause, PoolState, PoolWeights


def request_named(
    client_id: str,
    num_jobs: int,
    first_id: int,
    *,
    num_tokens: int = 9,
    is_streamed: bool = False,
    **options: Any,
) -> Request:
    """Jobs with `n` 2."""
    sampling = msgspec.Raw(encode_options(SamplingOptions(n=2, **options)))
    return Request(
        [
            Job(
                first_id + index, 1, b"", 2, num_tokens, sampling,
                is_streamed=is_streamed, client_id=client_id,
            )
            for index in range(num_jobs)
        ]
    )  # fmt: skip


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
            heartbeat = msgspec.structs.replace(
                beat(name), facts=facts, num_front_ends=num_front_ends
            )
            pool.on_heartbeat(name, heartbeat, now=1)
    for number in range(num_jobs):
        pools[number % num_front_ends].submit(request_of(10, first_id=number))
        pools[number % num_front_ends].assign()
        for name, interval in (("prompt", 20), ("late", 300)):
            if number % interval == 0:
                report(pools, name)
    counts = [sum(pool.workers[name].num_sequences for pool in pools) for name in pools[0].workers]
    assert max(counts) < 1.1 * num_jobs / 2, counts


def report(pools: list[Pool], name: str) -> None:
    """Reports to each pool the load that the other pools have at worker `name`."""
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


def test_jobs_beyond_the_slots_wait_in_order():
    pool = pool_of("a")
    request = request_of(*[10] * 8)
    pool.submit(request)
    assert assigned(pool) == {"a": [1, 2, 3, 4]}
    assert assigned(pool) == {}
    pool.on_results("a", [completed(3)])
    assert assigned(pool) == {"a": [5]}


def test_a_backlog_of_another_front_end_leaves_a_fair_share_to_new_requests():
    pool = pool_of("a")
    pool.on_heartbeat("a", beat("a", others=100), now=1)
    for first_id in range(1, 9):
        pool.submit(request_of(10, first_id=first_id))
    # Half of the four slots.
    assert assigned(pool) == {"a": [1, 2]}


def test_withdrawn_jobs_leave_the_queue():
    pool = Pool(no_worker_timeout_s=10)
    request, other = request_of(1, 1), request_of(1, first_id=7)
    pool.submit(request)
    pool.submit(other)
    assert pool.withdraw(request) == []
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
    assert [one.job_id for one in request.take_results()] == [1, 2]
    assert pool.num_open_jobs == 0


def test_a_lost_workers_jobs_are_requeued_and_its_late_results_dropped():
    pool = pool_of("a", "b")
    request = request_of(1)
    pool.submit(request)
    assert assigned(pool) == {"a": [1]}
    pool.mark_worker_lost("a", "killed")
    assert assigned(pool) == {"b": [1]}
    pool.on_results("b", [completed(1, attempt=1)])
    assert not request.is_done
    pool.on_results("b", [completed(1, attempt=2)])
    assert request.is_done


def test_a_job_that_killed_two_workers_fails_alone():
    pool = pool_of("a", "b", "c")
    bad, good = request_of(1), request_of(1, first_id=7)
    pool.submit(bad)
    assert assigned(pool) == {"a": [1]}
    pool.mark_worker_lost("a", "killed")
    assert assigned(pool) == {"b": [1]}
    pool.on_results("b", [JobProgress(1, 2, has_token=False)])
    pool.submit(good)
    pool.assign()
    pool.mark_worker_lost("b", "killed")
    assert isinstance(bad.error, GenerationFailed)
    assert not good.is_done
    assert pool.take_failed() == [bad]


def test_jobs_of_a_restarted_worker_are_requeued():
    pool = pool_of("a")
    request = request_of(1)
    pool.submit(request)
    pool.assign()
    pool.on_heartbeat("a", beat("a", incarnation="second", phase="loading"), now=5)
    assert assigned(pool) == {}
    pool.on_heartbeat("a", beat("a", incarnation="second"), now=6)
    assert assigned(pool) == {"a": [1]}


def test_a_refused_job_fails_its_request_and_aborts_its_other_jobs():
    pool = pool_of("a")
    request = request_of(1, 1, 1)
    pool.submit(request)
    pool.assign()
    pool.on_results("a", [Failed(2, 1, "invalid_request", "no")])
    assert request.error is not None
    assert "prompts[1]: no" in request.error.message
    aborts = pool.withdraw(request)
    assert [(worker.endpoint, keys) for worker, keys in aborts] == [("a", [(1, 1), (3, 1)])]
    assert pool.num_open_jobs == 0


def test_waiting_jobs_fail_when_no_worker_comes():
    pool = Pool(no_worker_timeout_s=10)
    request = request_of(1)
    pool.submit(request)
    pool.fail_waiting_without_worker(now=0)
    pool.fail_waiting_without_worker(now=9)
    assert not request.is_done
    pool.fail_waiting_without_worker(now=11)
    assert isinstance(request.error, NoReadyWorker)


def test_the_time_without_a_worker_is_that_of_the_last_outage():
    pool = pool_of("a")
    for lost_at in (100, 200):
        pool.mark_worker_lost("a", "killed")
        pool.fail_waiting_without_worker(now=lost_at)
        request = request_of(1)
        pool.submit(request)
        pool.fail_waiting_without_worker(now=lost_at + 9)
        assert not request.is_done
        pool.withdraw(request)
        pool.on_heartbeat("a", beat("a"), now=lost_at + 9.5)
        pool.fail_waiting_without_worker(now=lost_at + 9.5)


def test_a_worker_is_silent_after_the_heartbeat_timeout():
    pool = pool_of("a")
    assert pool.silent_workers(now=9, timeout_s=10) == []
    assert [worker.endpoint for worker in pool.silent_workers(now=11, timeout_s=10)] == ["a"]
    (worker,) = pool.workers.values()
    assert worker.silence(now=11) == "silent for 11 s"


def test_a_worker_whose_loop_stands_is_lost_as_a_silent_one():
    """Its heartbeats come from a thread; jobs and commands would wait for the loop."""
    pool = pool_of("a")
    standing = msgspec.structs.replace(beat("a"), loop_stood_s=8.0)
    pool.on_heartbeat("a", standing, now=9)
    assert pool.workers["a"].reason == "its event loop has stood for 8 s"
    assert pool.silent_workers(now=10, timeout_s=10) == []
    assert [worker.endpoint for worker in pool.silent_workers(now=11.5, timeout_s=10)] == ["a"]
    assert pool.workers["a"].silence(now=11.5) == "its event loop has stood for 10 s"
    pool.on_heartbeat("a", beat("a"), now=11.6)
    assert pool.workers["a"].reason == ""
    assert pool.silent_workers(now=20, timeout_s=10) == []


# ---- one model, one set of weights -------------------------------------------------------


OTHER_FACTS = msgspec.structs.replace(FACTS, model="other", vocab_size=99)
NEW = PoolWeights(3, "u", 8, False)


def loaded(name: str, ago_s: float, facts: WorkerFacts = FACTS, **changes: Any) -> Heartbeat:
    return msgspec.structs.replace(
        beat(name), facts=facts, loaded_s=ago_s, pool=PoolState(model=facts.model), **changes
    )


def phases(pool: Pool) -> dict[str, str]:
    return {name: worker.phase for name, worker in pool.workers.items()}


def with_weights(name: str, served: PoolWeights, pool: PoolWeights, **changes: Any) -> Heartbeat:
    known = PoolState(model="m", weights=pool)
    return msgspec.structs.replace(beat(name, **changes), weights=served, pool=known)


def test_labels_of_earlier_versions_are_kept():
    pool = pool_of("a")

    def serve(clock: int, version: int, label: str, label_clock: int = 0) -> None:
        weights = PoolWeights(
            clock, f"u{clock}", version, is_initial=False, label=label, label_clock=label_clock
        )
        pool.on_heartbeat("a", with_weights("a", weights, weights), now=clock)

    assert pool.view.label_of(0) == "0"
    serve(1, 1, "step-1")
    serve(2, 2, "")
    serve(3, 3, "step-3")
    assert [pool.view.label_of(one) for one in range(5)] == ["0", "step-1", "2", "step-3", "4"]
    # The same version with another label, and other weights with the number of earlier ones.
    serve(3, 3, "last", label_clock=1)
    serve(4, 1, "")
    assert [pool.view.label_of(one) for one in (1, 3)] == ["1", "last"]
    for number in range(5, 5 + MAX_LABELS):
        serve(number, number, f"step-{number}")
    assert [pool.view.label_of(one) for one in (3, 5)] == ["3", "step-5"]
    # Labels are those of one model.
    pool.on_heartbeat("a", loaded("a", 0.0, OTHER_FACTS), now=99)
    assert pool.view.label_of(5) == "5"


def test_the_engine_loaded_first_decides_the_model_in_any_order_of_heartbeats():
    beats = [loaded("a", 20.0, OTHER_FACTS), loaded("b", 30.0), loaded("c", 10.0, OTHER_FACTS)]
    for order in itertools.permutations(beats):
        pool = pool_of()
        for one in "abc":
            pool.add_worker(one, now=0)
        for one in order:
            pool.on_heartbeat(one.worker_id, one, now=0)
        assert pool.view.facts == FACTS
        assert phases(pool) == {"a": "mismatched", "b": "ready", "c": "mismatched"}
        assert "vocab_size" in pool.workers["a"].reason or "model" in pool.workers["a"].reason


def test_engines_loaded_at_the_same_time_have_one_order_however_heartbeats_travel():
    for late_s in (0.0, 0.4):
        pool = pool_of()
        for name in "ab":
            pool.add_worker(name, now=0)
        for now in (5.0, 6.0):
            pool.on_heartbeat("b", loaded("b", now - 1.0, OTHER_FACTS), now=now)
            pool.on_heartbeat("a", loaded("a", now - 1.0), now=now + late_s)
        assert pool.view.facts == FACTS


def test_heartbeats_of_a_worker_with_another_model_do_not_change_the_facts():
    pool = pool_of("a")
    pool.on_heartbeat("a", loaded("a", 100.0), now=1)
    pool.add_worker("b", now=1)
    for now in range(2, 6):
        pool.on_heartbeat("b", loaded("b", now - 1.0, OTHER_FACTS), now=now)
        assert pool.view.facts == FACTS
        pool.on_heartbeat("a", loaded("a", now + 99.0), now=now)
    pool.submit(request_of(*[1] * 8))
    assert set(assigned(pool)) == {"a"}


def test_a_pool_that_restarts_with_another_model_forgets_the_old_one():
    pool = pool_of("a")
    pool.on_heartbeat("a", with_weights("a", NEW, NEW), now=1)
    before, waiting = pool.view.facts, request_of(1)
    waiting.facts = before
    pool.mark_worker_lost("a", "stopped", blames_jobs=False)
    pool.submit(waiting)
    assert pool.view.facts == FACTS
    pool.on_heartbeat("a", loaded("a", 0.0, OTHER_FACTS), now=2)
    assert phases(pool) == {"a": "ready"}
    assert pool.view.facts == OTHER_FACTS
    assert pool.view.snapshot(2).weights == PoolWeights()
    # Requests checked for the old model never reach the new one.
    late = request_of(1, first_id=7)
    late.facts = before
    pool.submit(late)
    for request in (waiting, late):
        assert isinstance(request.error, ModelChanged)
        assert "'other'" in request.error.message
    assert assigned(pool) == {}
    assert pool.num_open_jobs == 0
    fresh = request_of(1, first_id=9)
    fresh.facts = OTHER_FACTS
    pool.submit(fresh)
    assert assigned(pool) == {"a": [9]}


def test_a_worker_that_missed_an_update_gets_no_jobs():
    pool = pool_of("a", "b")
    pool.on_heartbeat("a", with_weights("a", NEW, NEW), now=1)
    assert phases(pool) == {"a": "ready", "b": "stale"}
    pool.on_heartbeat("b", with_weights("b", NEW, NEW), now=1)
    assert phases(pool) == {"a": "ready", "b": "ready"}
    # The same number of updates, but another update.
    pool.on_heartbeat("b", with_weights("b", PoolWeights(3, "other", 8, False), NEW), now=1)
    assert phases(pool) == {"a": "ready", "b": "stale"}


def test_a_front_end_that_started_later_agrees_that_weights_are_lost():
    old, late = pool_of("a", "b"), pool_of("a", "b")
    for name in "ab":
        old.on_heartbeat(name, with_weights(name, NEW, NEW), now=1)
    initial = PoolWeights()
    for name in "ab":
        # The worker has restarted and has the pool's state from the old front end.
        waiting = with_weights(name, initial, NEW, incarnation="2", phase="waiting_for_weights")
        waiting = msgspec.structs.replace(waiting, facts=FACTS)
        for pool in (old, late):
            pool.on_heartbeat(name, waiting, now=2)
    request = request_of(1)
    for pool in (old, late):
        assert phases(pool) == {"a": "waiting_for_weights", "b": "waiting_for_weights"}
        assert pool.has_lost_weights
        pool.submit(request)
        pool.fail_waiting_without_worker(now=2)
    assert isinstance(request.error, WeightsLost)
    assert "/weights/accept" in request.error.message
    accepted = PoolWeights(4, "own-1")
    for name in "ab":
        for pool in (old, late):
            pool.on_heartbeat(name, with_weights(name, accepted, accepted, incarnation="2"), now=3)
    for pool in (old, late):
        assert not pool.has_lost_weights
        assert phases(pool) == {"a": "ready", "b": "ready"}
    # A worker that starts now serves the initial weights too.
    old.on_heartbeat("a", with_weights("a", initial, initial, incarnation="3"), now=4)
    assert phases(old) == {"a": "ready", "b": "ready"}


def test_weights_are_lost_only_when_every_worker_has_lost_them():
    pool = pool_of("a", "b")
    assert not pool_of().has_lost_weights
    pool.on_heartbeat("a", with_weights("a", NEW, NEW), now=1)
    pool.mark_worker_lost("a", "killed")
    # Worker b may still apply the same update.
    assert phases(pool)["b"] == "stale"
    assert not pool.has_lost_weights
    for phase, is_lost in (("catching_up", False), ("stale", True)):
        behind = with_weights("b", PoolWeights(), NEW, phase=phase)
        pool.on_heartbeat("b", msgspec.structs.replace(behind, facts=FACTS), now=2)
        assert pool.has_lost_weights is is_lost
    pool.on_heartbeat("a", beat("a", incarnation="2", phase="loading"), now=3)
    assert not pool.has_lost_weights


def test_a_job_is_not_requeued_at_another_model():
    pool = pool_of("a")
    pool.add_worker("b", now=0)
    pool.on_heartbeat("b", loaded("b", 5.0, OTHER_FACTS), now=0)
    pool.mark_worker_lost("a", "silent")
    pool.on_heartbeat("b", loaded("b", 5.0, OTHER_FACTS), now=1)
    request = request_of(1)
    request.facts = OTHER_FACTS
    pool.submit(request)
    assert assigned(pool) == {"b": [1]}
    pool.on_heartbeat("a", loaded("a", 100.0), now=2)
    assert phases(pool) == {"a": "ready", "b": "mismatched"}
    pool.mark_worker_lost("b", "killed")
    assert isinstance(request.error, ModelChanged)
    assert assigned(pool) == {}
    assert pool.num_open_jobs == 0


def test_a_snapshot_has_the_remaining_seconds_of_a_lease():
    pool = pool_of("a")
    known = PoolState(model="m", pause=PoolPause(1, "keep", 10.0))
    pool.on_heartbeat("a", msgspec.structs.replace(beat("a"), pool=known), now=100)
    assert pool.view.snapshot(104).pause == PoolPause(1, "keep", 6.0)
    assert pool.view.snapshot(111).pause == PoolPause(1, None, 0.0)


# ---- adapters ----------------------------------------------------------------------------


def with_adapters(name: str, here: dict[str, int], of_pool: dict[str, int]) -> Heartbeat:
    records = {one: AdapterRecord(version, "/f") for one, version in of_pool.items()}
    known = PoolState(model="m", adapters=PoolAdapters(1, records))
    return msgspec.structs.replace(beat(name), adapters=here, pool=known)


def adapted(request: Request, name: str) -> Request:
    request.jobs = [msgspec.structs.replace(job, adapter=name) for job in request.jobs]
    return request


def test_jobs_with_an_adapter_go_to_the_workers_that_have_it():
    pool = pool_of("a", "b")
    pool.on_heartbeat("a", with_adapters("a", {"x": 1}, {"x": 1}), now=1)
    # Worker b has restarted and has not loaded the adapter yet.
    pool.on_heartbeat("b", with_adapters("b", {}, {"x": 1}), now=1)
    assert pool.adapters == {"x": 1}
    pool.submit(adapted(request_of(1, 1, 1), "x"))
    assert assigned(pool) == {"a": [1, 2, 3]}


def test_a_job_whose_adapter_is_unloaded_does_not_block_the_queue():
    pool = pool_of("a")
    pool.on_heartbeat("a", with_adapters("a", {}, {"slow": 1}), now=1)
    gone, slow = adapted(request_of(1), "gone"), adapted(request_of(1, first_id=2), "slow")
    for request in (gone, slow, request_of(1, first_id=3)):
        pool.submit(request)
    assert assigned(pool) == {"a": [3]}
    assert isinstance(gone.error, ModelNotFound)
    assert isinstance(slow.error, NoReadyWorker)
    assert pool.num_open_jobs == 1


# ---- the queue ---------------------------------------------------------------------------


def test_requeued_jobs_wait_in_order_ahead_of_all_others():
    pool = pool_of("a")
    pool.submit(request_of(*[1] * 4))
    pool.assign()
    pool.submit(request_of(1, first_id=9))
    pool.mark_worker_lost("a", "killed", blames_jobs=False)
    assert [one.job.job_id for one in pool.waiting] == [1, 2, 3, 4, 9]


def test_withdrawing_takes_as_long_however_many_jobs_wait():
    def seconds(num_waiting: int) -> float:
        pool = Pool(no_worker_timeout_s=10)
        requests = [request_of(1, first_id=number) for number in range(num_waiting)]
        for request in requests:
            pool.submit(request)
        begin = time.perf_counter()
        for request in requests[-200:]:
            pool.withdraw(request)
        return time.perf_counter() - begin

    assert min(seconds(20_000) for _ in range(2)) < 20 * min(seconds(200) for _ in range(3))


def test_a_failing_routing_policy_fails_no_request():
    class Broken:
        def choose(self, waiting: object, candidates: object, ready: object) -> None:
            raise RuntimeError("staged")

    pool = Pool(no_worker_timeout_s=10, policy=Broken())
    pool.add_worker("a", now=0)
    pool.on_heartbeat("a", beat("a"), now=0)
    pool.submit(request_of(1, 1))
    assert assigned(pool) == {"a": [1, 2]}


def test_on_lost_is_called_with_the_reason():
    lost: list[tuple[str, str]] = []
    pool = Pool(no_worker_timeout_s=10, on_lost=lambda *event: lost.append(event))
    pool.add_worker("a", now=0)
    pool.on_heartbeat("a", beat("a"), now=0)
    pool.on_heartbeat("a", beat("a", incarnation="second"), now=1)
    pool.remove_worker("a")
    assert lost == [("a", "it has restarted"), ("a", "its address was removed")]


def test_a_worker_with_another_version_of_an_adapter_gets_none_of_its_jobs():
    pool = pool_of("a", "b")
    pool.on_heartbeat("a", with_adapters("a", {"s": 2}, {"s": 2}), now=1)
    pool.on_heartbeat("b", with_adapters("b", {"s": 1}, {"s": 2}), now=1)
    pool.submit(adapted(request_of(1, 1, 1), "s"))
    assert assigned(pool) == {"a": [1, 2, 3]}
    pool.on_heartbeat("b", with_adapters("b", {"s": 2}, {"s": 2}), now=2)
    pool.submit(adapted(request_of(1, first_id=9), "s"))
    assert assigned(pool) == {"b": [9]}


def test_a_malformed_chunk_fails_its_request_and_aborts_its_jobs():
    pool = pool_of("a")
    request = request_of(1, 1)
    pool.submit(request)
    pool.assign()
    pool.on_results("a", [Chunk(1, 1, [(0, Completion(b"123", "", None, []))])])
    assert isinstance(request.error, GenerationFailed)
    assert pool.take_failed() == [request]
    ((worker, keys),) = pool.withdraw(request)
    assert (worker.endpoint, keys) == ("a", [(1, 1), (2, 1)])
    assert pool.num_open_jobs == 0


# ---- jobs that have begun ------------------------------------------------------------


def begun_pool(*names: str) -> tuple[Pool, Request]:
    """Four of the six completions of a job are granted at the first worker."""
    pool, request = pool_of(*names), request_of(600, n=6)
    pool.submit(request)
    (sent,) = pool.assign()
    assert (sent.worker.endpoint, sent.granted, sent.more) == (names[0], [4], {})
    assert (pool.num_waiting, pool.num_open_jobs) == (0, 1)
    return pool, request


def end_one(pool: Pool, job_id: int, num_ended: int) -> None:
    progress = JobProgress(job_id, 1, has_token=False, num_started=4, num_ended=num_ended)
    pool.on_results("a", [progress])


def granted_later(pool: Pool) -> list[tuple[int, int, int]]:
    return [more for one in pool.assign() for more in one.more.values()]


def test_a_group_begins_with_what_is_free_and_gets_the_rest_as_slots_become_free():
    pool, request = begun_pool("a", "b")
    assert granted_later(pool) == []
    end_one(pool, 1, 1)
    assert granted_later(pool) == [(1, 1, 5)]
    # Late and repeated messages change nothing.
    end_one(pool, 1, 1)
    assert granted_later(pool) == []
    end_one(pool, 1, 3)
    assert granted_later(pool) == [(1, 1, 6)]
    nothing = [Completion(b"", "stop", None, [])] * 6
    pool.on_results("a", [Completed(1, 1, nothing, 0)])
    assert request.is_done
    assert (pool.workers["a"].num_sequences, pool.workers["a"].num_tokens) == (0, 0)


def test_other_jobs_pass_a_group_whose_worker_is_full():
    pool, _ = begun_pool("a", "b")
    pool.submit(request_of(100, first_id=7))
    assert assigned(pool) == {"b": [7]}


@pytest.mark.parametrize("phase", ["draining", "leaving", "stale"])
def test_a_group_goes_on_at_a_worker_that_gets_no_other_jobs(phase):
    """Such a worker waits for the end of its jobs."""
    pool, _ = begun_pool("a", "b")
    pool.on_heartbeat("b", beat("b", phase="loading"), now=1)
    pool.on_heartbeat("a", msgspec.structs.replace(beat("a"), phase=phase), now=1)
    pool.submit(request_of(100, first_id=7))
    end_one(pool, 1, 2)
    (sent,) = pool.assign()
    assert (sent.jobs, list(sent.more.values())) == ([], [(1, 1, 6)])


def test_a_group_goes_on_at_a_worker_that_is_kept_for_suspects():
    pool, _ = begun_pool("a")
    pool.add_worker("b", now=0)
    pool.on_heartbeat("b", beat("b"), now=0)
    pool.submit(request_of(100, first_id=7))
    assert assigned(pool) == {"b": [7]}
    pool.mark_worker_lost("b", "killed")
    # It does not start again, and the only other worker is kept for the suspect.
    pool.on_heartbeat("a", beat("a"), now=RESTART_S + 1)
    assert len(pool.suspects) == 1
    end_one(pool, 1, 2)
    assert granted_later(pool) == [(1, 1, 6)]
    nothing = [Completion(b"", "stop", None, [])] * 6
    pool.on_results("a", [Completed(1, 1, nothing, 0)])
    assert [one.apart for one in pool.assign()] == ["token"]


def test_a_group_goes_on_when_its_adapter_is_replaced_or_unloaded():
    pool = pool_of("a")
    job = msgspec.structs.replace(request_of(600, n=6).jobs[0], adapter="x")
    with_x = PoolState(
        model="m", adapters=PoolAdapters(1, {"x": AdapterRecord(1, "folder", "digest")})
    )
    pool.on_heartbeat(
        "a", msgspec.structs.replace(beat("a"), pool=with_x, adapters={"x": 1}), now=1
    )
    request = Request([job])
    pool.submit(request)
    assert assigned(pool) == {"a": [1]}
    without = PoolState(model="m", adapters=PoolAdapters(2, {}))
    pool.on_heartbeat("a", msgspec.structs.replace(beat("a"), pool=without), now=2)
    end_one(pool, 1, 2)
    assert granted_later(pool) == [(1, 1, 6)]
    assert request.error is None


def test_a_group_of_a_lost_worker_begins_anew_and_its_old_results_are_dropped():
    pool, request = begun_pool("a", "b")
    end_one(pool, 1, 2)
    pool.mark_worker_lost("a", "stopped", blames_jobs=False)
    assert (pool.num_waiting, pool.num_open_jobs) == (1, 1)
    (sent,) = pool.assign()
    assert (sent.worker.endpoint, sent.jobs[0].attempt, sent.granted) == ("b", 2, [4])
    pool.on_heartbeat("a", beat("a", incarnation="again"), now=1)
    pool.on_results("b", [JobProgress(1, 1, has_token=False, num_started=4, num_ended=4)])
    assert granted_later(pool) == []
    assert not request.is_done


# ---- aborts --------------------------------------------------------------------------


def test_waiting_jobs_end_as_aborted_and_those_at_workers_do_not():
    pool = pool_of("a")
    weights = PoolWeights(5, "u", 3)
    state = PoolState(model="m", weights=weights)
    pool.on_heartbeat("a", msgspec.structs.replace(beat("a"), pool=state, weights=weights), now=1)
    # Longer ones than those that are granted ahead of free slots.
    first = request_named("first", 3, 1, num_tokens=100)
    other = request_named("other", 1, 11, num_tokens=100)
    pool.submit(first)
    pool.submit(other)
    # Four slots.
    assert assigned(pool) == {"a": [1, 11]}
    assert pool.end_waiting(["first", "none"]) == (2, [])
    assert not first.is_done
    assert pool.end_waiting(["first"]) == (0, [])
    expected = Completion(b"", "abort", None, [(3, 0)])
    assert first.results[2] == Completed(3, 1, [expected, expected], 0)
    assert defect_of(first.jobs[2], first.results[2]) == ""
    pool.on_results("a", [Completed(1, 1, [expected, expected], 0)])
    assert first.is_done
    assert pool.end_waiting(None) == (0, [])
    assert not other.is_done


def test_an_abort_of_a_request_that_is_submitted_later_ends_no_other_of_its_id():
    pool = pool_of()
    aborted, again = request_named("same", 2, 1), request_named("same", 2, 11)
    pool.submit(again)
    pool.submit(aborted)
    assert pool.end_waiting(["same"], aborted) == (2, [])
    assert (aborted.is_done, again.is_done) == (True, False)


def test_an_abort_reads_a_grammar_that_jobs_share_once():
    """Read for each job, one of a megabyte takes a hundred times the rest."""

    def seconds(grammar: str) -> float:
        request = request_named("long", 5000, 1, stop=[grammar])
        pool, shown = pool_of(), OpenRequest("long", "", "", "")
        pool.submit(request)
        shown.hold(request)
        began_s = time.thread_time()
        assert shown.end_jobs(["long"]) == 5000
        assert pool.end_waiting(["long"]) == (5000, [])
        return time.thread_time() - began_s

    assert min(seconds("a" * 10**6) for _ in range(3)) < 5 * min(seconds("a") for _ in range(3))


def test_an_abort_also_ends_jobs_that_wait_at_a_worker():
    pool = pool_of("a")
    facts = msgspec.structs.replace(FACTS, max_num_seqs=32)
    pool.on_heartbeat("a", msgspec.structs.replace(beat("a"), facts=facts), now=1)
    batch = request_named("batch", 20, 1)
    pool.submit(batch)
    sent = {one.is_new: (one.jobs, one.granted) for one in pool.assign()}
    # One slot is kept, and short completions are granted ahead: a quarter of the slots.
    assert [job.job_id for job in sent[True][0]] == [1]
    assert [job.job_id for job in sent[False][0]] == [*range(2, 21)]
    assert (sent[True][1], sent[False][1]) == ([2], [2] * 18 + [1])
    # The first is that of a new request, and the worker has started the next 15 ones.
    for job_id in range(2, 17):
        pool.on_results("a", [JobProgress(job_id, 1, has_token=False, num_started=2)])
    num_ended, ((worker, keys),) = pool.end_waiting(None)
    assert (num_ended, worker.endpoint) == (4, "a")
    assert sorted(keys) == [(17, 1), (18, 1), (19, 1), (20, 1)]
    assert (worker.slots.num_running, worker.slots.num_held) == (32, 0)
    assert pool.num_waiting == len(pool.waiting) == 0
    for job_id in (17, 18, 19, 20):
        result = batch.results[job_id - 1]
        assert result is not None
        assert [one.finish_reason for one in result.completions] == ["abort"] * 2


def test_a_job_without_completions_needs_no_slot_and_no_turn():
    pool = pool_of("a")
    pool.submit(request_of(9, 9, 9, 9, 9, 9, 9, 9))
    assert assigned(pool) == {"a": [1, 2, 3, 4]}
    pool.submit(request_of(0, first_id=20, n=0))
    assert pool.end_waiting(["other"]) == (0, [])
    assert assigned(pool) == {"a": [20]}
    # Nor is it ended as aborted while it waits for a worker.
    waiting = Pool(no_worker_timeout_s=10)
    only = request_of(0, n=0)
    waiting.submit(only)
    assert waiting.end_waiting(None) == (0, [])
    assert not only.is_done


def test_renders_spread_over_the_workers_and_hold_up_nothing():
    pool = pool_of(*"abcdefgh")
    # Renders load a worker's threads, not its engine: tokens in flight do not count.
    pool.submit(request_of(10_000))
    assert assigned(pool) == {"a": [1]}
    pool.submit(request_of(*[10] * 64, first_id=100, n=0))
    assert {name: len(jobs) for name, jobs in assigned(pool).items()} == dict.fromkeys(
        "abcdefgh", 8
    )
    renders = request_of(*[10] * 8 * MAX_RENDERS, first_id=200, n=0)
    pool.submit(renders)
    pool.assign()
    assert {worker.num_renders for worker in pool.workers.values()} == {MAX_RENDERS}
    assert len(pool.renders) == 64
    # Waiting renders hold up no generation, and no abort ends them.
    pool.submit(request_of(10, first_id=2))
    assert list(assigned(pool).values()) == [[2]]
    assert pool.end_waiting(None) == (0, [])
    # They go to a worker that has ended one, and those of a lost worker wait ahead of the others.
    pool.on_results("c", [Completed(next(iter(pool.workers["c"].jobs)), 1, [], 0)])
    assert assigned(pool) == {"c": [392]}
    lost = list(pool.workers["d"].jobs)
    pool.mark_worker_lost("d", "stopped", blames_jobs=False)
    assert [one.job.job_id for one in pool.renders][: len(lost)] == lost
    pool.withdraw(renders)
    assert [one.job.job_id for one in pool.renders] == lost[:8]


def test_front_ends_share_the_renders_of_a_worker():
    pool = pool_of("a")
    pool.on_heartbeat("a", msgspec.structs.replace(beat("a"), num_front_ends=4), now=1)
    pool.submit(request_of(*[10] * MAX_RENDERS, n=0))
    assert len(assigned(pool)["a"]) == MAX_RENDERS // 4


def test_a_waiting_stream_ends_with_one_chunk_and_a_scored_prompt_goes_on():
    pool = Pool(no_worker_timeout_s=10)
    stream = request_named("s", 1, 1, is_streamed=True)
    scored = request_named("p", 1, 2, prompt_logprobs=0)
    for request in (stream, scored):
        pool.submit(request)
    assert pool.end_waiting(None) == (1, [])
    ((index, chunk),) = stream.take_chunks()
    assert (index, [number for number, _ in chunk.pieces]) == (0, [0, 1])
    assert {one.finish_reason for _, one in chunk.pieces} == {"abort"}
    assert defect_of(stream.jobs[0], chunk) == ""
    assert stream.is_done
    assert stream.error is None
    assert not scored.is_done
    assert len(pool.waiting) == 1


@pytest.mark.parametrize("are_starts_shown", [False, True])
def test_phases_of_a_start_that_the_worker_shows_itself_are_not_repeated(are_starts_shown, caplog):
    pool = Pool(no_worker_timeout_s=10, are_starts_shown=are_starts_shown)
    pool.add_worker("a", now=0)
    with caplog.at_level("INFO", logger="app.pool.state"):
        for phase in ("importing", "loading", "ready", "catching_up", "ready"):
            pool.on_heartbeat("a", beat("a", phase=phase), now=0)
    shown = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    start = [] if are_starts_shown else ["importing", "loading", "ready"]
    assert shown == [*start, "catching_up", "ready"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_without_a_token_has_no_time_of_its_first(is_streamed: bool):
    pool = Pool(no_worker_timeout_s=10)
    request = request_named("r", 2, 1, is_streamed=is_streamed)
    pool.submit(request)
    assert pool.end_waiting(None) == (2, [])
    assert request.is_done
    assert request.first_token_at == 0.0
