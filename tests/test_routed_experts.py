"""Routed experts from vLLM to JSON: real vLLM, on CPUs with Triton's interpreter."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from app.outputs import replay
from tests import routed_experts
from tests.routed_experts import CHECKS, make_mixture, mixture_server
from tests.servers import Server
from titopool.wire.messages import RoutedExperts, SamplingMask


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_mixture(tmp_path_factory.mktemp("mixture") / "model", seed=0)


@pytest.fixture(scope="module")
def mixtures(mixture: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    working = tmp_path_factory.mktemp("mixtures")
    with mixture_server(mixture, working) as server:
        yield server


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_experts_are_those_of_the_router(
    mixtures: Server, mixture: str, check: Callable[[Server, str], None]
):
    check(mixtures, mixture)


def test_large_mixtures_have_two_bytes_an_expert():
    rows = np.arange(12, dtype=np.uint16).reshape(2, 3, 2) * 300
    packed = RoutedExperts(rows.tobytes(), rows.shape, "uint16", 5)
    sent = replay.experts_json(packed, None)
    assert next(iter(sent)) == "data"
    assert (routed_experts.experts_of({"routed_experts": sent}) == rows).all()
    assert sent["start"] == 5


def test_masks_are_lists_of_ids():
    ids, counts = np.array([4, 5, 6], np.int32), np.array([2, 0, 1], np.int32)
    assert replay.mask_lists(SamplingMask(ids.tobytes(), counts.tobytes())) == [[4, 5], [], [6]]
