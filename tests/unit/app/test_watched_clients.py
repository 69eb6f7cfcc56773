"""A client's connection is looked at while its request runs."""

import socket
import time
import weakref

import gevent
import pytest

from app.http.connections import CHECK_EVERY_S, watching
from titopool.collector import without_collector


class Call:
    num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1


def wait_for_call(on_gone: Call) -> None:
    deadline = time.monotonic() + CHECK_EVERY_S + 10
    while not on_gone.num_calls:
        assert time.monotonic() < deadline
        gevent.sleep(0.01)


def test_a_client_that_hangs_up_is_noticed_once_and_only_within_the_block():
    client, other = socket.socketpair()
    on_gone = Call()
    with watching(client, on_gone):
        gevent.sleep(0.05)
        assert on_gone.num_calls == 0
        other.close()
        wait_for_call(on_gone)
        gevent.sleep(0.1)
        assert on_gone.num_calls == 1
    client.close()


def test_a_client_that_sends_more_is_noticed_when_it_hangs_up():
    client, other = socket.socketpair()
    on_gone = Call()
    with watching(client, on_gone):
        other.send(b"more")
        gevent.sleep(0.05)
        other.close()
        wait_for_call(on_gone)
        assert on_gone.num_calls == 1
    client.close()


@pytest.mark.parametrize("sent", [b"", b"more"])
def test_nothing_is_kept_after_the_block(sent: bytes):
    client, other = socket.socketpair()
    other.sendall(sent)
    on_gone = Call()
    kept = weakref.ref(on_gone)
    with without_collector():
        with watching(client, on_gone):
            gevent.sleep(0.05)
        del on_gone
        assert kept() is None
    client.close()
    other.close()
