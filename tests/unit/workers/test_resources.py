"""What each worker gets of the machine."""

import os

import pytest

from titopool.errors import ConfigError
from titopool.settings.config import ServerConfig
from workers.supervisor.resources import PORTS, resources_of_worker


def first_ports(num_workers: int, pid: int, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The first port of each worker of the server whose supervisor has the process id `pid`."""
    monkeypatch.setattr(os, "getpid", lambda: pid)
    variables = [
        resources_of_worker(index, num_workers, config=ServerConfig(), gpus=()).variables
        for index in range(num_workers)
    ]
    return {int(one["VLLM_PORT"]) for one in variables}


def test_workers_of_one_machine_search_their_own_ports(monkeypatch: pytest.MonkeyPatch):
    one, other = first_ports(8, 1000, monkeypatch), first_ports(8, 1001, monkeypatch)
    assert len(one) == len(other) == 8
    assert not one & other
    # Linux gives the ports from 32,768 on to clients.
    assert max(one | other) + PORTS <= 32_768


def test_a_worker_without_gpus_of_its_own_is_refused():
    second = resources_of_worker(1, 2, config=ServerConfig(), gpus=("4", "6"))
    assert second.variables["CUDA_VISIBLE_DEVICES"] == "6"
    with pytest.raises(ConfigError, match=r"worker 2: expected 1 GPUs for it .* got 2 in all"):
        resources_of_worker(2, 2, config=ServerConfig(), gpus=("4", "6"))
