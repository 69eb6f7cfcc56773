"""How the routes of TRL's weight updates call the workers: the relay's address, and timeouts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from flask import Flask
from flask.testing import FlaskClient

from app.pool.command_sender import ACCEPT_TIMEOUT_S, CommandSender
from app.vllm_rl import caches
from app.weights import trl_weights
from tests.kit.workers.pools import FACTS, FakePool, beat
from titopool.settings.config import ServerConfig
from titopool.wire.commands import Command, CommandDone

STEP_S = 100.0


def done(told: FakePool, index: int, command: Command) -> None:
    answered = CommandDone(command.command_id, {})
    gevent.spawn(told.commands.on_done, next(iter(told.pool.workers)), answered)


@pytest.fixture
def client_of() -> Callable[..., FlaskClient]:
    def make(endpoint: str, **settings: Any) -> FlaskClient:
        told = FakePool(0, done)
        told.commands._send = lambda endpoint, command: done(told, 0, command)  # type: ignore[method-assign]
        told.pool.add_worker(endpoint, 0)
        told.pool.on_heartbeat(endpoint, beat("w"), 0)
        link = SimpleNamespace(
            wait_for_heartbeats=lambda: None, commands=told.commands, facts=FACTS
        )
        config = ServerConfig(weight_update_timeout_s=STEP_S, **settings)
        app = Flask(__name__)
        app.extensions["titopool"] = SimpleNamespace(
            link=link, config=config, start=lambda: None
        )  # fmt: skip
        app.register_blueprint(trl_weights.blueprint)
        app.register_blueprint(caches.blueprint)
        return app.test_client()

    return make


@pytest.mark.parametrize(
    "path, body",
    [
        ("/init_communicator/", {"host": "0.0.0.0", "port": 51216, "world_size": 2}),
        ("/update_named_param/", {"name": "w", "dtype": "float32", "shape": [2]}),
        ("/reset_prefix_cache/", None),
        ("/close_communicator/", None),
    ],
)
def test_a_call_that_may_end_an_update_waits_for_all_its_steps(
    client_of, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
):
    timeouts: list[float] = []
    ask = CommandSender.gather_outcomes

    def outcomes(
        self: CommandSender, workers: Any, action: Any, *, timeout_s: float = ACCEPT_TIMEOUT_S
    ) -> Any:
        timeouts.append(timeout_s)
        return ask(self, workers, action, timeout_s=timeout_s)

    monkeypatch.setattr(CommandSender, "gather_outcomes", outcomes)
    assert client_of("ipc:///w0").post(path, json=body).status_code == 200
    # Receiving the remaining tensors, preparing and applying may each take a full timeout.
    assert timeouts
    assert min(timeouts) >= 3 * STEP_S


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_relay_listens_at_the_server_s_address(
    client_of, monkeypatch: pytest.MonkeyPatch, host: str
):
    addresses: list[str] = []

    def start_relay(port: int, worker: str, *, lease_s: float, listen_at: str) -> None:
        assert (port, worker, lease_s) == (51216, "192.0.2.7", STEP_S)
        addresses.append(listen_at)

    monkeypatch.setattr(trl_weights, "start_relay", start_relay)
    # TRL's client names every interface, whatever the server listens on.
    body = {"host": "0.0.0.0", "port": 51216, "world_size": 2}
    answer = client_of("tcp://192.0.2.7:5555", host=host).post("/init_communicator/", json=body)
    assert answer.status_code == 200
    assert addresses == [host]
