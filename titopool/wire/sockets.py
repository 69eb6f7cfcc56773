"""ZeroMQ sockets as both sides need them: who binds, their options, and CURVE keys.

A worker binds a ROUTER, every front-end process connects a DEALER to each worker. Contexts
and sockets are made in the process and thread that use them.
"""

import os
import tempfile
from pathlib import Path

import zmq

from titopool.errors import ConfigError

# A path of a Unix socket longer than this cannot be bound (sun_path, less the final zero).
MAX_IPC_PATH_BYTES = 107


def worker_endpoint(run_dir: str, index: int) -> str:
    """The endpoint of local worker `index`.

    Raises:
        ConfigError: the path is too long for a Unix socket.
    """
    path = os.path.join(run_dir, f"worker-{index}")
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"run_dir: expected a path that leaves room for a Unix socket "
            f"({MAX_IPC_PATH_BYTES} bytes in all), got {path}"
        )
    return f"ipc://{path}"


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, key_file: str
) -> zmq.Socket[bytes]:
    """The worker's socket, bound to `endpoint`.

    Raises:
        ConfigError: the address is in use or not one of this host.
    """
    socket = context.socket(zmq.ROUTER)
    _set_options(socket)
    if endpoint.startswith("tcp://"):
        _, secret = read_curve_key(key_file)
        socket.curve_server = True
        socket.curve_secretkey = secret
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"endpoint {endpoint}: cannot listen there: {error}") from error
    return socket


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, key_file: str
) -> zmq.Socket[bytes]:
    """A front end's socket to one worker; the worker need not be there yet."""
    socket = context.socket(zmq.DEALER)
    _set_options(socket)
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1000
    if endpoint.startswith("tcp://"):
        public, secret = read_curve_key(key_file)
        # The public key is derived from the shared secret and published nowhere, so knowing
        # it proves knowledge of the secret: the worker needs no list of allowed clients.
        socket.curve_serverkey = public
        socket.curve_publickey = public
        socket.curve_secretkey = secret
    socket.connect(endpoint)
    return socket


def _set_options(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 0
    # No message may be dropped. What is under way is bounded by the windows of the pool.
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.ipv6 = True
    # A host that vanishes without closing its connection is noticed by the transport.
    socket.heartbeat_ivl = 5_000
    socket.heartbeat_timeout = 20_000


def read_curve_key(key_file: str) -> tuple[bytes, bytes]:
    """The (public, secret) CURVE key in `key_file`, in Z85; the file is made when missing.

    Raises:
        ConfigError: there is no file name, or the file holds no key.
    """
    if not key_file:
        raise ConfigError("curve_key_file: expected a file, got nothing; tcp endpoints need a key")
    path = Path(key_file)
    if not path.exists():
        _make_curve_key(path)
    secret = path.read_bytes().strip()
    try:
        return zmq.curve_public(secret), secret
    except (ValueError, zmq.ZMQError):
        raise ConfigError(f"curve_key_file: expected a CURVE secret key in {key_file}") from None


def _make_curve_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside (with mode 0600) and linked: of several processes that start at once,
    # one wins, and nobody reads half a key.
    with tempfile.NamedTemporaryFile(dir=path.parent) as draft:
        draft.write(zmq.curve_keypair()[1])
        draft.flush()
        try:
            os.link(draft.name, path)
        except FileExistsError:
            pass
