"""Weight updates over IPv6: the server's address, and the trainer's address for workers."""

import socket

import pytest

from harness.servers import Server, ipv6_listener, need_gpus
from tests.kit.models.weights import assert_serves
from tests.kit.trainers.trainer import DEVICE, tensors_of
from titopool.client.weights_client import WeightsClient

# A host name with only an IPv6 address.
NAME = "six.titopool.test"


@pytest.fixture
def server(single_server: Server) -> Server:
    """The front end listens at all addresses of both families."""
    need_gpus(2)
    ipv6_listener().close()
    return single_server


@pytest.mark.parametrize("host", ["[::1]", NAME], ids=["address", "name"])
def test_an_update_over_ipv6(
    server: Server, tiny_model: str, tmp_path, monkeypatch: pytest.MonkeyPatch, host: str
):
    from titopool.demo_model import make_model

    look_up = socket.getaddrinfo

    def getaddrinfo(name, *arguments, **options):
        return look_up("::1" if name == NAME else name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    make_model(tmp_path, seed=1)
    client = WeightsClient(server.url.replace("127.0.0.1", host), device=DEVICE, timeout_s=60)
    try:
        client.update(tensors_of(str(tmp_path)), policy="keep")
        assert_serves(server, str(tmp_path))
        # A second update in the same group.
        client.update(tensors_of(tiny_model), policy="keep")
        assert_serves(server, tiny_model)
    finally:
        client.close()
