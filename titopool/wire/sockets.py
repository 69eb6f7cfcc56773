"""ZeroMQ sockets: endpoints, options and CURVE keys, for both sides.

A worker binds a ROUTER. Every front end connects a DEALER to each worker. Contexts and sockets are
created in the process and thread that use them.
"""

import errno
import os
import socket as sockets
import sys
import tempfile
from pathlib import Path

import zmq

from titopool.errors import ConfigError
from titopool.secret_files import read_secret_file
from titopool.wire.run_dir import SOCKET

# Longest path of a Unix socket: the size of `sun_path` without the final zero.
MAX_IPC_PATH_BYTES = 107
# Messages in a front end that it has not read, of each worker.
MAX_UNREAD = 32
# Characters of a command line that are shown.
MAX_COMMAND = 60
# The end of an endpoint whose port the kernel chooses.
ANY_PORT = ":0"


def worker_endpoint(run_dir: str, index: int) -> str:
    """The endpoint of local worker `index`.

    Raises:
        ConfigError: the path is too long for a Unix socket.
    """
    path = os.path.join(run_dir, SOCKET.format(index))
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            "run_dir: expected a folder in which the path of a Unix socket has at most "
            f"{MAX_IPC_PATH_BYTES} bytes, got {path}; choose a shorter one"
        )
    return f"ipc://{path}"


def listen_address(endpoint: str) -> str:
    """The host in an endpoint, in brackets if it is IPv6; loopback for a Unix socket."""
    if not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def fault_of_listening(host: str, port: int) -> str:
    """Why no process can listen at this address, in words; "" if one can."""
    try:
        with sockets.socket(sockets.AF_INET6 if ":" in host else sockets.AF_INET) as probe:
            probe.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"expected a free port, got {port}, which {holder_of(port)} has"
        return f"expected an address at which this process may listen, got {host}:{port} ({error.strerror})"
    return ""


def holder_of(port: int) -> str:
    """Who has a TCP port of this host, in words."""
    # Only here: it is imported for a message.
    import psutil

    try:
        found = [one for one in psutil.net_connections("tcp") if one.laddr and one.laddr[1] == port]
        # One that listens, before its connections.
        found.sort(key=lambda one: (one.status != psutil.CONN_LISTEN, one.pid or sys.maxsize))
        if found and found[0].pid:
            words = " ".join(psutil.Process(found[0].pid).cmdline())[:MAX_COMMAND]
            # Another user chose them, and a terminal shows them.
            shown = "".join(one if one.isprintable() else "?" for one in words)
            return f"process {found[0].pid} ({shown or 'of no name'})"
    except (psutil.Error, OSError):
        # Not every system shows it.
        pass
    return "a process of another user or container"


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, key_file: str
) -> zmq.Socket[bytes]:
    """The worker's socket, bound to `endpoint`; its `last_endpoint` has the port that it got.

    Raises:
        ConfigError: the address is in use or not this host's, or the key file holds no key.
    """
    socket = context.socket(zmq.ROUTER)
    _set_options(socket)
    if endpoint.startswith("tcp://"):
        # Milliseconds. Detects a host that vanished without closing its connection. On one host the
        # kernel closes it, and a machine that stood still for a while loses no worker.
        socket.heartbeat_ivl = 5_000
        socket.heartbeat_timeout = 20_000
        _, secret = read_curve_key(key_file)
        socket.curve_server = True
        socket.curve_secretkey = secret
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        reason = str(error)
        if error.errno == errno.EADDRINUSE and endpoint.startswith("tcp://"):
            holder = holder_of(int(endpoint.rpartition(":")[2]))
            reason = f"{holder} has its port; choose another, or stop that process"
        raise ConfigError(
            f"endpoint {endpoint}: cannot listen at this address: {reason}"
        ) from error
    return socket


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, key_file: str
) -> zmq.Socket[bytes]:
    """A front end's socket to one worker, which may start later; raises as `make_dealer`."""
    socket = make_dealer(context, endpoint, key_file)
    socket.connect(endpoint)
    return socket


def make_dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, key_file: str
) -> zmq.Socket[bytes]:
    """A front end's socket to one worker, not yet connected: a monitor sees what comes after it.

    Raises:
        ConfigError: the key file holds no key.
    """
    socket = context.socket(zmq.DEALER)
    _set_options(socket)
    # Messages of up to 1 MiB that are not read count against no budget: the others wait in the worker,
    # which has no more of them than results of jobs in flight. With heartbeats of its own, libzmq 4.3.5
    # would end the process when such a worker dies (its issue 4841); the pool's find a vanished host.
    socket.rcvhwm = MAX_UNREAD
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1000
    if endpoint.startswith("tcp://"):
        public, secret = read_curve_key(key_file)
        # The public key is derived from the shared secret and is not published. A front end that
        # has it knows the secret, so the worker needs no list of allowed clients.
        socket.curve_serverkey = public
        socket.curve_publickey = public
        socket.curve_secretkey = secret
    return socket


def _set_options(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 0
    # ZeroMQ must not drop messages. The pool bounds the jobs in flight.
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.ipv6 = True


def read_curve_key(key_file: str) -> tuple[bytes, bytes]:
    """The (public, secret) CURVE key of `key_file`, Z85-encoded. Creates a missing file.

    Raises:
        ConfigError: the file name is empty, the file holds no key or cannot be written, or other
            users may read it.
    """
    if not key_file:
        raise ConfigError(
            "curve_key_file: expected a file name, got nothing; tcp endpoints need a key"
        )
    path = Path(key_file)
    if not path.exists():
        try:
            _make_curve_key(path)
        except OSError as error:
            raise ConfigError(
                f"curve_key_file: expected a folder with space for a new key, got {error}; make space, "
                "or name another file"
            ) from error
    secret = read_secret_file(key_file, "curve_key_file").strip()
    try:
        return zmq.curve_public(secret), secret
    except (ValueError, zmq.ZMQError):
        raise ConfigError(
            f"curve_key_file: expected a CURVE secret key in {key_file}, got other content; delete the "
            "file to get a new key, or copy the other side's file"
        ) from None


def _make_curve_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The draft (mode 0600) is linked when it is complete. So no process reads half a key, and of
    # several processes that start at once one wins.
    with tempfile.NamedTemporaryFile(dir=path.parent) as draft:
        draft.write(zmq.curve_keypair()[1])
        draft.flush()
        try:
            os.link(draft.name, path)
        except FileExistsError:
            pass
