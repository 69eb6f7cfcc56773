"""The file of sessions: whose turns it has, and what cannot cost other sessions theirs."""

import time
from pathlib import Path

import msgspec
import pytest

from app.conversations import store as module
from app.conversations.store import Maker, Session, SessionStore, Turn, TurnHead, TurnKeys
from app.sessions.exchanges import exchanges
from titopool.errors import SessionEnded, SessionNotFound

KEEP_S = 100.0


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path, max_bytes=2**30, max_sessions=10, keep_s=KEEP_S)


def make(store: SessionStore, name: str = "ada") -> tuple[str, Session]:
    session = store.make(Maker(name, 1), {"of": name})
    return session, store.find(session)


def turn(request_id: str = "a") -> Turn:
    head = TurnHead(
        reason="", path="/v1/responses", request_id=request_id, model="tiny", lora_version=None,
        began_s=0.0, ended_s=1.0, finish_reason="stop", weight_versions=[], image_ranges=[],
        images=[], experts=None, mismatch=None, message={"role": "assistant", "content": "a"}, num_prompt=1,
        num_cached=0, num_sampled=1,
    )  # fmt: skip
    return Turn(parent=None, head=head, ids=bytes(4), prompt=bytes(4))


def test_a_file_without_turns_takes_no_room_of_theirs(store: SessionStore):
    assert store.totals() == (0, 0)
    make(store)
    assert store.totals() == (1, 0)


def test_a_late_turn_is_not_another_session_s(store: SessionStore, monkeypatch: pytest.MonkeyPatch):
    _, late = make(store)
    store.note_running(late, "a")
    now_s = time.time
    # It is kept for as long as a request of it may run, but not for ever.
    monkeypatch.setattr(time, "time", lambda: now_s() + 2.5 * KEEP_S)
    name, other = make(store, "bob")
    with pytest.raises(SessionEnded, match="deleted meanwhile"):
        store.add(late, [(turn(), TurnKeys(b"link", b"asked"))], [])
    with pytest.raises(SessionEnded, match="deleted meanwhile"):
        store.note_running(late, "b")
    assert store.turns(other) == []
    assert store.find(name).metadata == {"of": "bob"}
    assert store.end(other) == (0, [])


def test_what_is_read_while_turns_are_removed_is_refused(store: SessionStore, monkeypatch):
    _, session = make(store)
    for number in range(20):
        parent = number - 1 if number else None
        store.add(
            session, [(msgspec.structs.replace(turn(), parent=parent), TurnKeys(b"a", b"b"))], []
        )
    (*_, last) = store.turns(session)
    assert [one.number for one in store.path_to(session, 19, ("ids",))] == list(range(20))

    def stop() -> None:
        raise InterruptedError

    # `end` goes away after the first turns.
    monkeypatch.setattr(module, "give_way", stop)
    with pytest.raises(InterruptedError):
        store.end(session)
    monkeypatch.undo()
    for read in (
        lambda: store.path_to(session, last.number, ("ids",)),
        lambda: store.path_to(session, 3, ("ids",)),
        lambda: store.turns(session),
        lambda: list(exchanges(store, session, [last])),
        lambda: store.end(session),
    ):
        with pytest.raises(SessionEnded, match="deleted meanwhile"):
            read()


def test_an_image_is_kept_once_for_each_session_until_its_end(store: SessionStore):
    _, session = make(store)
    _, other = make(store, "bob")
    image, keys = {b"digest": b"file" * 2000}, TurnKeys(b"link", b"asked")
    for _ in range(3):
        store.add(session, [(turn(), keys)], [], image)
    store.add(other, [(turn(), keys)], [], {b"digest": b"of bob"})
    assert store.images(session, [b"digest", b"digest"]) == [b"file" * 2000] * 2
    assert store.totals()[1] < 5 * 4096
    store.end(session)
    assert store.images(other, [b"digest"]) == [b"of bob"]
    with pytest.raises(SessionEnded, match="deleted meanwhile"):
        store.images(session, [b"digest"])


def test_a_session_ends_and_is_forgotten_later(store: SessionStore, monkeypatch):
    name, session = make(store)
    store.add(session, [(turn(), TurnKeys(b"link", b"asked"))], [])
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + 1.5 * KEEP_S)
    store.remove_old()
    assert store.turns(session) == []
    with pytest.raises(SessionEnded):
        store.find(name)
    monkeypatch.setattr(time, "time", lambda: now_s() + 2.5 * KEEP_S)
    store.remove_old()
    with pytest.raises(SessionNotFound):
        store.find(name)


def test_a_conversation_of_very_many_messages_costs_nobody_a_turn(store: SessionStore):
    """A statement of SQLite has a bound of variables, and its error must delete no file."""
    name, session = make(store)
    links = [number.to_bytes(4, "big") for number in range(300_000)]
    asked = TurnKeys(links[0], b"asked", b"plain", b"system")
    assert store.add(session, [(turn(), asked)], links) == ["first"]
    (found,), num_known = store.match(session, links)
    assert (found.number, num_known) == (0, 1)
    assert store.add(session, [(turn("b"), TurnKeys(b"x", b"y", b"z", b"system"))], links) == [
        "history"
    ]
    assert store.number_of(session, "b") == 1
    assert len(store.turns(store.find(name))) == 2


def test_a_turn_is_no_dearer_in_a_session_of_many(store: SessionStore):
    _, session = make(store)
    steps = list[int]()

    def play(number: int) -> int:
        """The steps of SQLite's machine, in tens, to match and to add a turn that follows the one before."""
        steps.clear()
        (found,), _ = store.match(session, [b"%d" % (number - 1)])
        added = turn(f"{number}")
        added.parent = found.number
        keys = TurnKeys(b"%d" % number, b"asked %d" % number, b"plain %d" % number)
        assert store.add(session, [(added, keys)], []) == [""]
        return len(steps)

    store.add(session, [(turn("0"), TurnKeys(b"0", b"asked", b"plain"))], [])
    connection = store._database._connected()  # type: ignore[union-attr]
    connection.set_progress_handler(lambda: steps.append(0), 10)
    taken = [play(number) for number in range(1, 250)]
    assert max(taken[-20:]) < 2 * max(taken[:20]), taken


def test_a_store_without_a_folder_has_no_session():
    store = SessionStore(None, max_bytes=1, max_sessions=1, keep_s=1)
    with pytest.raises(SessionNotFound):
        store.find("a")
    assert store.totals() == (0, 0)
