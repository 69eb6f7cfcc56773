"""`titopool doctor --endpoints …`: which pair of hosts cannot connect, before a server starts.

Run it on a front end's host with the workers' endpoints, and on a trainer's host with `--url`, which
also lets workers try each other. Workers need not be ready: they listen before they load.
"""

import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from titopool.client.weights.server_calls import WeightsError, own_address
from titopool.commands.connection import keys
from titopool.deadline import Deadline
from titopool.errors import ConfigError
from titopool.settings.config import ServerConfig
from titopool.wire import messages
from titopool.wire.messages import Heartbeat, Hello
from titopool.wire.run_dir import FILE_SCHEME, is_endpoint, read_endpoints
from titopool.wire.sockets import connect_dealer
from workers.serving.connections import describe_fault

# For each connection, and for a worker's first answer.
TIMEOUT_S = 5.0
# For the front end's answer about its workers: they have 30 s.
WORKERS_TIMEOUT_S = 40.0
REFUSED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check_network(config: ServerConfig, url: str | None) -> int:
    """Prints a line for each pair of hosts; returns the exit code.

    Args:
        config: `endpoints` and `curve_key_file` count.
        url: a front end's, as a trainer reaches it; None: none is asked.
    """
    here = socket.gethostname()
    faults = 0
    for endpoint in _endpoints(config.endpoints):
        for address, result, fault in _check_worker(endpoint, config.curve_key_file):
            print(f"{here} → worker at {address}: {fault or result}", flush=True)
            faults += bool(fault)
    if url is not None:
        is_reached = True
        for result, fault in _check_front_end(url):
            print(f"{here} → {url}: {fault or result}", flush=True)
            faults += bool(fault)
            is_reached = not fault
        if is_reached:
            for pair, result, fault in _check_workers(url):
                print(f"{pair}: {fault or result}", flush=True)
                faults += bool(fault)
    print("all connect" if not faults else f"{faults} do not connect")
    return 1 if faults else 0


def _endpoints(given: Sequence[str]) -> Iterator[str]:
    for one in given:
        if one.startswith(FILE_SCHEME):
            yield from filter(is_endpoint, read_endpoints(one.removeprefix(FILE_SCHEME)))
        else:
            yield one


# ---- a front end's connections -------------------------------------------------------


def _check_worker(endpoint: str, key_file: str) -> Iterator[tuple[str, str, str]]:
    """For each address of an endpoint: the address, what was found, and what is wrong ("")."""
    if endpoint.startswith("ipc://"):
        yield endpoint, *_greet(endpoint, key_file)
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        yield (
            endpoint,
            "",
            (
                f"expected a name that resolves, got: {error.strerror or error}; check DNS or /etc/hosts "
                "of this host"
            ),
        )
        return
    for family, _, _, _, address in found:
        shown = f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        if fault := _connect(family, address):
            yield shown, "", fault
        else:
            yield shown, *_greet(f"tcp://{shown}", key_file)


def _connect(family: int, address: tuple[object, ...]) -> str:
    """What is wrong with a TCP connection; "" if nothing."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(TIMEOUT_S)
        try:
            probe.connect(address)
        except OSError as error:
            return describe_fault(error, address[1], TIMEOUT_S)
    return ""


def _greet(endpoint: str, key_file: str) -> tuple[str, str]:
    """What a worker answers to `Hello`, and what is wrong ("")."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        worker = connect_dealer(context, endpoint, key_file)
    except ConfigError as error:
        return "", str(error)
    monitor = worker.get_monitor_socket(REFUSED)
    try:
        worker.send(messages.encode(Hello()))
        poller = zmq.Poller()
        poller.register(worker, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        deadline = Deadline.after(TIMEOUT_S)
        while not deadline.has_passed:
            ready = dict(poller.poll(int(1000 * deadline.left_s)))
            if worker in ready:
                beat = messages.decode_from_worker(worker.recv())
                if isinstance(beat, Heartbeat):
                    return f"worker {beat.worker_id} is {beat.phase}", ""
            elif monitor in ready and recv_monitor_message(monitor)["event"] & REFUSED:
                return "", (
                    "expected a worker with the same key, got a connection that was closed before it "
                    "was set up; copy the worker's curve_key_file to this host, and check that a "
                    "worker listens at this port"
                )
    except messages.UNREADABLE as error:
        return "", f"expected a worker of this release, got an answer that cannot be read: {error}"
    finally:
        worker.disable_monitor()
        monitor.close(linger=0)
        worker.close(linger=0)
        context.term()
    return "", (
        f"expected a worker's answer within {TIMEOUT_S:g} s, got none; another program listens at "
        "this port, or the worker hangs: see its log"
    )


# ---- a trainer's connections ---------------------------------------------------------


def _check_front_end(url: str) -> Iterator[tuple[str, str]]:
    """What was found at a front end, and what is wrong ("")."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/live", timeout=TIMEOUT_S) as answer:
            yield f"answers with {answer.status}", ""
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        yield (
            "",
            (
                f"expected an answer of the front end, got: {reason}; check its `host` and `port`, and open "
                "the port from this host to that one"
            ),
        )
        return
    try:
        address = own_address(url)
    except WeightsError as error:
        yield "", str(error)
        return
    chosen = [f"{name}={os.environ[name]}" for name in INTERFACES if name in os.environ]
    yield (
        (
            f"for weight updates, workers connect to this host at {address} (`host` of WeightsClient) and "
            f"NCCL or gloo to {' and '.join(chosen) or 'the interface that they choose'}; open all ports "
            "between trainer and workers"
        ),
        "",
    )


# ---- workers' connections to each other ----------------------------------------------


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another host must not get the key."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def _check_workers(url: str) -> Iterator[tuple[str, str, str]]:
    """Who connects to whom, what was found, and what is wrong ("")."""
    pair = "worker → worker"
    # An administrator's: workers do something for the client.
    key = keys().admin_key
    request = urllib.request.Request(
        f"{url.rstrip('/')}/workers/connections", data=b"",
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )  # fmt: skip
    try:
        with _opener.open(request, timeout=WORKERS_TIMEOUT_S) as answer:
            found = json.load(answer)
        for one in found["faults"]:
            worker = _shown(one["worker"], one["endpoint"])
            if one["peer_endpoint"] is None:
                yield f"front end → worker {worker}", "", one["reason"]
            else:
                peer = _shown(one["peer"], one["peer_endpoint"])
                yield f"worker {worker} → worker {peer}", "", one["reason"]
        if not found["faults"]:
            tried = f"all {found['num_tried']} connections open" if found["num_tried"] else ""
            yield pair, tried or "nothing to try: one worker, or all on the front end's host", ""
    except urllib.error.HTTPError as error:
        # No fault of a connection: a key that is missing, or a front end of an older release.
        reason = f"status {error.code}"
        with suppress(ValueError, LookupError, TypeError):
            reason = json.loads(error.read())["error"]["message"]
        yield pair, f"not checked: {reason}", ""
    except (OSError, ValueError, LookupError, TypeError) as error:
        yield pair, "", f"expected the front end's answer, got: {error}; check --url, and its log"


def _shown(name: str | None, endpoint: str) -> str:
    return f"{name or '?'} at {endpoint.removeprefix('tcp://')}"
