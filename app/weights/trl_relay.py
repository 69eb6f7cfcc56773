"""Relays TRL's client to rank 0 of the weight-update group.

The client expects rank 0 at the host that it sends requests to. In containers, and with workers on
other hosts, rank 0 listens elsewhere, so the rendezvous of the ranks passes through this relay.
Weights do not: NCCL connects the processes directly.
"""

import errno
import logging
import socket

import gevent
from gevent.server import StreamServer

from titopool.errors import InvalidRequest

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
CHUNK_BYTES = 65_536


def is_of_this_host(host: str) -> bool:
    """Whether `host` is an address of this host or container."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def start_relay(port: int, host: str, *, lease_s: float, listen_at: str) -> StreamServer | None:
    """Relays connections from `port` of `listen_at` to the same port of `host`.

    New connections are accepted for `lease_s` seconds; open connections stay after that.

    Returns:
        The relay; None if `port` is taken, probably by a relay of another front end.

    Raises:
        InvalidRequest: this process may not listen at `listen_at` and `port`.
    """

    def handle(incoming: socket.socket, _: object) -> None:
        try:
            outgoing = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            logger.warning("the worker does not answer at %s:%d: %s", host, port, error)
            incoming.close()
            return
        outgoing.settimeout(None)
        gevent.joinall(
            [gevent.spawn(copy, incoming, outgoing), gevent.spawn(copy, outgoing, incoming)]
        )
        outgoing.close()

    server = StreamServer((listen_at, port), handle)
    try:
        server.start()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise InvalidRequest(
                f"port: expected a port that the server may listen on at {listen_at}, to relay "
                f"connections to the worker at {host}, got {port}: {error}; set group_port in TRL's "
                "client",
                param="port",
            ) from None
        logger.warning(
            "port %d is taken, probably by a relay of another front end; not relaying", port
        )
        return None
    gevent.spawn_later(lease_s, server.close)
    return server


def copy(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes from `source` to `target` until the end of `source`, and ends `target` too."""
    try:
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # One side is gone: close the other side too.
        for one in (source, target):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
