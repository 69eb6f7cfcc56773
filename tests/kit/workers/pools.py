"""Pools without sockets, and the heartbeats of their workers."""

from collections.abc import Callable

import gevent

from app.pool.command_sender import CommandSender
from app.pool.request import Request
from app.pool.state import Pool
from titopool.wire.commands import Action, Command, CommandDone
from titopool.wire.messages import (
    Completed,
    Completion,
    Heartbeat,
    Job,
    WorkerCounters,
    WorkerFacts,
)
from titopool.wire.pool_state import PoolWeights

FACTS = WorkerFacts(
    model="m", tokenizer="m", tokenizer_revision=None, trust_remote_code=False, vllm_version="0",
    sampling_fields=[], max_model_len=100, vocab_size=10, max_num_seqs=4, max_logprobs=20,
    world_size=1,
)  # fmt: skip


def beat(name: str, *, incarnation: str = "", phase: str = "ready", others: int = 0) -> Heartbeat:
    return Heartbeat(
        worker_id=name, incarnation=incarnation or name, phase=phase, phase_s=1.0, weights=PoolWeights(),
        facts=FACTS if phase == "ready" else None, loaded_s=0.0, other_sequences=others, other_tokens=others * 10,
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
    sent: dict[str, list[int]] = {}
    for one in pool.assign():
        sent.setdefault(one.worker.endpoint, []).extend(job.job_id for job in one.jobs)
    return sent


def completed(job_id: int, attempt: int = 1) -> Completed:
    return Completed(job_id, attempt, [Completion(b"", "stop", None, [])], 0)


class FakePool:
    """A pool whose workers run `on_command` for each command; `sent` records the commands."""

    def __init__(self, num_workers: int, on_command: Callable[["FakePool", int, Command], None]):
        self.sent: list[tuple[str, Action]] = []
        self._on_command = on_command
        self.pool = Pool(
            no_worker_timeout_s=1, on_lost=lambda *lost: self.commands.on_worker_lost(*lost)
        )
        self.commands = CommandSender(self._send, self.pool)
        for index in range(num_workers):
            self.pool.add_worker(f"w{index}", 0)
            self.pool.on_heartbeat(f"w{index}", beat(f"w{index}"), 0)

    def _send(self, endpoint: str, command: Command) -> None:
        self.sent.append((endpoint, command.action))
        self._on_command(self, int(endpoint[1:]), command)

    def answer(self, index: int, command: Command) -> None:
        gevent.spawn(
            self.commands.on_done, f"w{index}", CommandDone(command.command_id, {"w": index})
        )
