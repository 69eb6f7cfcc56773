"""The order of workers that every front end has: that of their endpoints."""

import re


def natural_order(endpoint: str) -> list[int | str]:
    """A key that puts worker-2 before worker-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", endpoint)]
