"""`titopool status`: a running server, from /ready, /v1/models, /metrics, /weights and /requests."""

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import click
import msgspec
from msgspec import UNSET

from titopool.answers.operators import Models, OpenRequests, ReadyWorker
from titopool.answers.weights import Weights, WorkerWeights
from titopool.commands.connection import Keys, Unreachable, get, keys, ready_of
from titopool.commands.help import Command, Option, Seconds, console, json_option, url_option

EXIT_READY, EXIT_NOT_READY, EXIT_UNREACHABLE = 0, 1, 3
# Counters of `/metrics` for each worker, by the name that the JSON object has for them.
COUNTERS = {
    "completed_jobs": "completed_jobs_total",
    "failed_jobs": "failed_jobs_total",
    "aborted_jobs": "aborted_jobs_total",
    "prompt_tokens": "prompt_tokens_total",
    "cached_tokens": "cached_tokens_total",
    "completion_tokens": "completion_tokens_total",
}
GAUGES = {"sequences": "sequences", "slots": "slots"}
PREFIX = "titopool_worker_"
# Of the requests in flight, the oldest.
MAX_REQUESTS = 1000


@click.command(
    "status", cls=Command,
    examples=[
        "titopool status",
        "titopool status --watch",
        "titopool status --url https://host-a:8000 --json",
        "until titopool status > /dev/null; do sleep 5; done",
    ],
)  # fmt: skip
@url_option
@click.option(
    "--watch", cls=Option, section="Output", is_flag=True,
    help="Show it again and again, with tokens a second. Ctrl-C ends.",
)  # fmt: skip
@click.option(
    "--interval-s", cls=Option, section="Output", type=Seconds(), default=1.0, show_default=True,
    metavar="SECONDS", help="Between two looks of --watch.",
)  # fmt: skip
@json_option
def status(url: str, watch: bool, interval_s: float, as_json: bool) -> int:
    """Show the workers and the requests in flight of a running server.

    Of a worker: phase, weights, load, jobs, last update. The oldest requests come first. Ends with 0
    if a worker is ready, 1 if none is, 3 if no server answers.
    """
    if watch and as_json:
        raise click.UsageError("--watch: expected a screen, got --json; leave one of them out")
    if watch:
        return show_again(url, interval_s)
    try:
        found = facts_of(url, keys())
    except Unreachable as error:
        print(json.dumps({"url": url, "error": str(error)}) if as_json else f"titopool: {error}",
              file=sys.stdout if as_json else sys.stderr)  # fmt: skip
        return EXIT_UNREACHABLE
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        # Only here: rich takes longer to import than a server to answer.
        from titopool.commands import status_screen

        screen = console()
        screen.print(status_screen.of(found, width=screen.width), soft_wrap=True)
    return EXIT_READY if found["ready"] else EXIT_NOT_READY


def show_again(url: str, interval_s: float) -> int:
    """Draws the screen until Ctrl-C, and returns the exit code of the last look.

    While no server answers, the last screen stays and says why.
    """
    from rich.live import Live

    from titopool.commands import status_screen

    screen = console()
    found: dict[str, Any] = {}
    rates: dict[str, float] = {}
    looked_s, code = 0.0, EXIT_UNREACHABLE
    with contextlib.suppress(KeyboardInterrupt), Live(console=screen, screen=True) as live:
        while True:
            before, fault = found, ""
            try:
                found = facts_of(url, keys())
                now_s = time.monotonic()
                rates, looked_s = rates_of(before, found, now_s - looked_s), now_s
                code = EXIT_READY if found["ready"] else EXIT_NOT_READY
            except Unreachable as error:
                fault, code = f"{error}; trying again", EXIT_UNREACHABLE
            shown = status_screen.of(
                found, rates, width=screen.width, fault=fault, height=screen.height
            )
            live.update(shown, refresh=True)
            time.sleep(interval_s)
    return code


def rates_of(
    before: Mapping[str, Any], found: Mapping[str, Any], seconds: float
) -> dict[str, float]:
    """Completion tokens a second by worker, of those that both looks have; a restart counts from 0."""
    counts = {one["worker"]: one["completion_tokens"] for one in before.get("workers", ())}
    rates = {}
    for one in found["workers"]:
        now, then = one["completion_tokens"], counts.get(one["worker"])
        if now is not None and then is not None:
            rates[one["worker"]] = (now - then if now >= then else now) / seconds
    return rates


# ---- facts ---------------------------------------------------------------------------


def facts_of(url: str, given: Keys) -> dict[str, Any]:
    """What the server says of itself. What a key does not open is null.

    Raises:
        Unreachable: no titopool server answers.
    """
    body = ready_of(url, given.api_key)
    models = get(url, "/v1/models", given.api_key)
    is_denied = models.status in (401, 403)
    listed = models.read(Models).data if models.status == 200 else []
    metrics = _metrics(url, given)
    updates = _updates(url, given)
    listed_requests = get(url, f"/requests?limit={MAX_REQUESTS}", given.admin_key)
    open_requests = listed_requests.read(OpenRequests) if listed_requests.status == 200 else None
    return {
        "url": url,
        "ready": body.ready,
        "draining": body.draining,
        "model": listed[0].id if listed else None,
        "max_model_len": listed[0].max_model_len if listed else None,
        "adapters": {one.id: one.version for one in listed[1:]},
        "waiting_prompts": metrics.get(("titopool_waiting_prompts", "")),
        "needs_key": is_denied,
        "requests": msgspec.to_builtins(open_requests) if open_requests else None,
        "workers": [_worker(one, metrics, updates.get(one.worker)) for one in body.workers],
    }


def _worker(
    worker: ReadyWorker, metrics: Mapping[tuple[str, str], int], weights: WorkerWeights | None
) -> dict[str, Any]:
    """What `/ready`, `/metrics` and `/weights` say of a worker; `weights` None: without the admin key."""
    is_paused = None if weights is None or weights.is_paused is UNSET else weights.is_paused
    return {
        **msgspec.to_builtins(worker),
        **_figures(worker.worker or "", metrics),
        "is_paused": is_paused,
        "last_update": _last_update(weights) if weights else None,
    }


def _metrics(url: str, given: Keys) -> dict[tuple[str, str], int]:
    """Values by name and worker; empty without the key."""
    # Takes as long to import as all the rest.
    from prometheus_client.parser import text_string_to_metric_families

    answer = get(url, "/metrics", given.api_key)
    if answer.status != 200:
        return {}
    return {
        (sample.name, sample.labels.get("worker", "")): int(sample.value)
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if set(sample.labels) <= {"worker"} and sample.value == sample.value
    }


def _figures(worker: str, metrics: Mapping[tuple[str, str], int]) -> dict[str, int | None]:
    names = GAUGES | COUNTERS
    return {name: metrics.get((PREFIX + metric, worker)) for name, metric in names.items()}


def _updates(url: str, given: Keys) -> dict[str | None, WorkerWeights]:
    """What each worker says of its weights; empty without the admin key."""
    answer = get(url, "/weights", given.admin_key)
    if answer.status != 200:
        return {}
    return {one.worker: one for one in answer.read(Weights).workers}


def _last_update(worker: WorkerWeights) -> str | None:
    """How the worker's last update ended, in words; None if that is not known."""
    if worker.last_update is UNSET:
        return None
    if reason := worker.last_end or worker.why_behind:
        return reason
    if worker.last_update:
        return f"applied, from {worker.last_staging or 'the pool'}"
    return "none"
