"""CPU time of a front end for a turn of a session, beside the same chat outside of it and the same ids.

    python -m benchmarks.agent_turns [--turns 2 10 40] [--chars 200 4000] [--rounds 20]

A stub engine answers at once, so a request costs what the front end does for it. In each round an
agent plays a session of as many turns, each with a message of as many characters. Then it sends
`--requests` next turns, whose last messages differ; the same messages to `/v1/chat/completions`; and
the ids of the prompt to `/v1/completions`. The three take turns request by request, so that slow
moments of the machine hit all alike. Figures are medians over the rounds, least and greatest in
brackets.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import requests

from benchmarks.bench import say
from benchmarks.front import FrontEnd, stub_environment, stub_workers
from benchmarks.machine import describe_machine
from benchmarks.processes import running
from benchmarks.report import save
from benchmarks.targets import Engine
from titopool.demo_model import make_tokenizer

KINDS = ("in a session", "chat", "by ids")
COLUMNS = ("turns", "characters a message", "ids in the prompt", *(f"{one}, ms" for one in KINDS))
MAX_TOKENS = 4
# Of the stub workers; more than the longest conversation has.
MAX_MODEL_LEN = 4_000_000
WORD = "word "
SETTLE_S = 0.003
# What a linear conversation with other last messages has (docs/http.md, "Branches").
EXPECTED_REASONS = {"first", "", "fork"}


class FrontEndClient:
    """One connection to a server's only front end, and the CPU time of that."""

    def __init__(self, url: str):
        self._url, self._session = url, requests.Session()
        self._pid = int(self.call("GET", "/live")["pid"])

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = self._session.request(method, self._url + path, json=body, timeout=120)
        if not answer.ok:
            raise SystemExit(f"{path}: {answer.status_code} {answer.text[:500]}")
        found: dict[str, Any] = answer.json() if answer.content else {}
        return found

    def generate(self, path: str, **fields: Any) -> dict[str, Any]:
        return self.call("POST", path, {"max_tokens": MAX_TOKENS, **fields})

    def cpu_s(self) -> float:
        """Of all threads, also those that have ended; `psutil` counts 10 ms at a time."""
        # The CPU clock of another process (man 3 clock_getcpuclockid).
        return time.clock_gettime((~self._pid << 3) | 2)


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tokenizer(folder)
        words = ("--tokenizer", name, "--max-model-len", str(MAX_MODEL_LEN))
        environ = {**stub_environment(), "TITOPOOL_RUN_DIR": str(folder / "run")}
        with stub_workers(1, folder, *words) as endpoints:
            target = FrontEnd(1, endpoints, kind="JSON")
            with running(target, Engine("", {}), environ, folder / "log") as server:
                client = FrontEndClient(server.url)
                runs = [
                    measure(client, turns, chars, options)
                    for chars in options.chars
                    for turns in options.turns
                ]
    result = {
        "machine": describe_machine(), "load": os.getloadavg(), "options": vars(options), "runs": runs,
    }  # fmt: skip
    table = markdown(result)
    print(table)
    out = Path(options.out)
    save(result, out)
    out.with_suffix(".md").write_text(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--turns", type=int, nargs="+", default=[2, 10, 40], help="turns before the measured one"
    )
    parser.add_argument("--chars", type=int, nargs="+", default=[200, 4000], help="of each message")
    parser.add_argument("--rounds", type=int, default=20, help="sessions for each row")
    parser.add_argument("--requests", type=int, default=10, help="of each kind in each round")
    parser.add_argument(
        "--out", default="bench-agent-turns", help="path of the result files, without extension"
    )
    return parser.parse_args()


def measure(
    client: FrontEndClient, turns: int, chars: int, options: argparse.Namespace
) -> dict[str, Any]:
    """A row of the table: milliseconds of CPU a request, of each kind and round."""
    rounds = list[dict[str, float]]()
    num_ids = 0
    # The first round warms up.
    for _ in range(options.rounds + 1):
        figures, num_ids = play_round(client, turns, chars, options.requests)
        rounds.append(figures)
    found = {kind: [one[kind] for one in rounds[1:]] for kind in KINDS}
    medians = ", ".join(f"{statistics.median(found[kind]):.2f} ms {kind}" for kind in KINDS)
    say(f"{turns} turns of {chars} characters, {num_ids} ids: {medians}")
    return {"turns": turns, "chars": chars, "num_ids": num_ids, "cpu_ms": found}


def play_round(
    client: FrontEndClient, turns: int, chars: int, num_requests: int
) -> tuple[dict[str, float], int]:
    """Milliseconds of CPU a request by kind, and the ids of a prompt."""
    made = client.call("POST", "/sessions", {})
    path, messages = f"{made['path']}/chat/completions", conversation(turns, chars)
    known = [messages[0]]
    for message in messages[1:]:
        answer = client.generate(path, messages=[*known, message])
        known += [message, answer["choices"][0]["message"]]
    taken, num_ids = defaultdict[str, float](float), 0
    for number in range(num_requests):
        chat = {"messages": [*known, said(f"last {number}", chars)]}
        ids = timed(client, taken, KINDS[0], path, chat)
        timed(client, taken, KINDS[1], "/v1/chat/completions", chat)
        timed(client, taken, KINDS[2], "/v1/completions", {"prompt": ids})
        num_ids = len(ids)
    check(client, made["session_id"], turns + num_requests)
    return {kind: 1e3 * taken[kind] / num_requests for kind in KINDS}, num_ids


def timed(
    client: FrontEndClient, taken: dict[str, float], kind: str, path: str, fields: dict[str, Any]
) -> list[int]:
    """Adds the CPU seconds of a request; returns the ids of its prompt."""
    before = client.cpu_s()
    answer = client.generate(path, return_token_ids=True, **fields)
    # The front end's work on a request goes on after the end of the answer.
    time.sleep(SETTLE_S)
    taken[kind] += client.cpu_s() - before
    ids: list[int] = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    return ids


def check(client: FrontEndClient, session_id: str, num_turns: int) -> None:
    """The turns went on from the ids of those before; ends the session."""
    turns = client.call("GET", f"/sessions/{session_id}?records=false")["turns"]
    reasons = [one["reason"] for one in turns]
    if len(reasons) != num_turns or not EXPECTED_REASONS.issuperset(reasons):
        raise SystemExit(f"expected {num_turns} turns that go on, got the reasons {reasons}")
    client.call("DELETE", f"/sessions/{session_id}")


def conversation(turns: int, chars: int) -> list[dict[str, Any]]:
    """The system prompt, and a message for each turn."""
    return [said("Be brief.", chars, "system"), *(said(f"turn {i}", chars) for i in range(turns))]


def said(text: str, chars: int, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": f"{text} {WORD * (chars // len(WORD))}"[:chars]}


def markdown(result: dict[str, Any]) -> str:
    """The results as a table."""
    machine, options = result["machine"], result["options"]
    lines = [
        f"{machine['date']}, commit {machine['commit']}, {machine['num_cores']} cores of "
        f"{machine['processor']}, load {result['load'][1]:.1f}; {options['rounds']} rounds of "
        f"{options['requests']} requests",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for run in result["runs"]:
        cells = [f"{run['turns']}", f"{run['chars']:,}", f"{run['num_ids']:,}"]
        for values in run["cpu_ms"].values():
            middle, low, high = statistics.median(values), min(values), max(values)
            cells.append(f"{middle:.1f} ({low:.1f}–{high:.1f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
