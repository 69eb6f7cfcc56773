"""Resolves the endpoints in the settings to the endpoints of single workers.

A host name stands for every address that it resolves to: Compose's `--scale`, a headless service
of Kubernetes. Names are resolved again and again, in a greenlet, because each look-up blocks.
"""

import ipaddress
import logging
import socket

import gevent
from gevent.event import Event

logger = logging.getLogger(__name__)

LOOK_UP_EVERY_S = 2.0


class Discovery:
    """The endpoints of all workers, as of the last look-up."""

    def __init__(self, endpoints: tuple[str, ...]):
        self._named = [endpoint for endpoint in endpoints if is_named(endpoint)]
        self._fixed = frozenset(endpoints) - set(self._named)
        # By the endpoint with the host name.
        self._resolved: dict[str, frozenset[str]] = {}
        self._closing = Event()

    @property
    def endpoints(self) -> frozenset[str]:
        """Every worker's endpoint."""
        return self._fixed.union(*self._resolved.values())

    def start(self) -> None:
        """Starts the look-ups, if any endpoint has a host name."""
        if self._named:
            gevent.spawn(self._run)

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            for endpoint in self._named:
                try:
                    self._resolved[endpoint] = look_up(endpoint)
                except (OSError, UnicodeError) as error:
                    # The name is unknown while no worker runs; known workers may still live.
                    logger.debug("%s: %s", endpoint, error)
            self._closing.wait(LOOK_UP_EVERY_S)


def is_named(endpoint: str) -> bool:
    """Whether `endpoint` has a host name instead of an address."""
    if not endpoint.startswith("tcp://"):
        return False
    try:
        ipaddress.ip_address(_host(endpoint))
    except ValueError:
        return True
    return False


def look_up(endpoint: str) -> frozenset[str]:
    """One endpoint for each address of the host name in `endpoint`.

    Raises:
        OSError: the name does not resolve.
    """
    host, port = _host(endpoint), endpoint.rpartition(":")[2]
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A host with an IPv4 and an IPv6 address is one worker, not two.
    family = min(info[0] for info in infos)
    addresses = {str(info[4][0]) for info in infos if info[0] == family}
    return frozenset(
        f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
        for address in addresses
    )


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
