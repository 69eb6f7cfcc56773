"""Lets every worker try to connect to every other one.

Runs in: each gunicorn process, in a handler's greenlet. A worker tries only the endpoints of this
pool, which no client names.
"""

import ipaddress
from collections.abc import Sequence

from app.pool.command_sender import CommandSender
from app.pool.link import WorkerView
from titopool.answers.operators import ConnectionFault
from titopool.wire.commands import TryConnections
from titopool.wire.sockets import listen_address

# Of one connection; and of all that a worker tries, 64 at a time.
CONNECT_TIMEOUT_S, ALL_TIMEOUT_S = 5.0, 30.0

LOOPBACK = (
    "expected an address that other hosts reach, got one of loopback; name the worker by its host's "
    "address in `endpoints`"
)


def find_connection_faults(
    commands: CommandSender, views: Sequence[WorkerView]
) -> tuple[int, list[ConnectionFault]]:
    """The number of pairs that were tried, and what is wrong.

    Args:
        views: all workers. Those that listen at no TCP address are all on the front end's host and
            need no connection.
    """
    phases = {one.endpoint: one.phase for one in views if one.endpoint.startswith("tcp://")}
    names = {one.endpoint: one.heartbeat.worker_id for one in views if one.heartbeat}
    asked = [one for one in commands.known_workers() if one.endpoint in phases]
    own = {one for one in phases if _is_loopback(one)}

    def peers_of(endpoint: str) -> list[str]:
        # From another host, a loopback address would reach that host itself.
        return [one for one in phases if one != endpoint and (endpoint in own or one not in own)]

    outcomes = commands.gather_outcomes(
        asked, lambda index: TryConnections(peers_of(asked[index].endpoint), CONNECT_TIMEOUT_S),
        timeout_s=ALL_TIMEOUT_S,
    )  # fmt: skip
    failures = {one.endpoint: one.error.message for one in outcomes if one.error is not None}
    found = {one.endpoint: one.result["faults"] for one in outcomes if one.result is not None}
    faults = []
    for endpoint, phase in phases.items():
        name = names.get(endpoint)
        if endpoint in found:
            hidden = {} if endpoint in own else dict.fromkeys(sorted(own), LOOPBACK)
            faults += [
                ConnectionFault(
                    worker=name,
                    endpoint=endpoint,
                    peer=names.get(peer),
                    peer_endpoint=peer,
                    reason=reason,
                )
                for peer, reason in (hidden | found[endpoint]).items()
            ]
        else:
            reason = failures.get(endpoint) or (
                f"expected a worker that tries its connections, got one whose phase is {phase}; ask "
                "/ready, and see its log"
            )
            faults.append(
                ConnectionFault(
                    worker=name, endpoint=endpoint, peer=None, peer_endpoint=None, reason=reason
                )
            )
    return sum(len(peers_of(one)) for one in found), faults


def _is_loopback(endpoint: str) -> bool:
    return ipaddress.ip_address(listen_address(endpoint).strip("[]")).is_loopback
