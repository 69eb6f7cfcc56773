"""The thread that receives weights; the model's thread may close it at any time."""

from types import SimpleNamespace
from typing import Any

import torch

from harness.servers import free_port
from workers.in_model.receiving.group import GroupArgs
from workers.in_model.receiving.receiver import Receiver


class Leaving(Receiver):
    """Its thread leaves the group right after `_group` was read."""

    current_group: Any = None

    @property
    def _group(self) -> Any:
        group, self.current_group = self.current_group, None
        return group

    @_group.setter
    def _group(self, group: Any) -> None:
        self.current_group = group


def test_a_receiver_can_be_closed_while_its_thread_leaves():
    # The group waits for a trainer that never joins.
    args = GroupArgs("trl", "gloo", "127.0.0.1", free_port(), 0, 2, 60.0)
    receiver = Leaving(args, torch.device("cpu"))
    cancelled: list[bool] = []
    receiver.current_group = SimpleNamespace(
        channel=SimpleNamespace(cancel=lambda: cancelled.append(True), close=lambda: None)
    )
    receiver.close()
    assert cancelled == [True]
    assert receiver.has_ended(10.0)
    assert receiver.status()["error"] == ""
