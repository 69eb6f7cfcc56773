"""A front end on another host relays bytes between TRL's client and rank 0."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.weights.trl_relay import is_of_this_host, start_relay
from harness.servers import REPOSITORY, environment, free_port, wait_until
from titopool.errors import InvalidRequest

SCRIPT = """
from gevent import monkey
monkey.patch_all()
import sys, time
from app.weights.trl_relay import start_relay
start_relay(int(sys.argv[1]), "127.0.0.2", lease_s=float(sys.argv[2]), listen_at="127.0.0.1")
print("relays", flush=True)
time.sleep(600)
"""


def echo(listening: socket.socket) -> None:
    """Sends back, in capitals, what each connection sent until its end."""
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            connection.sendall(read_all(connection).upper())


def read_all(connection: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    return b"".join(iter(lambda: connection.recv(10_000), b""))


@pytest.fixture
def port() -> Iterator[int]:
    """A port with a listener on another address."""
    number = free_port()
    with socket.create_server(("127.0.0.2", number)) as listening:
        thread = threading.Thread(target=echo, args=(listening,), daemon=True)
        thread.start()
        yield number
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@contextmanager
def relaying(port: int, lease_s: float) -> Iterator[None]:
    """A front end's process with a running relay."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(port), str(lease_s)],
        env=environment(), cwd=REPOSITORY, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"relays\n"
            yield
        finally:
            process.kill()


def test_bytes_and_shutdowns_pass_both_ways(port: int):
    # The second front end finds the port taken by the first front end's relay and uses that.
    with relaying(port, 600), relaying(port, 600):
        data = b"some words " * 50_000
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                assert b"".join(iter(lambda: client.recv(10_000), b"")) == data.upper()


def test_relay_accepts_no_connection_after_its_lease(port: int):
    with relaying(port, 1):
        wait_until(lambda: refuses(port), 20)


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return True
    return False


def test_addresses_of_this_host_are_recognised():
    assert is_of_this_host("127.0.0.1")
    assert is_of_this_host("127.0.0.3")
    # From the range reserved for documentation.
    assert not is_of_this_host("192.0.2.1")
    assert not is_of_this_host("no-such-host.invalid")


def test_a_port_that_cannot_be_bound_is_refused_at_once():
    if os.geteuid() == 0:
        # Root may use any port of this host, but nobody can listen at another host's address.
        port, address = free_port(), "192.0.2.1"
    else:
        port, address = 80, "127.0.0.1"
    with pytest.raises(InvalidRequest, match=f"got {port}"):
        start_relay(port, "127.0.0.2", lease_s=1, listen_at=address)
