"""The tests of tests/engine/weights/test_weights.py about transfers, with one worker."""

from collections.abc import Iterator

import pytest

from harness.servers import Server
from tests.kit.models.weights import weights_client
from tests.kit.trainers.trainer import tensors_of
from tests.kit.trainers.weight_transfers import (  # noqa: F401
    client,
    own_weights,
    test_a_restarted_worker_serves_only_the_pool_s_weights,
    test_keep_continues_with_new_weights_and_reports_the_switch,
    test_new_weights_are_exact_and_old_ones_can_be_restored,
    test_q_k_and_v_may_be_sent_fused,
)


@pytest.fixture(scope="module", autouse=True)
def own_weights_at_the_end(single_server: Server, tiny_model: str) -> Iterator[None]:
    """For the other tests of this server."""
    yield
    last = weights_client(single_server, timeout_s=15.0)
    last.update(tensors_of(tiny_model), policy="abort", version=0)
    last.close()


@pytest.fixture
def server(single_server: Server) -> Server:
    return single_server
