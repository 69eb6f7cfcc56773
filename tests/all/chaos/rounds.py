"""One round: an operation, up to two faults at one of its points, and the checks afterwards."""

import asyncio
import contextlib
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import psutil

from tests.all.chaos.agents import NUM_AGENTS, Agent
from tests.all.chaos.clients import NUM_CLIENTS, Clients, Versions
from tests.all.chaos.cluster import LONGEST_TIMEOUT_S, NUM_WORKERS, Cluster
from tests.all.chaos.faults import FAULTS, Scene
from tests.all.chaos.operations import ROUND_TRIPS, Refused, Trainer

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("CHAOS_SEED", "0"))
# Seconds until a point is reached. An operation that is refused earlier never reaches it.
REACH_TIMEOUT_S = 4.0
# Seconds from the end of the faults until all live workers serve.
WHOLE_TIMEOUT_S = LONGEST_TIMEOUT_S + 2.0
# Extra seconds for a busy machine; shorter than any timeout that the pool might wait for.
PATIENCE_S = 6.0


@dataclass(frozen=True)
class Cell:
    """Which faults hit which worker, and at which point of which operation."""

    operation: str
    point: str
    fault: str
    second_fault: str
    member: int

    def __str__(self) -> str:
        return (
            f"{self.operation}, {self.point} at worker {self.member}: {self.fault}, then "
            f"{self.second_fault}"
        )


def all_cells(chance: random.Random) -> Iterator[tuple[Cell, int]]:
    """Each fault at each point in a random order, repeated; with a seed for each round."""
    points = [
        (operation, f"{round_trip}:{side}")
        for operation, (_, round_trips) in ROUND_TRIPS.items()
        for round_trip in round_trips
        for side in (["after"] if round_trip == "Chunk" else ["before", "after"])
    ]
    grid = [(operation, point, fault) for operation, point in points for fault in FAULTS]
    while True:
        chance.shuffle(grid)
        for operation, point, fault in grid:
            second = chance.choice(["none", *FAULTS])
            cell = Cell(operation, point, fault, second, chance.randrange(NUM_WORKERS))
            yield cell, chance.randrange(10**6)


@dataclass
class Report:
    """The outcome of a round."""

    cell: Cell
    is_reached: bool
    refusal: str
    # Seconds from the end of the faults until the pool was healthy.
    recovery_s: float
    wrong: list[str]


