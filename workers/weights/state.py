"""The state machine of a worker's weight updates; it has no clock and no engine.

    CLOSED ─join─► JOINING ─joined─► OPEN ─begin─► RECEIVING ─prepare─► PREPARING ─prepared─┐
       ▲                              ▲ ▲                                                   │
       └── end (except from APPLYING) │ └──── applied ───── APPLYING ◄──apply── PREPARED ◄──┘

An update without a group, from a folder or from another worker, begins in CLOSED or OPEN and returns
there. Every other state has a deadline.
A transition that the state does not allow raises `Conflict` with the state, and changes nothing.
Times are monotonic, in seconds.
"""

from enum import StrEnum

import msgspec

from titopool.errors import Conflict
from titopool.wire.pool_state import PoolWeights

# Of a model that is neither the old one nor the new one: they equal no weights of a pool.
UNKNOWN_WEIGHTS = PoolWeights(update_id="unknown", is_initial=False)


class Phase(StrEnum):
    """How far a group or an update is."""

    CLOSED = "closed"
    JOINING = "joining"
    OPEN = "open"
    RECEIVING = "receiving"
    PREPARING = "preparing"
    PREPARED = "prepared"
    APPLYING = "applying"


class WeightState:
    """One worker's group and update, if any, and the weights that the worker serves."""

    def __init__(self, *, timeout_s: float):
        """Each step must end within `timeout_s`."""
        self._timeout_s = timeout_s
        self.phase = Phase.CLOSED
        self.session = ""
        # The weights that the update in progress brings.
        self.update: PoolWeights | None = None
        self.deadline: float | None = None
        # Whether `update` needs no group.
        self._is_apart = False
        # The weights that the worker serves.
        self.weights = PoolWeights()
        # Why the last group or update ended early.
        self.last_end = ""
        # When the trainer last did something in its session.
        self._last_active = 0.0

    @property
    def is_resting(self) -> bool:
        """Whether no step is in progress: no commit, and no update."""
        return self.phase in (Phase.CLOSED, Phase.OPEN)

    @property
    def is_receiving_tensors(self) -> bool:
        """Whether an update receives its tensors from the group."""
        return self.phase is Phase.RECEIVING and not self.is_apart

    @property
    def is_apart(self) -> bool:
        """Whether an update without a group is in progress: from a folder or another worker."""
        return self.update is not None and self._is_apart

    @property
    def has_unknown_weights(self) -> bool:
        """Whether the model is neither the old one nor the new one."""
        return self.weights is UNKNOWN_WEIGHTS

    def describe(self) -> str:
        """The state in words, for error messages."""
        parts = [f"the state is {self.phase}"]
        if self.session:
            parts.append(f"session {self.session}")
        if self.update is not None:
            parts.append(f"update {self.update.update_id} to version {self.update.version}")
        text = ", ".join(parts) + f"; the weights are version {self.weights.version}"
        return (
            f"{text}; the last session or update ended: {self.last_end}" if self.last_end else text
        )

    def conflict(self, what: str, expected: str) -> Conflict:
        """The error of the call `what`, which needs another state: `expected`, in words."""
        return Conflict(f"{what}: expected {expected}; {self.describe()}")

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase = phase
        if not self.is_apart:
            # An update without a group does not show that the session's trainer is alive.
            self._last_active = now
        # A prepared worker waits until the others are prepared, each within its own timeout.
        timeout_s = self._timeout_s * (2 if phase is Phase.PREPARED else 1)
        self.deadline = None if self.is_resting else now + timeout_s

    def has_expired(self, now: float) -> bool:
        """Whether the deadline has passed; the caller then ends the group, or the worker."""
        return self.deadline is not None and now > self.deadline

    def idle_s(self, now: float) -> float:
        """Seconds since the trainer last did something in its session."""
        return now - self._last_active

    # ---- the group -------------------------------------------------------------------

    def join(self, session: str, now: float, *, takes_over: bool = False) -> None:
        """Begins a group; with `takes_over` it replaces the group of another trainer."""
        if session == self.session:
            raise self.conflict("init", "a new session id")
        is_free = self.phase is Phase.CLOSED or takes_over
        if not is_free or self._is_committing() or self.is_apart:
            raise self.conflict("init", "no other trainer's session")
        if self.phase is not Phase.CLOSED:
            self.end("another trainer took over")
        self.session = session
        self._enter(Phase.JOINING, now)

    def joined(self, session: str, now: float) -> None:
        """All ranks have joined the group."""
        if self.phase is not Phase.JOINING or session != self.session:
            raise self.conflict("joined", "a session that is joining")
        self._enter(Phase.OPEN, now)

    def leave(self, session: str) -> None:
        """Ends the group because its trainer asks for that."""
        is_mine = session == self.session and self.phase is not Phase.CLOSED
        if not is_mine or self._is_committing() or self.is_apart:
            raise self.conflict("close", f"session {session}, and no commit in progress")
        self.end("the trainer left during an update" if self.update else "")

    def end(self, reason: str, *, keeps_group: bool = False) -> None:
        """Ends the update and, unless `keeps_group`, the group; the weights stay as they are.

        The end of an update without a group leaves the group open.
        """
        if self.phase is Phase.APPLYING:
            raise self.conflict("end", "an update that is not being applied")
        if not self.is_apart and not keeps_group:
            self.session = ""
        self.update, self.last_end = None, reason
        self._enter(self._resting_phase(), self._last_active)

    # ---- an update -------------------------------------------------------------------

    def check_session(self, what: str, session: str) -> None:
        """Raises Conflict unless `session` is open and has no update in progress."""
        if self.phase is not Phase.OPEN or session != self.session:
            raise self.conflict(what, f"session {session}, open and without an update")

    def begin(self, session: str, update: PoolWeights, now: float) -> None:
        """Begins an update whose tensors come from the group."""
        self.check_session("begin", session)
        self.update, self.last_end, self._is_apart = update, "", False
        self._enter(Phase.RECEIVING, now)

    def check_resting(self, what: str) -> None:
        """Raises Conflict while a group forms or an update is in progress."""
        if not self.is_resting:
            raise self.conflict(what, "no update in progress")

    def begin_apart(self, what: str, update: PoolWeights, now: float) -> None:
        """Begins the update of call `what`, which needs no group and leaves an open one as it is."""
        self.check_resting(what)
        self.update, self.last_end, self._is_apart = update, "", True
        self._enter(Phase.RECEIVING, now)

    def touch(self, now: float) -> None:
        """Starts the deadline again because the trainer has announced another tensor."""
        if self.phase is not Phase.RECEIVING:
            raise self.conflict("update_named_param", "an update that is receiving")
        self._enter(Phase.RECEIVING, now)

    def set_label(self, label: str) -> None:
        """Gives the update's version the trainer's own name."""
        assert self.update is not None
        self.update = msgspec.structs.replace(self.update, label=label)

    def prepare(self, update_id: str, now: float) -> PoolWeights:
        """Begins a commit."""
        return self._advance(update_id, "commit", Phase.RECEIVING, Phase.PREPARING, now)

    def prepared(self, update_id: str, now: float) -> PoolWeights:
        """All tensors are received, generation is paused and the caches are empty."""
        return self._advance(update_id, "prepared", Phase.PREPARING, Phase.PREPARED, now)

    def apply(self, update_id: str, now: float) -> PoolWeights:
        """The model begins to change: either the update succeeds or the worker restarts."""
        return self._advance(update_id, "apply", Phase.PREPARED, Phase.APPLYING, now)

    def applied(self, update_id: str, now: float) -> PoolWeights:
        """The model has the new weights."""
        resting = self._resting_phase()
        self.weights = self._advance(update_id, "applied", Phase.APPLYING, resting, now)
        self.update = None
        return self.weights

    def fetch(self) -> None:
        """Another worker's weights begin to replace the model's."""
        self.weights = UNKNOWN_WEIGHTS

    def fetched(self, update_id: str, now: float) -> PoolWeights:
        """The model has another worker's weights."""
        resting = self._resting_phase()
        self.weights = self._advance(update_id, "fetched", Phase.RECEIVING, resting, now)
        self.update = None
        return self.weights

    def has_applied(self, update_id: str) -> bool:
        """Whether the update is the last one that was applied, or is being applied."""
        update = self.update if self.phase is Phase.APPLYING else None
        return update_id in (self.weights.update_id, update and update.update_id)

    def accept_initial(self, weights: PoolWeights) -> None:
        """Takes the initial weights, which the model still has, for the pool's `weights`."""
        assert self.weights.is_initial
        self.weights = weights

    def abort(self, update_id: str, reason: str, *, keeps_group: bool = False) -> None:
        """Aborts an update, and unless `keeps_group` its group, whose broadcasts may be half done."""
        if self.update is None or self.update.update_id != update_id:
            raise self.conflict("abort", f"update {update_id}")
        self.end(reason, keeps_group=keeps_group)

    def _advance(
        self, update_id: str, what: str, old: Phase, new: Phase, now: float
    ) -> PoolWeights:
        if self.update is None or self.update.update_id != update_id or self.phase is not old:
            raise self.conflict(what, f"update {update_id} in state {old}")
        self._enter(new, now)
        return self.update

    def _is_committing(self) -> bool:
        return self.phase in (Phase.PREPARING, Phase.PREPARED, Phase.APPLYING)

    def _resting_phase(self) -> Phase:
        return Phase.OPEN if self.session else Phase.CLOSED
