"""Resolves the endpoints in the settings to the endpoints of single workers.

A host name stands for every address that it resolves to: Compose's `--scale`, a headless service
of Kubernetes. `file:PATH` stands for the endpoints in a file. Names and files are read again and
again in a greenlet, because looking up a name blocks; handlers read files, too.
"""

import ipaddress
import logging
import socket

import gevent
from gevent.event import Event

from titopool.wire.run_dir import FILE_SCHEME, is_endpoint, read_endpoints

logger = logging.getLogger(__name__)

# Less than a second, in which a worker that appears gets its first jobs.
LOOK_UP_EVERY_S = 0.5


class Discovery:
    """The endpoints of all workers, as of the last look-up."""

    def __init__(self, endpoints: tuple[str, ...]):
        self._files = [one for one in endpoints if one.startswith(FILE_SCHEME)]
        self._named = [endpoint for endpoint in endpoints if is_named(endpoint)]
        self._fixed = frozenset(endpoints) - {*self._named, *self._files}
        # By the endpoint with the host name, or by `file:PATH`.
        self._resolved: dict[str, frozenset[str]] = {}
        # Lines of files that are no endpoints, by file; each is logged once.
        self._refused: set[tuple[str, str]] = set()
        self.read_files()
        self._closing = Event()

    @property
    def endpoints(self) -> frozenset[str]:
        """Every worker's endpoint."""
        return self._fixed.union(*self._resolved.values())

    def start(self) -> None:
        """Starts the look-ups, if any endpoint has a host name or is in a file."""
        if self._named or self._files:
            gevent.spawn(self._run)

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            in_files = self.read_files()
            named = [one for one in in_files if is_named(one)]
            for endpoint in (*self._named, *named):
                try:
                    self._resolved[endpoint] = look_up(endpoint)
                except (OSError, UnicodeError) as error:
                    # The name is unknown while no worker runs; known workers may still live.
                    logger.debug("%s: %s", endpoint, error)
            for endpoint in self._resolved.keys() - {*self._files, *self._named, *named}:
                del self._resolved[endpoint]
            self._closing.wait(LOOK_UP_EVERY_S)

    def read_files(self) -> list[str]:
        """Reads all files; returns their endpoints."""
        found = []
        for file in self._files:
            try:
                endpoints = read_endpoints(file.removeprefix(FILE_SCHEME))
            except (OSError, UnicodeDecodeError) as error:
                # As for names.
                logger.debug("%s: %s", file, error)
                continue
            for one in [one for one in endpoints if not is_endpoint(one)]:
                endpoints.remove(one)
                if (file, one) not in self._refused:
                    self._refused.add((file, one))
                    logger.error("%s: expected lines tcp://host:port, got %r", file, one)
            found += endpoints
            self._resolved[file] = frozenset(one for one in endpoints if not is_named(one))
        return found


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