class Harness:
    """A cluster under load, and the rounds of faults."""

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        *,
        kind: type[Agent] = Agent,
        num_clients: int = NUM_CLIENTS,
        patience_s: float = PATIENCE_S,
    ):
        """`kind`: of the agents; `patience_s`: until the pool must be healthy, beside its timeouts."""
        self._cluster, self._patience_s = cluster, patience_s
        self.versions = Versions()
        self.clients = Clients(cluster, self.versions, seed, num_clients)
        self._agents = [kind(self.clients, cluster.url, seed + one) for one in range(NUM_AGENTS)]
        self._trainer = Trainer(cluster, self.versions, [])
        # Why the last operation was refused.
        self._refusal = ""

    async def play(self, cell: Cell, seed: int) -> Report:
        """Runs one round."""
        self._keep_ledgers()
        self.clients.wrong, self._trainer.wrong, self._refusal = [], [], ""
        self.clients.start(agent.run() for agent in self._agents)
        await asyncio.sleep(0.2)
        chance = random.Random(seed)
        is_reached, cures = await self._inject(cell, chance)
        for cure in cures:
            await cure()
        recovery_s, wrong = await self._until_healthy()
        await self.clients.stop()
        self.clients.may_break = False
        wrong += self.clients.wrong + self._trainer.wrong
        if not wrong:
            wrong = await self._leaks()
        return Report(cell, is_reached, self._refusal, recovery_s, wrong)

    def _keep_ledgers(self) -> None:
        """Copies the ledgers, for a worker that restarts with the ledger of an earlier round."""
        for member in self._cluster.members:
            if member.ledger.exists():
                shutil.copy(member.ledger, member.run_dir / "kept")

    async def _inject(self, cell: Cell, chance: random.Random):  # type: ignore[no-untyped-def]
        member = self._cluster.members[cell.member]
        operation, _ = ROUND_TRIPS[cell.operation]
        member.arm(cell.point)
        running = asyncio.create_task(self._run_operation(operation))
        scene = Scene(self._cluster, self.clients, self._trainer, self.versions, chance, running)
        is_reached = await member.wait_reached(REACH_TIMEOUT_S)
        if cell.fault == "all killed":
            self.versions.reset()
        faults = [asyncio.create_task(self._fault(cell.fault, scene, member))]
        await asyncio.sleep(chance.choice([0.0, 0.1, 0.5, 1.0]))
        # The worker stays at the point until the second fault has begun, unless it was killed.
        if cell.second_fault != "none":
            if cell.second_fault == "all killed":
                self.versions.reset()
            other = scene.another(member)
            faults.append(asyncio.create_task(self._fault(cell.second_fault, scene, other)))
        member.release()
        await asyncio.gather(*faults)
        member.release()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return is_reached, scene.cures

    async def _fault(self, name: str, scene: Scene, member) -> None:  # type: ignore[no-untyped-def]
        with contextlib.suppress(aiohttp.ClientError, psutil.NoSuchProcess):
            await FAULTS[name](scene, member)

    async def _run_operation(self, operation) -> None:  # type: ignore[no-untyped-def]
        """Runs an operation, which may be refused or lose its connection to a killed front end."""
        try:
            await operation(self._trainer)
        except Refused as refusal:
            self._refusal = str(refusal)
        except (aiohttp.ClientError, OSError) as error:
            if not self.clients.may_break:
                self._trainer.wrong.append(f"the trainer lost its connection: {error!r}")

    # ---- checks --------------------------------------------------------------------------

    async def _until_healthy(self) -> tuple[float, list[str]]:
        """Seconds until the pool was healthy, and the reasons why it is not."""
        began = time.monotonic()
        deadline = began + WHOLE_TIMEOUT_S + self._patience_s
        reasons = ["not looked at"]
        while time.monotonic() < deadline:
            reasons = await self._reasons()
            if not reasons:
                break
            await asyncio.sleep(0.1)
        recovery_s = time.monotonic() - began
        if not reasons:
            reasons = await self._check_complete_update()
        return recovery_s, [f"after {recovery_s:.1f} s: {one}" for one in reasons]

    async def _reasons(self) -> list[str]:
        """Why the pool is not healthy after the faults; empty if it is."""
        try:
            states = [await member.state() for member in self._cluster.members]
            views = [(await self._cluster.request("/ready", timeout_s=5))[1] for _ in range(6)]
            pauses = [(await self._cluster.request("/is_paused", timeout_s=5))[1] for _ in range(2)]
            probes = [
                await self._cluster.request("/generate/", {"prompts": [[1, 2]] * 6}, timeout_s=15)
                for _ in range(2)
            ]
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return [f"no answer: {error!r}"]
        reasons = []
        for index, state in enumerate(states):
            if not state["runs"] and state["lease_left_s"] is None:
                reasons.append(f"worker {index} is paused without a lease: {state}")
            if state["phase"] not in ("closed", "open"):
                reasons.append(f"worker {index} is still {state['phase']}")
        is_paused = any(state["lease_left_s"] is not None for state in states)
        if any(pause["is_paused"] for pause in pauses) or is_paused:
            reasons.append("paused")
        ready = {
            one["weight_version"] for view in views for one in view["workers"]
            if one["phase"] == "ready"
        }  # fmt: skip
        phases = {tuple(one["phase"] for one in view["workers"]) for view in views}
        allowed = {"ready", "stale", "waiting_for_weights"}
        if len(phases) != 1 or not set(*phases) <= allowed or len(*phases) != NUM_WORKERS:
            reasons.append(f"the front ends say {phases}")
        elif len(ready) > 1:
            reasons.append(f"versions that serve: {ready}")
        for status, answer in probes:
            is_lost = status == 503 and answer["error"]["code"] == "weights_lost"
            if not (status == 200 or (is_lost and not ready)):
                reasons.append(f"generation: {status} {answer}")
        return reasons

    async def _check_complete_update(self) -> list[str]:
        """A complete update reaches every worker, whatever it missed."""
        try:
            await self._trainer.folder_update()
        except Refused as error:
            return [f"the next update was refused: {error}"]
        for _ in range(50):
            if await self._cluster.all_ready():
                return []
            await asyncio.sleep(0.1)
        return [f"after a complete update: {await self._cluster.phases()}"]

    async def _leaks(self) -> list[str]:
        """Resources that processes still hold although no request is in flight."""
        for _ in range(40):
            leaks = []
            for pid, answer in (await self._cluster.resources_in_use()).items():
                in_use = {name: what for name, what in answer["held"].items() if what}
                if in_use:
                    leaks.append(f"front end {pid} holds {in_use}")
                if answer["num_files"] > 200:
                    leaks.append(f"front end {pid} has {answer['num_files']} files open")
            for index, member in enumerate(self._cluster.members):
                state = await member.state()
                names = ("jobs", "sequences", "tokens", "histories", "requests")
                in_use = {name: state[name] for name in names if state[name]}
                if in_use or state["tasks"] > 14:
                    leaks.append(f"worker {index} holds {in_use} and {state['tasks']} tasks")
            if left := self._cluster.rows_of_sessions():
                leaks.append(f"the file of sessions has {left}")
            if not leaks:
                return []
            await asyncio.sleep(0.1)
        return leaks
