"""How many requests and connections a front end holds within the descriptors that it may open.

Each connection is one. A process that has no more of them accepts no connection, and so cannot
answer 429 either.
"""

# For sockets to the workers, logs and libraries.
RESERVED = 512
# Connections beyond those of open requests: kept alive, or about to be answered 429.
SPARE = 4096


def limits_within(num_descriptors: int, *, max_open_requests: int) -> tuple[int, int]:
    """How many requests may be open, and how many connections, in one process."""
    room = num_descriptors - min(RESERVED, num_descriptors // 4)
    num_open = min(max_open_requests, room - room // 8)
    return num_open, min(num_open + SPARE, room)
