"""The metrics that front ends count, with their labels and bounds.

docs/operators.md lists them; `tests/engine/text/test_metrics.py` compares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Seconds: of a whole request, until its first token, in the queue.
REQUEST_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800,
)  # fmt: skip
# Seconds between two chunks of a stream.
TOKEN_BOUNDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5,
    5,
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A counter, or with `bounds` a histogram."""

    name: str
    help: str
    labels: tuple[str, ...]
    bounds: Sequence[float] = ()

    @property
    def num_values(self) -> int:
        """A counter's value; or the numbers between the bounds, then the sum of all values."""
        return len(self.bounds) + 2 if self.bounds else 1


REQUESTS = Family(
    "titopool_http_requests",
    "HTTP requests that have ended; code: the error's, empty for a success",
    ("route", "method", "status", "code"),
)
REQUEST_SECONDS = Family(
    "titopool_http_request_seconds",
    "from a request's head to the end of its answer",
    ("route",),
    REQUEST_BOUNDS,
)
FIRST_TOKEN_SECONDS = Family(
    "titopool_time_to_first_token_seconds",
    "from a request's head to its first token in the front end",
    ("route",),
    REQUEST_BOUNDS,
)
INTER_TOKEN_SECONDS = Family(
    "titopool_inter_token_seconds",
    "between two chunks of a stream",
    ("route",),
    TOKEN_BOUNDS,
)
TOKENS = Family(
    "titopool_tokens",
    "tokens of completed prompts; kind: prompt or completion",
    ("route", "kind"),
)
QUEUE_SECONDS = Family(
    "titopool_queue_wait_seconds",
    "from a prompt's arrival in the queue until it is sent to a worker",
    (),
    REQUEST_BOUNDS,
)
PLACED_JOBS = Family(
    "titopool_placed_jobs",
    "prompts sent to a worker; reason: why it was chosen",
    ("worker", "reason"),
)
UNKNOWN_FIELDS = Family(
    "titopool_unknown_fields",
    "fields of bodies that the server does not know and accepts; its log names each once",
    ("route",),
)
SESSION_BRANCHES = Family(
    "titopool_session_branches",
    "branches that turns of sessions have begun; reason: why",
    ("reason",),
)
FAMILIES = (
    REQUESTS, REQUEST_SECONDS, FIRST_TOKEN_SECONDS, INTER_TOKEN_SECONDS, TOKENS, QUEUE_SECONDS,
    PLACED_JOBS, UNKNOWN_FIELDS, SESSION_BRANCHES,
)  # fmt: skip
