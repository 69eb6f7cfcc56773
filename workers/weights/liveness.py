"""Whether a trainer is still there: its process listens where the ranks meet."""

import asyncio

CONNECT_TIMEOUT_S = 2.0


async def answers(host: str, port: int) -> bool:
    """Whether something accepts connections at `host`, `port`."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError, ValueError):
        # ValueError: a host that cannot even be looked up, with NUL or too long a label.
        return False
    writer.close()
    return True
