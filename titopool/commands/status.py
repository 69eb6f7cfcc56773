"""`titopool status`: a running server on one screen, from `/ready`, `/v1/models`, `/metrics`, `/weights`."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import click
import msgspec
from msgspec import UNSET

from titopool.answers.operators import Models, ReadyWorker
from titopool.answers.weights import Weights, WorkerWeights
from titopool.commands.connection import Keys, Unreachable, get, keys, ready_of
from titopool.commands.help import Command, console, json_option, url_option

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


@click.command(
    "status", cls=Command,
    examples=[
        "titopool status",
        "titopool status --url https://host-a:8000 --json",
        "until titopool status > /dev/null; do sleep 5; done",
    ],
)  # fmt: skip
@url_option
@json_option
def status(url: str, as_json: bool) -> int:
    """Show the workers of a running server: phase, weights, load, jobs, last update.

    Ends with 0 if a worker is ready, 1 if none is, 3 if no server answers.
    """
    try:
        found = facts_of(url, keys())
    except Unreachable as error:
        print(json.dumps({"url": url, "error": str(error)}) if as_json else f"titopool: {error}",
              file=sys.stdout if as_json else sys.stderr)  # fmt: skip
        return EXIT_UNREACHABLE
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return EXIT_READY if found["ready"] else EXIT_NOT_READY


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
    return {
        "url": url,
        "ready": body.ready,
        "draining": body.draining,
        "model": listed[0].id if listed else None,
        "max_model_len": listed[0].max_model_len if listed else None,
        "adapters": {one.id: one.version for one in listed[1:]},
        "waiting_prompts": metrics.get(("titopool_waiting_prompts", "")),
        "needs_key": is_denied,
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


# ---- screen --------------------------------------------------------------------------


def show(found: Mapping[str, Any]) -> None:
    """Prints the facts as a table."""
    from rich.table import Table

    screen = console()
    word = "draining" if found["draining"] else "ready" if found["ready"] else "not ready"
    screen.print(f"[bold]{word}[/]  {found['url']}")
    model = found["model"] or ("needs the key" if found["needs_key"] else "none yet")
    facts = [f"model {model}"]
    if found["max_model_len"] is not None:
        facts.append(f"{found['max_model_len']:,} tokens at most")
    if found["waiting_prompts"] is not None:
        facts.append(f"{found['waiting_prompts']:,} prompts wait")
    facts += [f"adapter {name} {version}" for name, version in found["adapters"].items()]
    screen.print(", ".join(facts), markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", "phase", "since"):
        table.add_column(name)
    for name in ("weights", "load", "jobs", "failed", "tokens", "cached"):
        table.add_column(name, justify="right")
    table.add_column("last update")
    for one in found["workers"]:
        table.add_row(*_cells(one))
    screen.print(table)
    for one in found["workers"]:
        if one.get("reason"):
            screen.print(
                f"{one['worker'] or one.get('endpoint', '?')}: {one['reason']}",
                markup=False,
                soft_wrap=True,
            )


def _cells(worker: Mapping[str, Any]) -> list[str]:
    prompt, cached = worker["prompt_tokens"], worker["cached_tokens"]
    since = worker["phase_s"]
    return [
        worker["worker"] or "?",
        worker["phase"] + (", paused" if worker["is_paused"] else ""),
        "" if since is None else duration(since),
        _number(worker["weight_version"]),
        "" if worker["sequences"] is None else f"{worker['sequences']:,}/{worker['slots']:,}",
        _number(worker["completed_jobs"]),
        _number(worker["failed_jobs"]),
        _number(worker["completion_tokens"]),
        f"{100 * cached / prompt:.0f} %" if prompt else "",
        worker["last_update"] or "",
    ]


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def duration(seconds: float) -> str:
    """Seconds as `12 s`, `3 min`, `5 h` or `2 d`."""
    for limit, size, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
