"""A client's connection is looked at while its request runs."""

import socket
import weakref

import gevent

from app.http.connections import CHECK_EVERY_S, watching
from titopool.collector import without_collector


class Call:
    num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1


def test_a_client_that_hangs_up_is_noticed_once_and_only_within_the_block():
    client, other = socket.socketpair()
    on_gone = Call()
    with watching(client, on_gone):
        gevent.sleep(0.05)
        assert on_gone.num_calls == 0
        other.close()
        gevent.sleep(0.2)
        assert on_gone.num_calls == 1
    client.close()


def test_a_client_that_sends_more_is_noticed_when_it_hangs_up():
    client, other = socket.socketpair()
    on_gone = Call()
    with watching(client, on_gone):
        other.send(b"more")
        gevent.sleep(0.05)
        other.close()
        gevent.sleep(CHECK_EVERY_S + 0.2)
        assert on_gone.num_calls == 1
    client.close()


def test_nothing_is_kept_after_the_block():
    client, other = socket.socketpair()
    on_gone = Call()
    kept = weakref.ref(on_gone)
    with without_collector():
        with watching(client, on_gone):
            gevent.sleep(0)
        del on_gone
        assert kept() is None
    client.close()
    other.close()
