"""TCP connections to workers: which cannot be opened, and why.

Runs in: each worker process, on its event loop, for other workers (`find_faults`), and in the
preflight for its own connections.
"""

import asyncio
import os
from collections.abc import Sequence

# Connections that are opened at the same time: far fewer than a process may have open files.
MAX_AT_ONCE = 64


async def find_faults(endpoints: Sequence[str], timeout_s: float) -> dict[str, str]:
    """What is wrong with a connection to each endpoint (tcp://host:port), without those that open.

    Args:
        timeout_s: of each connection.
    """
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def find_fault(endpoint: str) -> str:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        async with places:
            try:
                async with asyncio.timeout(timeout_s):
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            except OSError as error:
                return describe_fault(error, port, timeout_s)
        writer.close()
        return ""

    faults = await asyncio.gather(*map(find_fault, endpoints))
    return {endpoint: fault for endpoint, fault in zip(endpoints, faults, strict=True) if fault}


def describe_fault(error: OSError, port: object, timeout_s: float) -> str:
    """What was expected of a connection to a worker at `port`, what came, and what to do."""
    match error:
        case TimeoutError():
            return (
                f"expected a TCP connection, got no answer within {timeout_s:g} s; a firewall drops the "
                "packets, or the host is down: open the port from this host to that one"
            )
        case ConnectionRefusedError():
            return (
                "expected a TCP connection, got a refusal: nothing listens there; start the worker with "
                f"--endpoint tcp://0.0.0.0:{port}, or with this address"
            )
    # asyncio's own text has the address in place of the reason.
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"expected a TCP connection, got: {reason}; check the route"
