"""Bodies are read within the memory budget of a front end, with bounded structure, and in time."""

import io
import json
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from app.http.budget import SMALL_BYTES, Budget, Reservation
from app.http.request_bodies import PIECE_BYTES, read_body
from app.json_structure import CommasOfList, Structure
from app.route.decoding import beginning
from titopool.errors import BodyTooLarge, BodyTooSlow, QueueFull
from titopool.settings.config import ServerConfig

MIB = 2**20


def read(
    body: bytes, *, budget: Budget | None = None, is_chunked: bool = False, **settings: Any
) -> Reservation:
    """Reads a body; the reservation is not released."""
    sent: Any = SimpleNamespace(
        stream=io.BytesIO(body), content_length=None if is_chunked else len(body)
    )
    reservation = Reservation(budget or Budget(2**30))
    assert read_body(sent, reservation, ServerConfig(**settings)) == body
    return reservation


def containers_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers_of, value.values()))
    return 1 + sum(map(containers_of, value)) if isinstance(value, list) else 0


def keys_of(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(keys_of, value.values()))
    return sum(map(keys_of, value)) if isinstance(value, list) else 0


def random_value(chooser: random.Random, depth: int = 0) -> Any:
    kind = chooser.randrange(3 if depth < 5 else 1)
    if kind == 0:
        return "".join(chooser.choices('[]{}:",\\ab\n\u20ac', k=chooser.randrange(9)))
    inner = [random_value(chooser, depth + 1) for _ in range(chooser.randrange(5))]
    return inner if kind == 1 else {str(index): one for index, one in enumerate(inner)}


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 100_000])
def test_lists_objects_keys_and_elements_are_counted_outside_of_strings(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.json_structure.FEW", 0)
    chooser = random.Random(piece_bytes)
    for _ in range(200):
        value = [random_value(chooser) for _ in range(3)]
        body = json.dumps(value, ensure_ascii=False).encode()
        structure, commas = Structure(), CommasOfList()
        for start in range(0, len(body), piece_bytes):
            structure.add(body[start : start + piece_bytes])
            commas.add(body[start : start + piece_bytes])
        found = (structure.num_containers, structure.num_keys, commas.count)
        assert found == (containers_of(value), keys_of(value), 2), body


def test_a_body_of_many_lists_is_refused_before_it_is_read_whole():
    stream = io.BytesIO(b'{"prompts": [' + b"[]," * 4 * MIB)
    sent: Any = SimpleNamespace(stream=stream, content_length=len(stream.getvalue()))
    with pytest.raises(BodyTooLarge, match="at most 524288 lists and objects"):
        read_body(sent, Reservation(Budget(2**30)), ServerConfig())
    assert stream.tell() < 3 * MIB


def test_a_body_of_many_keys_is_refused_before_it_is_read_whole():
    stream = io.BytesIO(b'{"a":{' + b'"b":1,' * 4 * MIB)
    sent: Any = SimpleNamespace(stream=stream, content_length=len(stream.getvalue()))
    with pytest.raises(BodyTooLarge, match="262144 more in a body"):
        read_body(sent, Reservation(Budget(2**30)), ServerConfig())
    assert stream.tell() < 3 * MIB


@pytest.mark.parametrize("is_chunked", [False, True])
def test_brackets_in_text_are_no_lists(is_chunked: bool):
    read(b'{"prompts": ["' + b"[{" * MIB + b'"]}', is_chunked=is_chunked)


def test_an_estimate_is_close_to_what_msgspec_takes():
    """Measured with 0.22: 5.3 bytes for each byte of ids, 25 for each byte of empty lists."""
    ids = read(b'{"prompts": [[' + b"12345," * MIB + b"1]]}")
    assert 5.3 <= ids.taken / (6 * MIB) <= 12
    lists = read(b'{"prompts": [' + b"[]," * 400_000 + b"[]]}")
    assert 25 <= lists.taken / 1.2e6 <= 400
    image = read(b'{"images": ["' + b"A" * 8 * MIB + b'"]}')
    assert image.taken / (8 * MIB) < 3.1


def test_a_request_beyond_the_budget_is_refused_unless_no_other_large_one_is_open():
    budget = Budget(64 * MIB)
    small = read(b"x" * 1000, budget=budget)
    alone = read(b"x" * 32 * MIB, budget=budget)
    assert alone.taken > budget.limit
    with pytest.raises(QueueFull, match="memory_budget_bytes"):
        read(b"x" * 4 * MIB, budget=budget)
    # What is left when its prompts are made.
    alone.keep(2 * MIB)
    second = read(b"x" * 4 * MIB, budget=budget)
    alone.release()
    alone.release()
    second.release()
    small.release()
    assert (budget.taken, budget.taken_by_small) == (0, 0)


def test_large_bodies_leave_room_for_small_ones():
    budget = Budget(64 * MIB)
    held = [read(b"x" * MIB, budget=budget) for _ in range(18)]
    with pytest.raises(QueueFull):
        read(b"x" * MIB, budget=budget)
    small = [read(b"x" * 160_000, budget=budget) for _ in range(14)]
    assert all(one.taken <= SMALL_BYTES for one in small)
    with pytest.raises(QueueFull):
        small += [read(b"x" * 320_000, budget=budget) for _ in range(10)]
    for one in [*held, *small]:
        one.release()


def test_a_body_that_does_not_fit_is_refused_by_its_length():
    budget = Budget(64 * MIB)
    other = read(b"x" * MIB, budget=budget)
    stream = io.BytesIO(b"x" * 32 * MIB)
    sent: Any = SimpleNamespace(stream=stream, content_length=32 * MIB)
    with pytest.raises(QueueFull) as caught:
        read_body(sent, Reservation(budget), ServerConfig())
    assert stream.tell() == 0
    assert caught.value.retry_after_s == 1
    other.release()


class Dripping:
    """Sends one piece, then a byte every 10 ms, for ever."""

    def __init__(self) -> None:
        self.has_begun = False

    def read(self, num_bytes: int) -> bytes:
        if not self.has_begun:
            self.has_begun = True
            return b"x" * num_bytes
        while True:
            gevent.sleep(0.01)


@pytest.mark.parametrize("write", [repr, json.dumps, str])
def test_what_an_error_repeats_is_the_beginning_of_what_came(write: Callable[[Any], str]):
    chooser = random.Random(0)
    values = [random_value(chooser) for _ in range(200)] + [None, 1.5, True, 10**30]
    values += [[value, {"a": [value] * 100}] for value in values]
    for value in values:
        for length in (1, 7, 60):
            assert beginning(value, length, write) == write(value)[:length]


def test_an_error_costs_no_more_where_much_came():
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for value in ([0] * 10**7, {str(index): 0 for index in range(10**6)}, "a" * 10**8, nested):
        began = time.thread_time()
        assert len(beginning(value, 60)) == 60
        assert time.thread_time() - began < 0.05


def test_a_body_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.http.request_bodies.MIN_BYTES_PER_S", PIECE_BYTES * 100)
    sent: Any = SimpleNamespace(stream=Dripping(), content_length=100 * MIB)
    reservation = Reservation(Budget(2**30))
    with gevent.Timeout(10), pytest.raises(BodyTooSlow, match="client_timeout_s"):
        read_body(sent, reservation, ServerConfig(client_timeout_s=1))
