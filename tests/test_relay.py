"""What TRL's client and rank 0 tell each other passes through a front end on another host."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.routes.weights.trl_relay import is_of_this_host, start_relay
from tests.servers import REPOSITORY, environment, free_port, wait_until
from titopool.errors import InvalidRequest

SCRIPT = """
from gevent import monkey
monkey.patch_all()
import sys, time
from app.routes.weights.trl_relay import start_relay
start_relay(int(sys.argv[1]), "127.0.0.2", lease_s=float(sys.argv[2]), listen_at="127.0.0.1")
print("relays", flush=True)
time.sleep(600)
"""


def echo(listening: socket.socket) -> None:
    """Sends back what each connection sends, in capitals, when that has ended."""
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            connection.sendall(all_of(connection).upper())


def all_of(connection: socket.socket) -> bytes:
    """What comes until the other side ends it."""
    return b"".join(iter(lambda: connection.recv(10_000), b""))


@pytest.fixture
def port() -> Iterator[int]:
    """Where something listens, on another address."""
    number = free_port()
    with socket.create_server(("127.0.0.2", number)) as listening:
        thread = threading.Thread(target=echo, args=(listening,), daemon=True)
        thread.start()
        yield number
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@contextmanager
def relaying(port: int, lease_s: float) -> Iterator[None]:
    """A front end's process that has begun to relay."""
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


def test_bytes_pass_both_ways_and_so_do_ends(port: int):
    # The second front end finds the port taken by the first, which will do.
    with relaying(port, 600), relaying(port, 600):
        data = b"some words " * 50_000
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                assert b"".join(iter(lambda: client.recv(10_000), b"")) == data.upper()


def test_after_its_lease_it_takes_no_connections(port: int):
    with relaying(port, 1):
        wait_until(lambda: refuses(port), 20)


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return True
    return False


def test_which_addresses_are_of_this_host():
    assert is_of_this_host("127.0.0.1")
    assert is_of_this_host("127.0.0.3")
    # Of the range for documentation.
    assert not is_of_this_host("192.0.2.1")
    assert not is_of_this_host("no-such-host.invalid")


def test_a_port_at_which_the_server_may_not_listen_is_told_before_anything_happens():
    if os.geteuid() == 0:
        # Root may listen anywhere on this host, and nobody at another host's address.
        port, address = free_port(), "192.0.2.1"
    else:
        port, address = 80, "127.0.0.1"
    with pytest.raises(InvalidRequest, match=f"got {port}"):
        start_relay(port, "127.0.0.2", lease_s=1, listen_at=address)
