"""Who is blamed for a worker's end: the pool's decisions, without sockets or clocks."""

import msgspec
import pytest

from app.pool.request import Request
from app.pool.state import Pool
from app.pool.suspects import NUM_PARTS, RESTART_S
from tests.kit.workers.pools import FACTS, beat, completed
from titopool.errors import GenerationFailed
from titopool.settings.sampling import (
    SamplingOptions,
    StructuredOutputs,
    encode_options,
    has_grammar,
)
from titopool.wire.messages import (
    ChatParsing,
    Chunk,
    Completion,
    Heartbeat,
    Job,
    JobProgress,
    Load,
    encode,
)

PLAIN = msgspec.Raw(encode_options(SamplingOptions()))
GRAMMAR = msgspec.Raw(
    encode_options(SamplingOptions(structured_outputs=StructuredOutputs(regex="a+")))
)


def big_beat(name: str, incarnation: str = "", phase: str = "ready") -> Heartbeat:
    facts = msgspec.structs.replace(FACTS, max_num_seqs=256) if phase == "ready" else None
    return msgspec.structs.replace(
        beat(name, incarnation=incarnation or name, phase=phase), facts=facts
    )


class World:
    """A pool, and workers that one or several jobs end."""

    def __init__(self, num_workers: int, *, deadly: set[int], after_token: bool = False):
        """`after_token`: they end it when all jobs that were sent have a token."""
        self.pool = Pool(no_worker_timeout_s=10)
        self.deadly, self.after_token = deadly, after_token
        self.num_deaths = self.num_steps = 0
        # The most jobs that ran together with a deadly one, by the number of deaths before.
        self.beside: list[int] = []
        for index in range(num_workers):
            self.pool.add_worker(f"w{index}", now=0)
            self.pool.on_heartbeat(f"w{index}", big_beat(f"w{index}"), now=0)

    def submit(self, first_id: int, num_jobs: int, sampling: msgspec.Raw = PLAIN) -> list[Request]:
        """Requests of one prompt each."""
        requests = [
            Request([Job(one, 1, b"", 1, 10, sampling)])
            for one in range(first_id, first_id + num_jobs)
        ]
        for request in requests:
            self.pool.submit(request)
        return requests

    def step(self) -> None:
        """Workers start what they are sent; then one dies, or all their jobs have a token."""
        self.num_steps += 1
        for sent in self.pool.assign():
            if sent.apart:
                start(self.pool, sent.worker.endpoint, *(one.job_id for one in sent.jobs))
        for request in self.pool.take_failed():
            self.pool.withdraw(request)
        for worker in self.pool.workers.values():
            open_jobs = [one.job for one in worker.jobs.values()]
            if self.after_token:
                self.give_tokens(worker.endpoint)
            if self.deadly & worker.jobs.keys():
                self.beside.append(len(open_jobs))
                self.die(worker.endpoint)
            else:
                self.give_tokens(worker.endpoint)

    def give_tokens(self, endpoint: str) -> None:
        jobs = [one.job for one in self.pool.workers[endpoint].jobs.values()]
        tokens = [JobProgress(one.job_id, one.attempt, has_token=True) for one in jobs]
        self.pool.on_results(endpoint, tokens)

    def die(self, endpoint: str) -> None:
        self.num_deaths += 1
        self.pool.mark_worker_lost(endpoint, "killed")
        name = f"{endpoint}-{self.num_deaths}"
        self.pool.on_heartbeat(endpoint, big_beat(endpoint, name), now=1)

    def finish(self, requests: list[Request]) -> None:
        """Steps until all requests have ended; those with a token end at every tenth step."""
        for _ in range(2000):
            self.step()
            if self.num_steps % 10 == 0 or self.after_token:
                for worker in self.pool.workers.values():
                    keys = [(one.job.job_id, one.job.attempt) for one in worker.jobs.values()]
                    self.pool.on_results(worker.endpoint, [completed(*key) for key in keys])
            if all(request.is_done for request in requests):
                return
        raise AssertionError("requests are open after 2000 steps")


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("num_innocent", [0, 1, 40, 400])
def test_one_worker_is_lost_to_a_job_that_kills_once_it_is_suspected(num_workers, num_innocent):
    world = World(num_workers, deadly={777})
    innocent = world.submit(1, num_innocent // 2)
    (deadly,) = world.submit(777, 1)
    innocent += world.submit(1000, num_innocent - num_innocent // 2)
    world.finish([*innocent, deadly])
    assert [one.error for one in innocent] == [None] * num_innocent
    assert isinstance(deadly.error, GenerationFailed)
    assert "prompts[0]: 2 workers died" in deadly.error.message
    assert world.num_deaths == 2
    assert world.pool.num_open_jobs == 0


def test_jobs_that_generate_are_no_suspects_and_go_on_at_once():
    world = World(2, deadly={777})
    running = world.submit(1, 20)
    world.step()
    (deadly,) = world.submit(777, 1)
    world.step()
    assert world.num_deaths == 1
    assert [one.job.job_id for one in world.pool.suspects] == [777]
    assert len(world.pool.waiting) == world.beside[0] - 1
    world.finish([*running, deadly])
    assert not any(one.error for one in running)
    # It was alone at its second death.
    assert world.beside[1] == 1


@pytest.mark.parametrize("num_grammars, most_deaths", [(3, 2), (60, 3), (250, 4)])
def test_a_grammar_that_kills_at_any_token_is_found_by_splitting(num_grammars, most_deaths):
    world = World(1, deadly={777}, after_token=True)
    innocent = world.submit(1, num_grammars - 1, GRAMMAR)
    (deadly,) = world.submit(777, 1, GRAMMAR)
    world.finish([*innocent, deadly])
    assert not any(one.error for one in innocent)
    assert isinstance(deadly.error, GenerationFailed)
    assert world.num_deaths <= most_deaths
    # Each group is a part of the one before.
    assert all(after <= max(1, before // NUM_PARTS) for before, after in
               zip(world.beside, world.beside[1:], strict=False))  # fmt: skip


def test_a_job_without_a_grammar_that_kills_after_its_first_token_is_found():
    world = World(2, deadly={777}, after_token=True)
    innocent = world.submit(1, 30)
    (deadly,) = world.submit(777, 1)
    world.finish([*innocent, deadly])
    assert not any(one.error for one in innocent)
    assert isinstance(deadly.error, GenerationFailed)
    assert world.num_deaths <= 4


def test_a_worker_that_was_stopped_makes_no_suspects():
    world = World(2, deadly=set())
    world.submit(1, 4)
    world.pool.assign()
    world.pool.mark_worker_lost("w0", "stopped", blames_jobs=False)
    assert len(world.pool.suspects) == 0
    assert len(world.pool.waiting) == 2


def test_a_suspect_stays_one_when_its_worker_is_stopped():
    world = World(1, deadly=set())
    (request,) = world.submit(1, 1)
    world.pool.assign()
    world.die("w0")
    for _ in range(3):
        (sent,) = world.pool.assign()
        assert sent.apart == "token"
        world.pool.mark_worker_lost("w0", "stopped", blames_jobs=False)
        world.pool.on_heartbeat("w0", big_beat("w0"), now=2)
    assert request.error is None


def test_a_suspect_that_waited_for_its_turn_is_not_blamed():
    """The worker has not said that the job started: that of another front end had its turn."""
    world = World(1, deadly=set())
    (request,) = world.submit(1, 1)
    world.pool.assign()
    for _ in range(6):
        world.die("w0")
        world.pool.assign()
        assert request.error is None


def test_a_suspect_beside_new_jobs_of_other_front_ends_is_tried_again():
    world = World(1, deadly={1})
    (request,) = world.submit(1, 1)
    for number_of_death in range(1, 5):
        for sent in world.pool.assign():
            if sent.apart:
                start(world.pool, sent.worker.endpoint, sent.jobs[0].job_id)
        world.pool.on_load("w0", Load(5, 50, other_risks=5))
        assert request.error is None, number_of_death
        world.die("w0")
    assert isinstance(request.error, GenerationFailed)


def test_suspects_wait_for_a_worker_that_restarts_while_others_are_busy():
    world = World(2, deadly=set())
    pool = world.pool
    world.submit(1, 10)
    world.step()
    world.submit(11, 10)
    pool.assign()
    pool.mark_worker_lost("w0", "killed")
    pool.on_heartbeat("w0", big_beat("w0", "again", phase="loading"), now=1)
    assert len(pool.suspects) == 5
    # Worker w1 is busy and serves on.
    assert {(one.worker.endpoint, one.apart) for one in pool.assign()} == {("w1", "")}
    pool.on_heartbeat("w0", big_beat("w0", "again"), now=2)
    (sent,) = pool.assign()
    assert (sent.worker.endpoint, len(sent.jobs), sent.apart) == ("w0", 1, "token")
    # A worker with a suspect gets nothing else until the suspect has a token.
    world.submit(30, 4)
    assert {(one.worker.endpoint, one.apart) for one in pool.assign()} == {("w1", "")}
    world.give_tokens("w0")
    assert [(one.worker.endpoint, one.apart) for one in pool.assign()] == [("w0", "token")]


def test_a_worker_with_a_suspect_of_another_front_end_gets_no_jobs():
    world = World(2, deadly=set())
    for apart, expected in (("token", {"w1"}), ("end", {"w1"}), ("", {"w0", "w1"})):
        world.pool.on_load("w0", Load(0, 0, apart=apart))
        world.submit(10 * len(apart) + 1, 8)
        assert {one.worker.endpoint for one in world.pool.assign()} == expected
        for worker in world.pool.workers.values():
            world.pool.on_results(worker.endpoint, [completed(one) for one in list(worker.jobs)])
    # The only worker waits for a first token, and serves on until an end.
    alone = World(1, deadly=set())
    alone.submit(1, 2)
    alone.pool.on_load("w0", Load(0, 0, apart="token"))
    assert alone.pool.assign() == []
    alone.pool.on_load("w0", Load(0, 0, apart="end"))
    assert len(alone.pool.assign()) == 1


def test_without_a_restart_the_least_loaded_worker_is_kept_for_suspects():
    world = World(3, deadly=set())
    pool = world.pool
    for name in ("w1", "w2"):
        pool.on_heartbeat(name, big_beat(name), now=RESTART_S + 1)
    world.submit(1, 9)
    world.step()
    world.submit(20, 3)
    pool.assign()
    pool.mark_worker_lost("w0", "killed")
    assert len(pool.suspects) == 1
    pool.on_results("w1", [completed(one) for one in list(pool.workers["w1"].jobs)[1:]])
    world.submit(30, 4)
    assert {one.worker.endpoint for one in pool.assign()} == {"w2"}
    pool.on_results("w1", [completed(next(iter(pool.workers["w1"].jobs)))])
    assert ("w1", "token") in {(one.worker.endpoint, one.apart) for one in pool.assign()}


def start(pool: Pool, endpoint: str, *job_ids: int) -> None:
    jobs = [pool.workers[endpoint].jobs[one].job for one in job_ids]
    started = [JobProgress(one.job_id, one.attempt, has_token=False) for one in jobs]
    pool.on_results(endpoint, started)


def test_jobs_held_beside_a_group_leave_no_doubt_and_are_not_charged():
    """A group runs until its end at the only worker, which holds new jobs beside it."""
    world = World(1, deadly=set())
    pool = world.pool
    (poison,) = world.submit(1, 1, GRAMMAR)
    pool.assign()
    world.give_tokens("w0")
    world.die("w0")
    assert [one.apart for one in pool.assign()] == ["end"]
    held = world.submit(10, 5)
    assert [one.apart for one in pool.assign()] == [""]
    start(pool, "w0", 1)
    world.die("w0")
    assert isinstance(poison.error, GenerationFailed)
    assert [one.error for one in held] == [None] * 5
    assert len(pool.suspects) == 0
    assert len(pool.waiting) == 5


def test_a_job_that_started_beside_a_group_leaves_doubt():
    world = World(1, deadly=set())
    pool = world.pool
    (first,) = world.submit(1, 1, GRAMMAR)
    pool.assign()
    world.give_tokens("w0")
    world.die("w0")
    pool.assign()
    (later,) = world.submit(10, 1)
    pool.assign()
    start(pool, "w0", 1, 10)
    world.die("w0")
    assert (first.error, later.error) == (None, None)
    assert {one.job.job_id for one in pool.suspects} == {1, 10}


def test_a_job_that_waited_at_the_worker_for_a_slot_is_no_suspect():
    world = World(1, deadly=set())
    batch = Request([Job(one, 1, b"", 1, 10, PLAIN) for one in range(300)])
    world.pool.submit(batch)
    world.pool.assign()
    # Five of 256 slots are kept, and a fifth of all are granted ahead. The first job starts at once.
    assert len(world.pool.workers["w0"].jobs) == 300
    start(world.pool, "w0", *range(1, 251))
    world.die("w0")
    assert {one.job.job_id for one in world.pool.suspects} == set(range(251))
    assert [one.job.job_id for one in world.pool.waiting] == [*range(251, 300)]
    assert {one.num_deaths for one in world.pool.waiting} == {0}


def test_a_suspect_beside_a_grammar_that_has_a_token_is_not_blamed():
    """The grammar was cleared by its first token, and its mask may have ended the worker since."""
    world = World(1, deadly=set())
    pool = world.pool
    world.submit(1, 1, GRAMMAR)
    (innocent,) = world.submit(2, 1)
    pool.assign()
    world.die("w0")
    for job_id in (1, 2):
        (assignment,) = pool.assign()
        assert [one.job_id for one in assignment.jobs] == [job_id]
        start(pool, "w0", job_id)
        if job_id == 1:
            world.give_tokens("w0")
    world.die("w0")
    assert innocent.error is None
    assert {one.job.job_id for one in pool.suspects} == {1, 2}


def test_suspects_that_run_until_their_end_leave_the_last_worker_to_others():
    world = World(2, deadly=set())
    pool = world.pool
    world.submit(1, 1, GRAMMAR)
    (assignment,) = pool.assign()
    lost = assignment.worker.endpoint
    world.give_tokens(lost)
    pool.mark_worker_lost(lost, "killed")
    assert pool.assign() == []
    world.submit(10, 1)
    assert [one.apart for one in pool.assign()] == [""]
    # It is not started again.
    other = next(one for one in pool.workers if one != lost)
    pool.on_results(other, [completed(10)])
    pool.on_heartbeat(other, big_beat(other), now=RESTART_S + 1)
    assert [one.apart for one in pool.assign()] == ["end"]


def test_suspects_can_be_withdrawn_and_aborted_and_fail_without_a_worker():
    world = World(1, deadly=set())
    pool = world.pool
    requests = world.submit(1, 3)
    pool.assign()
    pool.mark_worker_lost("w0", "killed")
    assert pool.num_open_jobs == len(pool.open_requests()) == 3
    pool.withdraw(requests[0])
    assert pool.num_open_jobs == 2
    assert pool.end_waiting(None) == (2, [])
    assert pool.num_open_jobs == 0
    last = world.submit(9, 1)
    pool.on_heartbeat("w0", big_beat("w0", "second"), now=1)
    pool.assign()
    pool.mark_worker_lost("w0", "killed")
    pool.fail_waiting_without_worker(now=0)
    pool.fail_waiting_without_worker(now=99)
    assert last[0].error is not None


def test_a_stream_that_has_begun_says_that_it_is_not_blamed():
    pool = World(1, deadly=set()).pool
    request = Request([Job(1, 1, b"", 1, 10, GRAMMAR, is_streamed=True)])
    pool.submit(request)
    pool.assign()
    pool.on_results("w0", [Chunk(1, 1, [(0, Completion(b"", "", None, [(0, 0)]))])])
    pool.mark_worker_lost("w0", "killed")
    assert request.error is not None
    assert "not known to be this request's fault" in request.error.message


def test_grammars_are_recognised():
    job = Job(1, 1, b"", 1, 10, PLAIN)
    assert not has_grammar(job)
    assert has_grammar(msgspec.structs.replace(job, sampling=GRAMMAR))
    chat = encode(ChatParsing(tools=[{"type": "function"}], tool_choice="required"))
    assert has_grammar(msgspec.structs.replace(job, chat=chat))
    assert not has_grammar(msgspec.structs.replace(job, chat=encode(ChatParsing())))
