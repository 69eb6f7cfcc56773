"""What may happen to a worker's weights next: a state machine without a clock or an engine.

    CLOSED ─join─► JOINING ─joined─► OPEN ─begin─► RECEIVING ─prepare─► PREPARING ─prepared─┐
       ▲                              ▲ ▲                                                   │
       └── end (from all but APPLYING)│ └──── applied ───── APPLYING ◄──apply── PREPARED ◄──┘

Updates from a folder begin in CLOSED or OPEN and return there. Every state but CLOSED and OPEN
has a deadline. A call that does not fit raises `Conflict`, which says what the state is, and
changes nothing.
"""

from dataclasses import dataclass
from enum import StrEnum

from titopool.errors import Conflict
from titopool.wire.pool_state import PoolWeights


class Phase(StrEnum):
    """Where an update is."""

    CLOSED = "closed"
    JOINING = "joining"
    OPEN = "open"
    RECEIVING = "receiving"
    PREPARING = "preparing"
    PREPARED = "prepared"
    APPLYING = "applying"


@dataclass(frozen=True)
class Update:
    """An update in progress."""

    update_id: str
    version: int
    # How many updates the pool has had with this one.
    index: int
    # "": through the group.
    folder: str = ""
    # Digest of the folder's files.
    files: str = ""

    @property
    def weights(self) -> PoolWeights:
        """What the worker has once it is applied."""
        return PoolWeights(self.index, self.update_id, self.version, False, self.folder, self.files)


