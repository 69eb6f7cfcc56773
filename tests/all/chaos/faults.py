"""Faults that hit the pool during an operation, and how they are undone."""

import asyncio
import random
import shutil
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from app.http.budget import UNREAD_S
from harness.stub_worker import BLOCK_SIGNAL
from tests.all.chaos.clients import Clients, Versions
from tests.all.chaos.cluster import HANG_TIMEOUT_S, HEARTBEAT_TIMEOUT_S, Cluster, Member
from tests.all.chaos.operations import Refused, Trainer

# Longer than the heartbeat timeout.
LONG_S = HEARTBEAT_TIMEOUT_S + 1.0
SHORT_S = 0.5
# Their answers together exceed the budget of the front ends.
NUM_UNREAD = 12


@dataclass
class Scene:
    """What a fault may act on."""

    cluster: Cluster
    clients: Clients
    trainer: Trainer
    versions: Versions
    chance: random.Random
    # The operation in flight.
    operation: asyncio.Task[Any]
    # Called at the end of the round to undo the faults.
    cures: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def another(self, member: Member) -> Member:
        return self.chance.choice([one for one in self.cluster.members if one is not member])


async def killed(scene: Scene, member: Member) -> None:
    await member.kill()
    scene.cures.append(member.revive)


async def killed_and_restarted(scene: Scene, member: Member) -> None:
    await member.restart()


async def killed_without_ledger(scene: Scene, member: Member) -> None:
    await member.restart(before=member.forget)


async def killed_with_fewer_updates(scene: Scene, member: Member) -> None:
    """The worker restarts with the ledger of an earlier round."""

    def restore_ledger() -> None:
        kept = member.run_dir / "kept"
        if kept.exists():
            shutil.copy(kept, member.ledger)

    await member.restart(before=restore_ledger)


async def restarted_with_another_model(scene: Scene, member: Member) -> None:
    await member.restart("--model", "another", "--vocab-size", "77")
    scene.cures.append(member.restart)


async def stopped(scene: Scene, member: Member) -> None:
    member.signal(signal.SIGSTOP)
    await asyncio.sleep(scene.chance.choice([SHORT_S, LONG_S]))
    member.signal(signal.SIGCONT)


async def hung(scene: Scene, member: Member) -> None:
    """The process is stopped until a supervisor would end it."""
    member.signal(signal.SIGSTOP)
    await asyncio.sleep(HANG_TIMEOUT_S)
    # Also one that another fault starts, and waits for.
    member.signal(signal.SIGKILL)
    await member.restart()


async def loop_stands(scene: Scene, member: Member) -> None:
    """The worker ends itself, also where an update is open, and is started again."""
    process = member.process
    assert process is not None
    member.signal(BLOCK_SIGNAL)
    async with asyncio.timeout(HANG_TIMEOUT_S + scene.cluster.update_timeout_s + LONG_S):
        await process.wait()
    await member.revive()


async def partitioned(scene: Scene, member: Member) -> None:
    member.proxy.hold()
    await asyncio.sleep(scene.chance.choice([SHORT_S, LONG_S]))
    member.proxy.heal()


async def cut(scene: Scene, member: Member) -> None:
    member.proxy.cut()


async def delayed(scene: Scene, member: Member) -> None:
    """Heartbeats and responses are delayed, but within the timeouts."""
    member.proxy.delay_s = 0.3
    await asyncio.sleep(LONG_S)
    member.proxy.heal()


async def disk_full(scene: Scene, member: Member) -> None:
    member.fill_disk(is_full=True)

    async def cure() -> None:
        member.fill_disk(is_full=False)

    scene.cures.append(cure)


async def missing_in_dns(scene: Scene, member: Member) -> None:
    cluster = scene.cluster
    cluster.set_hosts(*[one for one in cluster.members if one is not member])
    await asyncio.sleep(1.0)
    cluster.set_hosts(*cluster.members)


async def front_end_killed(scene: Scene, member: Member) -> None:
    scene.clients.may_break = True
    scene.chance.choice(scene.cluster.front_ends()).send_signal(signal.SIGKILL)


async def front_ends_killed(scene: Scene, member: Member) -> None:
    scene.clients.may_break = True
    for one in scene.cluster.front_ends():
        one.send_signal(signal.SIGKILL)


async def front_end_stopped(scene: Scene, member: Member) -> None:
    one = scene.chance.choice(scene.cluster.front_ends())
    one.send_signal(signal.SIGSTOP)
    await asyncio.sleep(LONG_S)
    one.send_signal(signal.SIGCONT)


async def trainer_cancelled(scene: Scene, member: Member) -> None:
    scene.operation.cancel()


async def clients_disconnected(scene: Scene, member: Member) -> None:
    scene.clients.disconnect()


async def answers_unread(scene: Scene, member: Member) -> None:
    """Clients ask for large answers and do not read them, for longer than a front end allows or not."""
    wait_s = scene.chance.choice([LONG_S, UNREAD_S + LONG_S])
    await asyncio.gather(*[
        scene.clients.leave_unread(wait_s, reads_then=index % 2 == 0) for index in range(NUM_UNREAD)
    ])  # fmt: skip


async def second_trainer(scene: Scene, member: Member) -> None:
    update = scene.chance.choice(
        [Trainer.folder_update, Trainer.group_update, Trainer.stock_update]
    )
    try:
        await update(scene.trainer)
    except Refused:
        return


async def all_killed_without_ledger(scene: Scene, member: Member) -> None:
    """No worker has the pool's weights any more, unless they are in a folder."""
    await asyncio.gather(*(one.restart(before=one.forget) for one in scene.cluster.members))


Fault = Callable[[Scene, Member], Awaitable[None]]
FAULTS: dict[str, Fault] = {
    "killed": killed,
    "killed, back": killed_and_restarted,
    "killed, no ledger": killed_without_ledger,
    "killed, fewer updates": killed_with_fewer_updates,
    "another model": restarted_with_another_model,
    "stopped": stopped,
    "hung": hung,
    "loop stands": loop_stands,
    "partitioned": partitioned,
    "cut": cut,
    "late": delayed,
    "disk full": disk_full,
    "left out by DNS": missing_in_dns,
    "front end killed": front_end_killed,
    "front ends killed": front_ends_killed,
    "front end stopped": front_end_stopped,
    "trainer left": trainer_cancelled,
    "clients left": clients_disconnected,
    "answers unread": answers_unread,
    "second trainer": second_trainer,
    "all killed": all_killed_without_ledger,
}
