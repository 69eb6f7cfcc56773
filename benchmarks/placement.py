"""Compares routing policies on simulated workers.

    python -m benchmarks.placement [--out FILE] [--num-workers 2 4 8] [--num-seeds 5]

Runs the server's `app/pool/state.py` and `app/pool/placement.py` in simulated time, without sockets
and threads. A simulated engine runs sequences in one continuous batch and has a prefix cache of
limited size. A prefill delays its decoding, as the sum of vLLM's steps does; decoding does not slow
down with length. The constants below are assumptions for a model of 8 billion parameters on an H200.
They were not measured.

Makespan: seconds until the last completion. Hit rate: share of prompt tokens found in a cache. Load:
tokens computed (prefill without hits, and decoding), maximum over mean of the workers. All figures
are medians over seeds.
"""

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

from app.pool.placement import ROUTING_POLICIES, Placed, RoundRobin, RoutingPolicy
from app.pool.prefix_index import as_integers
from app.pool.request import Request
from app.pool.state import Pool
from benchmarks.placement_workloads import WORKLOADS, Conversation, Turn
from titopool.wire.messages import (
    Completed,
    Completion,
    Heartbeat,
    Job,
    Load,
    WorkerCounters,
    WorkerFacts,
)
from titopool.wire.pool_state import PoolWeights
from titopool.wire.prefixes import BLOCK_TOKENS

# 16 GFLOP a token at about two thirds of an H200's dense bfloat16.
PREFILL_TOKENS_PER_S = 40_000
# A step reads all weights (16 GB at 4.8 TB/s) and has overhead; each sequence adds its KV cache.
DECODE_STEP_S = 0.012
DECODE_STEP_S_PER_SEQUENCE = 0.000_02
# vLLM's default is up to 1024; for long sequences memory limits it further.
MAX_NUM_SEQS = 128
# About 100 GB at 131 kB per token (32 layers, 8 KV heads of 128, keys and values, bfloat16).
CACHE_TOKENS = 800_000
# As `LOAD_REPORT_S` of workers.
REPORT_S = 0.01
UNLIMITED = 10**9


# ---- engines ---------------------------------------------------------------------------


class BlockCache:
    """A prefix cache of limited size. Evicts the least recently used block that is not in use."""

    def __init__(self, num_blocks: int):
        self._num_blocks = num_blocks
        self._users: Counter[int] = Counter()
        self._free: OrderedDict[int, None] = OrderedDict()
        self._num_private = 0

    def take(self, digests: list[int], num_private: int) -> int | None:
        """Takes a prompt's blocks and `num_private` more; returns the number of cached blocks.

        Returns None if the blocks do not fit now.
        """
        found = next(
            (
                i
                for i, one in enumerate(digests)
                if one not in self._users and one not in self._free
            ),
            len(digests),
        )
        num_new = sum(one not in self._users for one in digests)
        if len(self._users) + self._num_private + num_new + num_private > self._num_blocks:
            return None
        for digest in digests:
            self._free.pop(digest, None)
            self._users[digest] += 1
        self._num_private += num_private
        while len(self._users) + self._num_private + len(self._free) > self._num_blocks:
            self._free.popitem(last=False)
        return found

    def release(self, digests: list[int], num_private: int, added: list[int]) -> None:
        """Releases blocks. `added` are the completion's blocks, which stay cached."""
        self._num_private -= num_private
        for digest in reversed(digests):
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
        for digest in reversed(digests + added):
            if digest not in self._users:
                self._free[digest] = None
                self._free.move_to_end(digest)


