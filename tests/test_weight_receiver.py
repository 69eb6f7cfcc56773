"""The thread that receives weights, and the model's thread, which may close it at any time."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.servers import free_port
from workers.in_model.group import GroupArgs
from workers.in_model.receiver import Receiver


class Leaving(Receiver):
    """Its thread leaves the group right after anybody has looked at it."""

    there: Any = None

    @property
    def _group(self) -> Any:
        seen, self.there = self.there, None
        return seen

    @_group.setter
    def _group(self, group: Any) -> None:
        self.there = group


def test_a_receiver_is_closed_while_its_thread_leaves():
    # It waits for a trainer that does not come.
    args = GroupArgs("trl", "gloo", "127.0.0.1", free_port(), 0, 2, 60.0)
    receiver = Leaving(args, torch.device("cpu"))
    cancelled: list[bool] = []
    receiver.there = SimpleNamespace(
        channel=SimpleNamespace(cancel=lambda: cancelled.append(True), close=lambda: None)
    )
    receiver.close()
    assert cancelled == [True]
    assert receiver.has_ended(10.0)
    assert receiver.status()["error"] == ""
