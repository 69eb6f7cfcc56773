"""Loaders that skip a tensor: the update is refused or the worker ends; no mixed weights."""

from pathlib import Path
from typing import Any

import pytest

from harness.servers import Server, need_gpus, running_server, wait_until, worker_pids
from tests.conftest import ENGINE_OPTIONS
from tests.kit.extensions.forgetful_extension import SKIPPED_TENSOR
from tests.kit.models.weights import assert_serves, weights_client
from tests.kit.trainers.trainer import tensors_of
from tests.kit.trainers.trl_weights_client import update_by_trl
from titopool.client.weights_client import WeightsError
from titopool.demo_model import make_model


def test_a_skipped_tensor_is_refused_or_ends_the_worker(tiny_model: str, tmp_path: Path):
    need_gpus(2)
    other, forgets = tmp_path / "other", tmp_path / "forgets"
    other.mkdir()
    make_model(other, seed=1)
    options = (
        "--num-workers", "1", "--num-front-ends", "1", "--weights-root", str(tmp_path),
        "--weight-proof", "each",
        "--worker-extension-cls", "tests.kit.extensions.forgetful_extension.ForgetfulExtension", *ENGINE_OPTIONS,
    )  # fmt: skip
    log = tmp_path / "log"
    forgets.write_text("always")
    with running_server(tiny_model, *options, log=log, FORGETS=str(forgets)) as server:
        check_update_is_refused(server, str(other), tiny_model)
        forgets.write_text("loading")
        # Another order of tensors, which has had no dry run yet.
        check_update_ends_the_worker(server, tensors_of(other)[::-1])
        server.wait_until_ready(server.num_workers)
        assert_serves(server, tiny_model)
        # Each update is proved, also one with the names of one that was right.
        forgets.write_text("never")
        update(server, tensors_of(other))
        assert_serves(server, str(other))
        forgets.write_text("loading")
        check_update_ends_the_worker(server, tensors_of(tiny_model))


def check_update_is_refused(server: Server, other: str, original: str) -> None:
    """A dry run refuses the update before any tensor is sent; group and old weights stay."""
    client = weights_client(server, timeout_s=60)
    new = tensors_of(other)
    for update in (
        lambda: client.update(new, policy="keep"),
        lambda: client.update_from_folder(other, policy="keep"),
    ):
        with pytest.raises(WeightsError, match="1 of the model's parameters would keep") as caught:
            update()
        assert caught.value.status == 400
        assert f": {SKIPPED_TENSOR}; put the new weights into a folder" in str(caught.value)
        assert_serves(server, original)
    client.close()
    with pytest.raises(AssertionError, match=SKIPPED_TENSOR):
        update_by_trl(server.url, other)
    assert_serves(server, original)


def update(server: Server, tensors: list[Any]) -> None:
    client = weights_client(server, timeout_s=60)
    try:
        client.update(tensors, policy="keep")
    finally:
        client.close()


def check_update_ends_the_worker(server: Server, tensors: list[Any]) -> None:
    """A loader that a dry run cannot check is found after loading: the worker ends and restarts."""
    pids = worker_pids(server)
    with pytest.raises(WeightsError, match="half loaded") as caught:
        update(server, tensors)
    assert f": {SKIPPED_TENSOR}; start the server with a folder" in str(caught.value)
    wait_until(lambda: not set(pids) & set(worker_pids(server)), 60)
