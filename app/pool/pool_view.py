"""What this front end knows of the pool as a whole: model, weights, pause and adapters.

Learned from heartbeats, and sent on to all workers in `Hello` (`titopool/wire/pool_state.py`).
"""

import logging

import msgspec

from titopool.errors import ModelChanged
from titopool.wire.messages import Heartbeat, WorkerFacts
from titopool.wire.pool_state import PoolState

logger = logging.getLogger(__name__)

# The workers of a pool must have equal values.
COMPARED_FACTS = (
    "model", "vocab_size", "max_model_len", "max_logprobs", "world_size", "tool_call_parser",
    "reasoning_parser", "tokenizer_digest",
)  # fmt: skip


# Versions whose labels are kept. A request rarely spans more.
MAX_LABELS = 64


class PoolView:
    """Like `Pool` without a clock: callers pass the monotonic time `now`."""

    def __init__(self) -> None:
        # Of the model that the pool serves; kept while all workers restart.
        self.facts: WorkerFacts | None = None
        # As last merged; `snapshot` has the time that the pause has left.
        self.state = PoolState()
        self._pause_end = 0.0
        # Of the last versions that served, by version.
        self._labels: dict[int, str] = {}

    def adopt_model(self, facts: WorkerFacts) -> ModelChanged | None:
        """Sets the pool's model; a new model starts with an empty state.

        Returns:
            The error for requests that were checked for the old model; None if nothing changed.
        """
        before, self.facts = self.facts, facts
        changed = self.model_change_since(before)
        if changed is not None:
            logger.warning("the pool's model has changed: %s", changed)
        if changed is not None or self.state.model != facts.model:
            self.state, self._labels = PoolState(model=facts.model), {}
        return changed

    def model_change_since(self, checked: WorkerFacts | None) -> ModelChanged | None:
        """The error for a request that was checked for the model `checked`; None if it may run.

        Any model may run a request whose `checked` is None.
        """
        facts = self.facts
        if checked is None or facts is None or not (text := difference(checked, facts)):
            return None
        return ModelChanged(
            f"the workers now serve {facts.model!r}, but the request was checked for "
            f"{checked.model!r} ({text}); send the request again if the new model is right",
            retry_after_s=1,
        )

    def merge(self, beat: Heartbeat, now: float) -> None:
        """Learns what a worker knows of the pool, if the worker serves the pool's model."""
        if beat.facts is None or beat.facts.model != self.state.model:
            return
        before, self.state = self.state, self.state.merged(beat.pool)
        if self.state.pause is not before.pause:
            self._pause_end = now + self.state.pause.lease_left_s
        weights = self.state.weights
        if weights is not before.weights:
            # Last in the order, so that the oldest is dropped first.
            self._labels.pop(weights.version, None)
            self._labels[weights.version] = weights.shown_label
            if len(self._labels) > MAX_LABELS:
                del self._labels[next(iter(self._labels))]

    def label_of(self, version: int) -> str:
        """The trainer's name for a version; the version as text if none is known."""
        return self._labels.get(version, str(version))

    def snapshot(self, now: float) -> PoolState:
        """The state as of `now`, as messages carry it; an expired pause has no mode."""
        pause = self.state.pause
        left_s = max(0.0, self._pause_end - now)
        pause = msgspec.structs.replace(
            pause, mode=pause.mode if left_s else None, lease_left_s=left_s
        )
        return msgspec.structs.replace(self.state, pause=pause)

    def phase_of(self, beat: Heartbeat) -> tuple[str, str]:
        """A worker's phase as the pool sees it, and a reason where the phase alone is unclear."""
        if beat.facts is None or self.facts is None:
            return beat.phase, ""
        if text := difference(self.facts, beat.facts):
            return "mismatched", text
        if beat.phase == "ready" and not beat.weights.serves_as(self.state.weights):
            # The worker learns of the update from the next Hello.
            return "stale", ""
        stood_s = beat.loop_stood_s
        return beat.phase, f"its event loop has stood for {stood_s:.0f} s" if stood_s else ""

    def adapters_of(self, beat: Heartbeat) -> set[str]:
        """Names of the LoRA adapters that a worker has in the pool's version."""
        return {
            name
            for name, record in self.state.adapters.by_name.items()
            if beat.adapters.get(name) == record.version
        }


def difference(expected: WorkerFacts, facts: WorkerFacts) -> str:
    """How `facts` differ from `expected`, as a text; "" if they are alike."""
    for name in COMPARED_FACTS:
        value, expected_value = getattr(facts, name), getattr(expected, name)
        if value != expected_value:
            return f"expected {name} {expected_value}, got {value}"
    return ""
