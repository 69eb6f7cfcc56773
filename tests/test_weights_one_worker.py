"""What differs with one worker: all of tests/test_weights.py that concerns the way of the weights."""

import pytest

from tests.servers import Server
from tests.test_weights import (  # noqa: F401
    client,
    own_weights,
    test_a_restarted_worker_serves_only_the_weights_of_the_pool,
    test_keep_goes_on_with_the_new_weights_and_says_from_where,
    test_new_weights_are_exact_and_the_old_ones_come_back,
    test_q_k_and_v_may_come_as_vllm_has_them,
)


@pytest.fixture
def server(single_server: Server) -> Server:
    return single_server
