"""Lets TRL's client find rank 0 where it looks for it: at the front end's address.

The client connects to the host that it sends requests to. In containers, and with workers on
other hosts, rank 0 listens elsewhere; what the ranks tell each other at the start then passes
through here. Weights do not: NCCL's own connections go straight from process to process.
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
    """Whether `host` is an address of this host, or of this container."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def start_relay(port: int, host: str, *, lease_s: float, listen_at: str) -> StreamServer | None:
    """Passes connections at `port` of `listen_at` on to the same port of `host`.

    New connections are taken for `lease_s`; those that stand then go on.

    Returns:
        The relay; None if another process of this server has one at `port` already.

    Raises:
        InvalidRequest: this process may not listen there.
    """

    def handle(incoming: socket.socket, _: object) -> None:
        try:
            outgoing = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            logger.warning("the worker does not answer at %s:%d: %s", host, port, error)
            incoming.close()
            return
        outgoing.settimeout(None)
        ways = [gevent.spawn(copy, *pair) for pair in ((incoming, outgoing), (outgoing, incoming))]
        gevent.joinall(ways)
        outgoing.close()

    server = StreamServer((listen_at, port), handle)
    try:
        server.start()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise InvalidRequest(
                f"port: expected one at which the server may listen ({listen_at}), to pass "
                f"connections on to the worker at {host}, got {port}: {error}; TRL's client takes "
                "group_port",
                param="port",
            ) from None
        logger.warning("port %d is taken; is it another process that relays?", port)
        return None
    gevent.spawn_later(lease_s, server.close)
    return server


def copy(source: socket.socket, target: socket.socket) -> None:
    """Passes on what comes from `source` until its end, which is passed on too."""
    try:
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # One side is gone; the other one learns it.
        for one in (source, target):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
