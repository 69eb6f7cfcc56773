"""The tests of tests/test_weights.py about transfers, with one worker."""

import pytest

from tests.servers import Server
from tests.test_weights import (  # noqa: F401
    client,
    own_weights,
    test_a_restarted_worker_serves_only_the_pool_s_weights,
    test_keep_continues_with_new_weights_and_reports_the_switch,
    test_new_weights_are_exact_and_old_ones_can_be_restored,
    test_q_k_and_v_may_be_sent_fused,
)


@pytest.fixture
def server(single_server: Server) -> Server:
    return single_server