@dataclass
class Engine:
    """One worker in simulated time."""

    clock: float = 0.0
    num_steps: float = 0.0
    # (step of the last token, job id)
    running: list[tuple[float, int]] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)
    cache: BlockCache = field(default_factory=lambda: BlockCache(CACHE_TOKENS // BLOCK_TOKENS))
    num_computed: int = 0
    num_cached: int = 0

    def step_s(self) -> float:
        return DECODE_STEP_S + DECODE_STEP_S_PER_SEQUENCE * len(self.running)

    def next_end(self) -> float:
        """When the next sequence ends, unless further sequences start before."""
        if not self.running:
            return float("inf")
        return self.clock + (self.running[0][0] - self.num_steps) * self.step_s()

    def advance(self, now: float) -> None:
        # The clock is ahead of `now` during a prefill.
        if now > self.clock:
            if self.running:
                self.num_steps += (now - self.clock) / self.step_s()
            self.clock = now

    def admit(self, turns: dict[int, Turn]) -> None:
        while self.queue and len(self.running) < MAX_NUM_SEQS:
            turn = turns[self.queue[0]]
            num_cached = self.cache.take(*blocks_of(turn)[:2])
            if num_cached is None:
                return
            job_id = self.queue.popleft()
            # vLLM always computes the last token of a prompt.
            num_cached = min(num_cached * BLOCK_TOKENS, turn.num_prompt_tokens - 1)
            num_new = turn.num_prompt_tokens - num_cached
            self.clock += num_new / PREFILL_TOKENS_PER_S
            self.num_cached += num_cached
            self.num_computed += num_new + turn.num_completion_tokens
            heapq.heappush(self.running, (self.num_steps + turn.num_completion_tokens, job_id))

    def take_ended(self, turns: dict[int, Turn]) -> list[int]:
        """Ids of the jobs that have ended by now."""
        ended = []
        while self.running and self.running[0][0] <= self.num_steps + 1e-6:
            job_id = heapq.heappop(self.running)[1]
            self.cache.release(*blocks_of(turns[job_id]))
            ended.append(job_id)
        return ended


def blocks_of(turn: Turn) -> tuple[list[int], int, list[int]]:
    """Digests of the prompt's blocks, number of further blocks, digests of the completion's blocks."""
    digests = as_integers(turn.prefix)
    num_blocks = -(-(turn.num_prompt_tokens + turn.num_completion_tokens) // BLOCK_TOKENS)
    num_shared = turn.num_prompt_tokens // BLOCK_TOKENS
    return digests[:num_shared], num_blocks - num_shared, digests[num_shared:]


# ---- the run ---------------------------------------------------------------------------


class Simulation:
    """Front ends, each with a `Pool`, that share the engines."""

    def __init__(
        self,
        workload: list[Conversation],
        num_workers: int,
        policies: list[RoutingPolicy],
        *,
        max_num_seqs: int,
        with_prefixes: bool,
        with_sessions: bool = False,
    ):
        self.workload, self.with_prefixes = workload, with_prefixes
        self.with_sessions = with_sessions
        self.engines = {str(index): Engine() for index in range(num_workers)}
        self.pools = [Pool(no_worker_timeout_s=1, policy=policy) for policy in policies]
        self.facts = WorkerFacts(
            model="", tokenizer="", tokenizer_revision=None, trust_remote_code=False,
            vllm_version="", sampling_fields=[], max_model_len=UNLIMITED, vocab_size=UNLIMITED,
            max_num_seqs=max_num_seqs, max_logprobs=0, world_size=1, num_cache_tokens=CACHE_TOKENS,
        )  # fmt: skip
        self.turns: dict[int, Turn] = {}
        self.chance = random.Random(0)
        self.arrivals: list[tuple[float, int, int, int]] = []
        # By job id: (conversation, turn, front end).
        self.sources: dict[int, tuple[int, int, int]] = {}
        # By front end and endpoint: prefixes for the next report.
        self.prefixes: dict[tuple[int, str], bytes] = {}
        self.job_ids = itertools.count(1)
        for pool in self.pools:
            for endpoint in self.engines:
                pool.add_worker(endpoint, 0)
        self.beat()

    def beat(self) -> None:
        """Sends the first heartbeat of each worker to each front end."""
        for pool in self.pools:
            for endpoint in self.engines:
                pool.on_heartbeat(
                    endpoint,
                    Heartbeat(
                        worker_id=endpoint, incarnation=endpoint, phase="ready", phase_s=0,
                        weights=PoolWeights(), facts=self.facts, loaded_s=0, num_front_ends=len(self.pools),
                        other_sequences=0, other_tokens=0, num_sequences=0, counters=WorkerCounters(),
                    ),
                    0,
                )  # fmt: skip

    def report(self) -> None:
        """Tells each front end of the others' jobs at each worker."""
        for index, pool in enumerate(self.pools):
            others = [other for other in self.pools if other is not pool]
            for endpoint in self.engines:
                there = [other.workers[endpoint] for other in others]
                load = Load(
                    sum(one.num_sequences for one in there), sum(one.num_tokens for one in there),
                    prefixes=self.prefixes.pop((index, endpoint), b""),
                )  # fmt: skip
                pool.on_load(endpoint, load)

    def share(self, front_end: int, endpoint: str, prefix: bytes) -> None:
        """Keeps a prefix for the next report to the front ends other than `front_end`."""
        for other in range(len(self.pools)):
            if other != front_end:
                key = (other, endpoint)
                self.prefixes[key] = self.prefixes.get(key, b"") + prefix

    def run(self) -> dict[str, float]:
        for index in range(len(self.workload)):
            heapq.heappush(self.arrivals, (0.0, index, 0, self.chance.randrange(len(self.pools))))
        num_left, now, next_report = sum(map(len, self.workload)), 0.0, REPORT_S
        while num_left:
            ends = {endpoint: engine.next_end() for endpoint, engine in self.engines.items()}
            endpoint = min(ends, key=lambda one: ends[one])
            arrival = self.arrivals[0][0] if self.arrivals else float("inf")
            if next_report <= min(arrival, ends[endpoint]) and len(self.pools) > 1:
                self.report()
                now, next_report = next_report, next_report + REPORT_S
            elif arrival <= ends[endpoint]:
                now = arrival
                while self.arrivals and self.arrivals[0][0] <= now:
                    self.submit(*heapq.heappop(self.arrivals)[1:])
            else:
                now = ends[endpoint]
                num_left -= self.finish(endpoint, now)
            self.send(now)
        return self.figures(now)

    def submit(self, conversation: int, index: int, front_end: int) -> None:
        turn, job_id = self.workload[conversation][index], next(self.job_ids)
        self.turns[job_id] = turn
        self.sources[job_id] = (conversation, index, front_end)
        prefix = turn.prefix[: turn.num_prompt_bytes] if self.with_prefixes else None
        num_tokens = turn.num_prompt_tokens + turn.max_tokens
        job = Job(job_id, 1, turn.prompt, 1, num_tokens, b"", None, prefix)
        session = str(conversation) if self.with_sessions else ""
        self.pools[front_end].submit(Request([job], session=session))

    def send(self, now: float) -> None:
        for index, pool in enumerate(self.pools):
            # Each job has one completion, so none is granted later.
            for sent in pool.assign():
                endpoint = sent.worker.endpoint
                for job in sent.jobs:
                    self.share(index, endpoint, job.prefix or b"")
                engine = self.engines[endpoint]
                engine.advance(now)
                engine.queue.extend(job.job_id for job in sent.jobs)
                engine.admit(self.turns)

    def finish(self, endpoint: str, now: float) -> int:
        engine = self.engines[endpoint]
        engine.advance(now)
        ended = engine.take_ended(self.turns)
        engine.admit(self.turns)
        for job_id in ended:
            turn, (conversation, index, front_end) = self.turns[job_id], self.sources[job_id]
            added = turn.prefix[turn.num_prompt_bytes :] if self.with_prefixes else b""
            nothing = [Completion(b"", "stop", None, [])]
            self.pools[front_end].on_results(endpoint, [Completed(job_id, 1, nothing, 0, added)])
            if self.with_prefixes:
                self.share(front_end, endpoint, turn.prefix)
            if index + 1 < len(self.workload[conversation]):
                at = now + self.workload[conversation][index + 1].delay_s
                front_end = self.chance.randrange(len(self.pools))
                heapq.heappush(self.arrivals, (at, conversation, index + 1, front_end))
        return len(ended)

    def figures(self, now: float) -> dict[str, float]:
        engines = self.engines.values()
        num_prompt_tokens = sum(turn.num_prompt_tokens for turn in self.turns.values())
        loads = [engine.num_computed for engine in engines]
        return {
            "makespan_s": now,
            "hit_rate": sum(engine.num_cached for engine in engines) / num_prompt_tokens,
            "load_max_over_mean": max(loads) / statistics.mean(loads),
        }


def simulate(
    workload: list[Conversation], name: str, *, num_workers: int, num_front_ends: int
) -> dict[str, float]:
    """The figures of one routing policy on one workload."""
    if name != "even_split":
        simulation = Simulation(
            workload,
            num_workers,
            [ROUTING_POLICIES[POLICIES.get(name, name)]() for _ in range(num_front_ends)],
            # Round robin as in other servers: every job is sent at once.
            max_num_seqs=UNLIMITED if name == "round_robin" else MAX_NUM_SEQS,
            with_prefixes=name in ("prefix", "prefix+sessions"),
            with_sessions=name in POLICIES,
        )
        return simulation.run()

    class EvenSplit(RoundRobin):
        """Splits the conversations, all known in advance, into contiguous parts of equal number."""

        def choose(self, first, waiting, candidates, ready):  # type: ignore[no-untyped-def]
            conversation = simulation.sources[first.job.job_id][0]
            return Placed(ready[conversation * num_workers // len(workload)], first)

    simulation = Simulation(
        workload, num_workers, [EvenSplit()] * num_front_ends,
        max_num_seqs=UNLIMITED, with_prefixes=False,
    )  # fmt: skip
    return simulation.run()


# Policies with sessions: each conversation names itself. `sessions` sends no digests.
POLICIES = {"prefix+sessions": "prefix", "sessions": "prefix"}
NAMES = ("prefix", *POLICIES, "least_loaded", "round_robin", "even_split")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--num-seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    arguments = parser.parse_args()
    rows = []
    print("| workload | workers | policy | makespan s | hit rate | load max/mean |")
    print("|---|---|---|---|---|---|")
    for (title, make, num_front_ends), num_workers in itertools.product(
        WORKLOADS, arguments.num_workers
    ):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
        for seed in range(arguments.num_seeds):
            workload = make(random.Random(seed), num_workers)
            for name in NAMES:
                runs[name].append(
                    simulate(workload, name, num_workers=num_workers, num_front_ends=num_front_ends)
                )
        for name, found in runs.items():
            median = {key: statistics.median(one[key] for one in found) for key in found[0]}
            rows.append({"workload": title, "num_workers": num_workers, "policy": name, **median})
            print(
                f"| {title} | {num_workers} | {name} | {median['makespan_s']:.1f} "
                f"| {median['hit_rate']:.3f} | {median['load_max_over_mean']:.3f} |",
                flush=True,
            )
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
