"""aiohttp's sessions of a client, one for each event loop that uses it.

A session ends with its loop (asyncio ends the loop's asynchronous generators), or with its client. A
child that this process forks inherits none.
"""

import asyncio
import ctypes
import os
import socket
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakSet, finalize

import aiohttp

CONNECT_TIMEOUT_S = 30.0
# Less than the server keeps an idle connection (75 s), so that no request meets its end.
KEEPALIVE_S = 60.0
READ_BYTES = 2**20


class Sessions:
    """The sessions of one client. Loops of several threads may share it."""

    def __init__(self) -> None:
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._open: dict[
            asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[Any, None]]
        ] = {}
        # What a collected cycle held may be destroyed in any order, and a connector that is destroyed
        # before its session has closed logs. So the sessions are no part of the client's cycle.
        self._end = finalize(self, self._open.clear)
        # At the interpreter's end `_join_all` cancels the calls first; a session that closes before
        # would end them with an error.
        self._end.atexit = False

    async def get(self) -> aiohttp.ClientSession:
        """The session of the running loop."""
        loop = asyncio.get_running_loop()
        found = self._open.get(loop)
        if found is None or found[0].closed:
            for one in [one for one in list(self._open) if one.is_closed()]:
                self._open.pop(one, None)
            # Nothing here waits, so that no other task of the loop opens a second one meanwhile.
            lifetime = _session()
            found = self._open[loop] = await anext(lifetime), lifetime
        return found[0]

    async def close(self) -> None:
        """Closes the running loop's session. Those of other loops close in their loops."""
        own = self._open.pop(asyncio.get_running_loop(), None)
        self._open.clear()
        if own is not None:
            await own[1].aclose()

    def leave(self) -> None:
        """Forgets the sessions, which are the parent's, in a forked child."""
        # A reference that nobody drops, not even at the interpreter's end: destructors would log.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._open))
        self._end.detach()
        self._begin()


async def _session() -> AsyncGenerator[aiohttp.ClientSession, None]:
    async with aiohttp.ClientSession(
        # The server bounds how many requests are open.
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEPALIVE_S, socket_factory=_socket
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        read_bufsize=READ_BYTES,
        # Proxies of the environment, as all tools have it.
        trust_env=True,
    ) as session:
        yield session


def _socket(address: Any) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    _sockets.add(made)
    return made


_all: WeakSet[Sessions] = WeakSet()
_sockets: WeakSet[socket.socket] = WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: gives up all connections, which only the parent may use and end.

    Each descriptor then names /dev/null. What the child still does with it does not reach the
    parent's selector, and the server sees at once when the parent closes the connection.
    """
    for sessions in list(_all):
        sessions.leave()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for one in list(_sockets):
        if one.fileno() >= 0:
            os.dup2(null, one.fileno(), inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_leave_to_parent)
