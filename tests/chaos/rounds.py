"""One round: an operation, hurt at one of its points, twice; and what must hold afterwards."""

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import psutil

from tests.chaos.clients import Clients, Versions
from tests.chaos.cluster import LONGEST_TIMEOUT_S, NUM_WORKERS, Cluster
from tests.chaos.faults import FAULTS, Scene
from tests.chaos.operations import ROUND_TRIPS, Refused, Trainer

# Until a point is reached; an operation that is refused before may never reach it.
REACH_TIMEOUT_S = 4.0
# From the moment when nothing is hurt any more until everything that lives serves.
WHOLE_TIMEOUT_S = LONGEST_TIMEOUT_S + 2.0
# A busy machine may be late, but not by as much as a timeout that is missed.
PATIENCE_S = 6.0


@dataclass(frozen=True)
class Cell:
    """What is hurt, where and when."""

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
    """Each fault at each point, in a random order, and again; with a seed for each round."""
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
    """What a round has shown."""

    cell: Cell
    is_reached: bool
    refusal: str
    # Seconds until the pool was whole, from when nothing was hurt any more.
    whole_s: float
    wrong: list[str]


class Harness:
    """A cluster under load, and rounds that hurt it."""

    def __init__(self, cluster: Cluster, seed: int):
        self._cluster = cluster
        self.versions = Versions()
        self.clients = Clients(cluster, self.versions, seed)
        self._trainer = Trainer(cluster, self.versions, [])
        # Why the last operation went no further.
        self._refusal = ""

    async def play(self, cell: Cell, seed: int) -> Report:
        """One round."""
        self._keep_ledgers()
        self.clients.wrong, self._trainer.wrong, self._refusal = [], [], ""
        self.clients.start()
        await asyncio.sleep(0.2)
        chance = random.Random(seed)
        is_reached, cures = await self._hurt(cell, chance)
        for cure in cures:
            await cure()
        whole_s, wrong = await self._until_whole()
        await self.clients.stop()
        self.clients.may_break = False
        wrong += self.clients.wrong + self._trainer.wrong
        if not wrong:
            wrong = await self._what_is_left()
        return Report(cell, is_reached, self._refusal, whole_s, wrong)

    def _keep_ledgers(self) -> None:
        """For a worker that comes back with what it knew before this round."""
        for member in self._cluster.members:
            if member.ledger.exists():
                shutil.copy(member.ledger, member.run_dir / "kept")

    async def _hurt(self, cell: Cell, chance: random.Random):  # type: ignore[no-untyped-def]
        member = self._cluster.members[cell.member]
        operation, _ = ROUND_TRIPS[cell.operation]
        member.arm(cell.point)
        running = asyncio.create_task(self._quietly(operation))
        scene = Scene(self._cluster, self.clients, self._trainer, self.versions, chance, running)
        is_reached = await member.wait_reached(REACH_TIMEOUT_S)
        if cell.fault == "all killed":
            self.versions.reset()
        faults = [asyncio.create_task(self._fault(cell.fault, scene, member))]
        await asyncio.sleep(chance.choice([0.0, 0.1, 0.5, 1.0]))
        # The point is left with the first fault in place, or gone with its worker.
        if cell.second_fault != "none":
            if cell.second_fault == "all killed":
                self.versions.reset()
            other = scene.another(member)
            faults.append(asyncio.create_task(self._fault(cell.second_fault, scene, other)))
        member.go_on()
        await asyncio.gather(*faults)
        member.go_on()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return is_reached, scene.cures

    async def _fault(self, name: str, scene: Scene, member) -> None:  # type: ignore[no-untyped-def]
        with contextlib.suppress(aiohttp.ClientError, psutil.NoSuchProcess):
            await FAULTS[name](scene, member)

    async def _quietly(self, operation) -> None:  # type: ignore[no-untyped-def]
        """Operations may be refused, or lose their connection with a front end that is killed."""
        try:
            await operation(self._trainer)
        except Refused as refusal:
            self._refusal = str(refusal)
        except (aiohttp.ClientError, OSError) as error:
            if not self.clients.may_break:
                self._trainer.wrong.append(f"the trainer lost its connection: {error!r}")

    # ---- what must hold ------------------------------------------------------------------

    async def _until_whole(self) -> tuple[float, list[str]]:
        """How long it took until all that lives generates, and what does not."""
        began = time.monotonic()
        deadline = began + WHOLE_TIMEOUT_S + PATIENCE_S
        reasons = ["not looked at"]
        while time.monotonic() < deadline:
            reasons = await self._reasons()
            if not reasons:
                break
            await asyncio.sleep(0.1)
        whole_s = time.monotonic() - began
        if not reasons:
            reasons = await self._update_brings_all_back()
        return whole_s, [f"after {whole_s:.1f} s: {one}" for one in reasons]

    async def _reasons(self) -> list[str]:
        """Why the pool is not what it should be with nobody hurt; empty if it is."""
        try:
            states = [await member.state() for member in self._cluster.members]
            views = [(await self._cluster.ask("/ready", timeout_s=5))[1] for _ in range(6)]
            pauses = [(await self._cluster.ask("/is_paused", timeout_s=5))[1] for _ in range(2)]
            probes = [
                await self._cluster.ask("/generate/", {"prompts": [[1, 2]] * 6}, timeout_s=15)
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
        named = {"ready", "stale", "waiting_for_weights"}
        if len(phases) != 1 or not set(*phases) <= named or len(*phases) != NUM_WORKERS:
            reasons.append(f"the front ends say {phases}")
        elif len(ready) > 1:
            reasons.append(f"versions that serve: {ready}")
        for status, answer in probes:
            is_lost = status == 503 and answer["error"]["code"] == "weights_lost"
            if not (status == 200 or (is_lost and not ready)):
                reasons.append(f"generation: {status} {answer}")
        return reasons

    async def _update_brings_all_back(self) -> list[str]:
        """A complete update reaches every worker, whatever it missed."""
        try:
            await self._trainer.folder_update()
        except Refused as error:
            return [f"the next update was refused: {error}"]
        for _ in range(50):
            if await self._cluster.is_whole():
                return []
            await asyncio.sleep(0.1)
        return [f"after a complete update: {await self._cluster.phases()}"]

    async def _what_is_left(self) -> list[str]:
        """What processes still hold although nothing is asked of them."""
        for _ in range(40):
            left = []
            for pid, answer in (await self._cluster.held()).items():
                held = {name: what for name, what in answer["held"].items() if what}
                if held:
                    left.append(f"front end {pid} holds {held}")
                if answer["num_files"] > 200:
                    left.append(f"front end {pid} has {answer['num_files']} files open")
            for index, member in enumerate(self._cluster.members):
                state = await member.state()
                names = ("jobs", "sequences", "tokens", "histories", "requests")
                held = {name: state[name] for name in names if state[name]}
                if held or state["tasks"] > 14:
                    left.append(f"worker {index} holds {held} and {state['tasks']} tasks")
            if not left:
                return []
            await asyncio.sleep(0.1)
        return left
