"""The state of the screen, and what keys do to it. No IO."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from titopool.answers.operators import OpenRequest
from titopool.top.snapshot import Snapshot

SORTS: dict[str, Callable[[OpenRequest], Any]] = {
    "age": lambda row: -row.age_s,
    "tokens out": lambda row: -row.tokens_out,
    "tokens in": lambda row: -row.tokens_in,
    "phase": lambda row: row.phase,
    "route": lambda row: row.route,
    "client": lambda row: row.client or "",
    "worker": lambda row: row.workers,
}
PAGE_ROWS = 10
HIDDEN = "this request has another key: only an administrator's key sees its id and aborts it"


@dataclass(frozen=True)
class Abort:
    """Abort this request."""

    request_id: str


class Quit:
    """End."""


Action = Abort | Quit | None


class View:
    """What is shown of the latest snapshot, and how."""

    def __init__(self) -> None:
        self.snapshot = Snapshot(error="no answer yet")
        self.sort = "age"
        self.is_reversed = False
        self.filter = ""
        self.mode: Literal["table", "filter", "confirm"] = "table"
        # Of the last abort.
        self.message = ""
        self._index = 0
        self._selected: OpenRequest | None = None

    @property
    def rows(self) -> list[OpenRequest]:
        """The requests that pass the filter, in order."""
        found = [row for row in self.snapshot.requests if self.filter.lower() in _text_of(row)]
        return sorted(found, key=SORTS[self.sort], reverse=self.is_reversed)

    @property
    def selected(self) -> int:
        """The index in `rows`; it stays with its request while that is there."""
        rows, chosen = self.rows, self._selected
        if chosen is not None and chosen.id is not None:
            for index, row in enumerate(rows):
                if (row.id, row.client) == (chosen.id, chosen.client):
                    self._index = index
        self._index = max(0, min(self._index, len(rows) - 1))
        return self._index

    def update(self, snapshot: Snapshot) -> None:
        """Shows `snapshot`."""
        self.snapshot = snapshot

    def on_key(self, key: str) -> Action:
        """What the user wants after a key; names of keys are those of `titopool/top/keys.py`."""
        if self.mode == "filter":
            self._edit_filter(key)
            return None
        if self.mode == "confirm":
            return self._confirm(key)
        self.message = ""
        match key:
            case "q" | "ctrl-c":
                return Quit()
            case "s":
                names = list(SORTS)
                self.sort = names[(names.index(self.sort) + 1) % len(names)]
            case "r":
                self.is_reversed = not self.is_reversed
            case "/":
                self.mode = "filter"
            case "escape":
                self.filter = ""
            case "up" | "k" | "down" | "j" | "page-up" | "page-down" | "home" | "end":
                self._move(key)
            case "a" | "delete":
                self._ask()
        return None

    def _move(self, key: str) -> None:
        rows = self.rows
        steps = {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "page-up": -PAGE_ROWS,
            "page-down": PAGE_ROWS,
        }
        ends = {"home": 0, "end": len(rows) - 1}
        index = ends[key] if key in ends else self.selected + steps[key]
        self._index = max(0, min(index, len(rows) - 1))
        self._selected = rows[self._index] if rows else None

    def _edit_filter(self, key: str) -> None:
        if key in ("enter", "escape", "ctrl-c"):
            self.filter = self.filter if key == "enter" else ""
            self.mode = "table"
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter += key

    def _ask(self) -> None:
        rows = self.rows
        if not rows:
            self.message = "there is no request to abort"
        elif rows[self.selected].id is None:
            self.message = HIDDEN
        else:
            # Stays the same if the rows change before the answer.
            self._selected = rows[self.selected]
            self.mode = "confirm"

    @property
    def asked(self) -> OpenRequest | None:
        """The request that the question is about."""
        return self._selected if self.mode == "confirm" else None

    def _confirm(self, key: str) -> Action:
        asked = self.asked
        self.mode = "table"
        if key not in ("y", "Y") or asked is None or asked.id is None:
            self.message = "not aborted"
            return None
        return Abort(asked.id)


def _text_of(row: OpenRequest) -> str:
    """What the filter looks at."""
    values = (row.id, row.route, row.client, row.key, row.phase, row.model)
    return " ".join(str(one) for one in (*values, *row.workers, *row.job_ids) if one).lower()