class WeightState:
    """One worker's communicator and update, if any, and the version that it has."""

    def __init__(self, *, timeout_s: float):
        """`timeout_s` is the deadline of each step."""
        self._timeout_s = timeout_s
        self.phase = Phase.CLOSED
        self.session = ""
        self.protocol = ""
        self.update: Update | None = None
        self.deadline: float | None = None
        # Those that serve here.
        self.weights = PoolWeights()
        # Why the last communicator or update ended before its time.
        self.last_end = ""
        self._last_active = 0.0

    def describe(self) -> str:
        """The state in words, for errors."""
        parts = [f"the state is {self.phase}"]
        if self.session:
            parts.append(f"session {self.session}")
        if self.update is not None:
            parts.append(f"update {self.update.update_id} to version {self.update.version}")
        text = ", ".join(parts) + f"; the weights are version {self.weights.version}"
        return f"{text}; before: {self.last_end}" if self.last_end else text

    def _refuse(self, what: str, need: str) -> Conflict:
        return Conflict(f"{what}: expected {need}; {self.describe()}")

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase = phase
        if not self._has_folder():
            # Updates from folders are no sign that the trainer of a session lives.
            self._last_active = now
        is_resting = phase in (Phase.CLOSED, Phase.OPEN)
        # Another worker may take as long to prepare as this one may.
        limit_s = self._timeout_s * (2 if phase is Phase.PREPARED else 1)
        self.deadline = None if is_resting else now + limit_s

    def has_expired(self, now: float) -> bool:
        """Whether a deadline has passed; the caller ends the session, or the worker."""
        return self.deadline is not None and now > self.deadline

    def idle_s(self, now: float) -> float:
        """How long ago anything happened in the session."""
        return now - self._last_active

    # ---- the communicator ------------------------------------------------------------

    def join(self, session: str, protocol: str, now: float, *, takes_over: bool = False) -> None:
        """A communicator begins to form; with `takes_over` also in place of one that is left."""
        if session == self.session:
            raise self._refuse("init", "a session that is not there yet")
        is_free = self.phase is Phase.CLOSED or takes_over
        if not is_free or self._is_committing() or self._has_folder():
            raise self._refuse("init", "no other trainer's session")
        if self.phase is not Phase.CLOSED:
            self.end("another trainer took over")
        self.session, self.protocol = session, protocol
        self._enter(Phase.JOINING, now)

    def joined(self, session: str, now: float) -> None:
        """The communicator is there."""
        if self.phase is not Phase.JOINING or session != self.session:
            raise self._refuse("joined", "a session that is joining")
        self._enter(Phase.OPEN, now)

    def leave(self, session: str) -> None:
        """The communicator is closed as its trainer asked."""
        is_mine = session == self.session and self.phase is not Phase.CLOSED
        if not is_mine or self._is_committing() or self._has_folder():
            raise self._refuse("close", f"session {session}, and no commit in progress")
        self.end("its trainer left during an update" if self.update else "")

    def end(self, reason: str) -> None:
        """Communicator and update are gone; the weights are as they were."""
        if self.phase is Phase.APPLYING:
            raise self._refuse("end", "a state in which the weights are whole")
        self.session = self.protocol = ""
        self.update, self.last_end = None, reason
        self._enter(Phase.CLOSED, self._last_active)

    # ---- an update -------------------------------------------------------------------

    def check_session(self, what: str, session: str) -> None:
        """Raises Conflict unless `session` is open and without an update."""
        if self.phase is not Phase.OPEN or session != self.session:
            raise self._refuse(what, f"session {session}, open and without an update")

    def begin(self, session: str, update: Update, now: float) -> None:
        """An update through the group."""
        self.check_session("begin", session)
        self.update, self.last_end = update, ""
        self._enter(Phase.RECEIVING, now)

    def check_resting(self, what: str) -> None:
        """Raises Conflict while anything is under way."""
        if self.phase not in (Phase.CLOSED, Phase.OPEN):
            raise self._refuse(what, "no update under way")

    def begin_folder(self, update: Update, now: float) -> None:
        """An update from a folder; it needs no communicator and leaves one that is there."""
        self.check_resting("update_weights")
        self.update, self.last_end = update, ""
        self._enter(Phase.RECEIVING, now)

    def touch(self, now: float) -> None:
        """More tensors are announced: the deadline counts from now."""
        if self.phase is not Phase.RECEIVING:
            raise self._refuse("update_named_param", "an update that is receiving")
        self._enter(Phase.RECEIVING, now)

    def prepare(self, update_id: str, now: float) -> Update:
        """The commit begins."""
        return self._go(update_id, "commit", Phase.RECEIVING, Phase.PREPARING, now)

    def prepared(self, update_id: str, now: float) -> Update:
        """All tensors are there, generation stands, the caches are empty."""
        return self._go(update_id, "prepared", Phase.PREPARING, Phase.PREPARED, now)

    def apply(self, update_id: str, now: float) -> Update:
        """The model begins to change: from here on it is this version or a restart."""
        return self._go(update_id, "apply", Phase.PREPARED, Phase.APPLYING, now)

    def applied(self, update_id: str, now: float) -> Update:
        """The model has the new weights."""
        update = self._go(update_id, "applied", Phase.APPLYING, self._base(), now)
        self.weights, self.update = update.weights, None
        return update

    def has_applied(self, update_id: str) -> bool:
        """Whether the model has the weights of that update, or is being given them."""
        update = self.update if self.phase is Phase.APPLYING else None
        return update_id in (self.weights.update_id, update and update.update_id)

    def accept_initial(self, weights: PoolWeights) -> None:
        """The weights that the engine began with are the pool's again."""
        assert self.weights.is_initial
        self.weights = weights

    def drop_update(self, update_id: str, reason: str) -> None:
        """The update is off. The group's broadcasts may be half done, so it goes with it."""
        if self.update is None or self.update.update_id != update_id:
            raise self._refuse("abort", f"update {update_id}")
        if self.phase is Phase.APPLYING:
            raise self._refuse("abort", "an update that is not being applied")
        if self._has_folder():
            self.update, self.last_end = None, reason
            self._enter(self._base(), self._last_active)
        else:
            self.end(reason)

    def _go(self, update_id: str, what: str, old: Phase, new: Phase, now: float) -> Update:
        if self.update is None or self.update.update_id != update_id or self.phase is not old:
            raise self._refuse(what, f"update {update_id} in state {old}")
        self._enter(new, now)
        return self.update

    def _is_committing(self) -> bool:
        return self.phase in (Phase.PREPARING, Phase.PREPARED, Phase.APPLYING)

    def _has_folder(self) -> bool:
        return self.update is not None and bool(self.update.folder)

    def _base(self) -> Phase:
        return Phase.OPEN if self.session else Phase.CLOSED
