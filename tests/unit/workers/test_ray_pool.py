"""Decisions of a pool on Ray, without a cluster: Ray's answers are staged."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from titopool.settings.config import ServerConfig

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'titopool[ray]'")

from ray.exceptions import RaySystemError  # noqa: E402

from workers.cluster import ray_pool  # noqa: E402
from workers.cluster.ray_pool import RayPool  # noqa: E402
from workers.cluster.worker_actor import WorkerState  # noqa: E402

# Ids of nodes.
A, B, C = ("a" * 56, "b" * 56, "c" * 56)


class Cluster:
    """Stands for Ray; `added` has each actor's options, `ports` the ports of their workers."""

    def __init__(self) -> None:
        self.num_gpus: dict[str, int] = {}
        self.draining: set[str] = set()
        self.added: list[dict[str, Any]] = []
        self.ports: list[int] = []
        self.failure: Exception | None = None
        self.groups: list[Any] = []
        # What each actor says of its worker; None: nothing yet.
        self.state: WorkerState | None = None

    def nodes(self) -> list[dict[str, Any]]:
        if self.failure:
            raise self.failure
        return [
            {"NodeID": name, "Alive": True, "Resources": {"CPU": 1.0, "GPU": float(number)}}
            for name, number in self.num_gpus.items()
        ]

    def actor(self, **options: Any) -> Any:
        self.added.append(options)
        state, leave = (SimpleNamespace(remote=lambda: "pending") for _ in range(2))

        def start(index: int, settings: dict[str, str], secret: str, port: int) -> Any:
            self.ports.append(port)
            return SimpleNamespace(state=state, leave=leave)

        return SimpleNamespace(remote=start)

    def group(self, bundles: list[dict[str, float]], **_: Any) -> Any:
        self.groups.append(bundles[0])
        return SimpleNamespace(id=len(self.groups))

    def wait(self, pending: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return (pending, []) if self.state else ([], pending)

    def get(self, pending: Any) -> Any:
        return self.state


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    remote = lambda _: SimpleNamespace(options=made.actor)  # noqa: E731
    monkeypatch.setattr(
        ray_pool, "ray",
        SimpleNamespace(
            nodes=made.nodes, remote=remote, wait=made.wait, get=made.get, kill=lambda actor: None
        ),
    )  # fmt: skip
    monkeypatch.setattr(ray_pool, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(ray_pool, "draining_nodes", lambda: made.draining)
    monkeypatch.setattr(ray_pool, "placement_group", made.group)
    monkeypatch.setattr(ray_pool, "POLL_S", 0.0)
    return made


@pytest.fixture
def pool_of(cluster: Cluster, tmp_path: Any) -> Callable[..., RayPool]:
    def make(gpus_per_worker: int = 1, **settings: Any) -> RayPool:
        config = ServerConfig(
            num_workers=1, run_dir=str(tmp_path), tensor_parallel_size=gpus_per_worker, **settings
        )
        return RayPool(config, "secret")

    return make


def pinned(options: dict[str, Any]) -> str | None:
    """The node that an actor is bound to; None: Ray chooses one."""
    node: str | None = getattr(options["scheduling_strategy"], "node_id", None)
    return node


def test_a_worker_waits_for_a_gpu_while_all_nodes_with_gpus_drain(cluster: Cluster, pool_of):
    cluster.num_gpus = {"head": 0, A: 2, B: 2}
    pool = pool_of()
    cluster.draining = {A, B}
    pool._add(is_added=True)
    # Also once they are gone.
    del cluster.num_gpus[A], cluster.num_gpus[B]
    pool._add(is_added=True)
    cluster.draining = {"head"}
    pool._add(is_added=True)
    assert [pinned(one) for one in cluster.added] == [None] * 4
    assert [one["num_gpus"] for one in cluster.added] == [1] * 4
    assert [one["GPU"] for one in cluster.groups] == [1.0] * 4


def test_an_engine_of_several_nodes_begins_on_one_that_stays(cluster: Cluster, pool_of):
    cluster.num_gpus = {"head": 0, A: 2, B: 2}
    cluster.draining = {A}
    pool = pool_of(4)
    assert [(pinned(one), one["num_gpus"]) for one in cluster.added] == [(B, 0)]
    cluster.draining = {A, B}
    assert not pool._add(is_added=True)
    cluster.num_gpus[C] = 2
    assert pool._add(is_added=True)
    assert pinned(cluster.added[-1]) == C


def test_an_error_of_ray_ends_the_pool_only_if_it_lasts(
    cluster: Cluster, pool_of, monkeypatch: pytest.MonkeyPatch
):
    pool = pool_of()
    pool._scale.wanted = 2
    cluster.failure = RaySystemError("the GCS restarts")
    pool.poll()
    cluster.failure = None
    pool.poll()
    assert len(cluster.added) == 2
    pool._scale.wanted = 3
    cluster.failure = RaySystemError("the GCS restarts")
    pool.poll()
    monkeypatch.setattr(ray_pool, "RAY_TIMEOUT_S", -1.0)
    with pytest.raises(RaySystemError):
        pool.poll()


def test_two_servers_have_actors_of_different_names(cluster: Cluster, pool_of):
    pool_of(), pool_of()
    assert len({one["name"] for one in cluster.added}) == 2


def test_a_new_worker_has_the_index_name_and_port_of_none_that_lives(cluster: Cluster, pool_of):
    pool = pool_of(worker_port=7000)
    pool._add(is_added=True)
    pool._add(is_added=True)
    pool._remove(pool._workers[0])
    pool._add(is_added=True)
    assert [one.index for one in pool._workers] == [1, 2, 0]
    assert len({one["name"] for one in cluster.added[1:]}) == 3
    assert cluster.ports == [7000, 7001, 7002, 7000]


@pytest.mark.parametrize("who, num_wanted", [("the pool", 2), ("a client", 1)])
def test_a_worker_that_the_pool_lets_go_is_replaced(
    cluster: Cluster, pool_of, who: str, num_wanted: int
):
    """As on a node that drains; one that a client has asked to leave is not."""
    pool = pool_of()
    pool._scale.wanted = 2
    pool._add(is_added=True)
    cluster.state = WorkerState("tcp://a:1", A, "ready", None, "", has_ended=False)
    pool.poll()
    first = pool._workers[0]
    if who == "the pool":
        pool._let_go(first)
    cluster.state = WorkerState("tcp://a:1", A, "leaving", None, "", has_ended=True)
    pool._follow(first)
    assert first not in pool._workers
    assert pool._scale.wanted == num_wanted
