"""Calls in the tokenizer's thread: their order, clients that leave, and texts that are too long."""

import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, NoReturn

import gevent
import pytest
from transformers import AutoTokenizer

from app.inputs import chat_template, images
from app.inputs import tokenizer as tokenizers
from app.inputs import turns as turns_module
from app.inputs.chat_template import Chat, render_all
from app.inputs.tokenizer import TURN_LENGTH, batches_of, check_text, encode_all
from app.inputs.turns import Turns, within
from harness.servers import REPOSITORY
from harness.stub_worker import Panic
from titopool.errors import ClientGone, InvalidRequest, NoReadyWorker, PromptTooLong


class Held:
    """A `Turns` whose thread is busy until `release`; the calls behind it are in `done`."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.done: list[str] = []
        self._started, self._may_end = threading.Event(), threading.Event()
        self._greenlets = [gevent.spawn(self.turns.call, self._hold)]
        self._pass_until(self._started.is_set)

    def _hold(self) -> None:
        self._started.set()
        self._may_end.wait(30)

    def add(self, name: str, size: int, client: socket.socket | None = None) -> gevent.Greenlet:
        one = gevent.spawn(self.turns.call, self.done.append, name, size=size, client=client)
        gevent.sleep(0)
        self._greenlets.append(one)
        return one

    def _pass_until(self, condition: Any) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            gevent.sleep(0.005)

    def release(self) -> list[str]:
        self._may_end.set()
        gevent.joinall(self._greenlets, timeout=10)
        return self.done


def test_short_calls_come_first_but_a_long_one_waits_a_bounded_time():
    held = Held()
    held.add("long", 1_000_000)
    held.add("short", 100)
    # 0.01 s of precedence: it would have to wait behind shorter ones that came within it only.
    held.add("medium", 1000)
    gevent.sleep(0.05)
    held.add("late", 500)
    assert held.release() == ["short", "medium", "late", "long"]


def test_what_a_client_has_left_is_skipped():
    held = Held()
    near, far = socket.socketpair()
    with near:
        gone = held.add("gone", 0, near)
        held.add("stays", 0)
        far.close()
        gone.join(timeout=10)
        assert isinstance(gone.exception, ClientGone)
        assert held.release() == ["stays"]


def test_a_call_whose_caller_gave_up_is_skipped():
    held = Held()

    def give_up() -> None:
        with gevent.Timeout(0.01, False):
            held.turns.call(held.done.append, "late")

    gevent.spawn(give_up).join(timeout=10)
    held.add("stays", 0)
    assert held.release() == ["stays"]


def test_an_image_waits_a_bounded_time(monkeypatch: pytest.MonkeyPatch):
    held = Held()
    monkeypatch.setattr(images, "_turns", held.turns)
    monkeypatch.setattr(images, "TURN_TIMEOUT_S", 0.01)
    with pytest.raises(NoReadyWorker, match="still being checked"):
        images.in_image_thread(held.done.append, "late", size=0)
    assert held.release() == []


def test_errors_reach_the_caller_and_the_next_call_runs():
    turns = Turns()
    with pytest.raises(ValueError, match="invalid literal"):
        turns.call(int, "x")
    assert turns.call(int, "3") == 3


@pytest.mark.parametrize("kind", [Panic, SystemExit])
def test_what_is_no_exception_reaches_the_caller_as_one_and_those_behind_it_run(kind: type):
    def panic() -> None:
        raise kind("a `None` value")

    turns = Turns()
    with gevent.Timeout(5):
        first, behind = (gevent.spawn(turns.call, one) for one in (panic, int))
        with pytest.raises(RuntimeError, match=f"{kind.__name__}: a `None` value"):
            first.get()
        assert behind.get() == 0
    with pytest.raises(RuntimeError, match=kind.__name__):
        within(5, panic)


def test_a_thread_that_cannot_be_started_fails_its_call_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch,
):
    def refuse(size: int) -> NoReturn:
        raise RuntimeError("can't start new thread")

    turns = Turns()
    with monkeypatch.context() as patched, gevent.Timeout(5):
        patched.setattr(turns_module, "ThreadPool", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            turns.call(int)
    assert turns.call(int) == 0


class Letters(SimpleNamespace):
    """A tokenizer with one token for each letter and one for eight blanks; counts what it reads."""

    num_read = 0

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, " " * 8: 1}

    def __call__(self, texts: Any, add_special_tokens: bool) -> dict[str, Any]:
        one, many = isinstance(texts, str), [texts] if isinstance(texts, str) else texts
        self.num_read += sum(map(len, many))
        ids = [[0] * len(text.replace(" " * 8, "b")) for text in many]
        return {"input_ids": ids[0] if one else ids}


def test_a_text_that_cannot_fit_is_refused_unread():
    letters = Letters()
    with pytest.raises(PromptTooLong, match=r"prompts\[1\].* exceeds the model's context length"):
        encode_all(letters, ["a", "a" * 100_000], ["prompts[0]", "prompts[1]"], 100)
    assert letters.num_read == 0


def test_a_long_text_is_judged_by_its_beginning(monkeypatch: pytest.MonkeyPatch):
    letters = Letters()
    monkeypatch.setattr(tokenizers, "longest_token", lambda _: 1000)
    with pytest.raises(PromptTooLong):
        check_text(letters, "a" * 90_000, "prompt", 100)
    assert letters.num_read == 400
    # Tokens of eight blanks: such a text may be longer.
    check_text(letters, " " * 900, "prompt", 100)
    letters.num_read = 0
    with pytest.raises(PromptTooLong):
        check_text(letters, " " * 800 + "a" * 89_200, "prompt", 100)
    assert letters.num_read == 3 * 400


def test_a_truncated_text_loses_what_it_cannot_use():
    letters = Letters()
    ids = encode_all(letters, ["a" * 100_000], ["prompts[0]"], 100, True, is_truncated=True)
    assert letters.num_read == 800
    assert len(ids[0]) == 800


def test_long_lists_are_cut_into_turns_of_whole_texts():
    lengths = [1] * 10 + [2 * TURN_LENGTH] + [TURN_LENGTH // 2] * 4
    batches = list(batches_of(lengths))
    covered = [length for one, _ in batches for length in lengths[one]]
    assert covered == lengths
    assert all(total <= TURN_LENGTH + 2 for one, total in batches if len(lengths[one]) > 1)
    assert len(batches) == 6


def spin() -> None:
    while True:
        pass


def test_a_call_that_never_ends_is_ended_and_the_thread_goes_on():
    turns = Turns()
    endless = gevent.spawn(turns.call, within, 0.2, spin)
    with pytest.raises(TimeoutError, match=r"more than 0\.2 s of CPU time"):
        endless.get(timeout=60)
    assert gevent.spawn(turns.call, within, 60.0, lambda: 7).get(timeout=60) == 7


def test_a_call_that_fails_raises_its_own_error_and_one_that_waits_takes_no_time():
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 // 0)
    assert within(0.05, lambda: time.sleep(0.3)) is None


def test_nothing_is_raised_in_what_follows_a_call():
    """Calls that end at about their limit, many times: each returns or raises TimeoutError.

    The last one is far too long.
    """

    def work(until_s: float) -> str:
        while time.thread_time() < until_s:
            pass
        return "done"

    ends = set()
    for index in range(40):
        # The watching thread looks 0.1 s after the start at the earliest.
        until_s = time.thread_time() + 0.098 + 0.004 * index / 40 + 60 * (index == 39)
        try:
            ends.add(within(0.05, lambda until_s=until_s: work(until_s)))
        except TimeoutError:
            ends.add("ended")
        follows = sum(one for one in range(2000))
        assert follows == 1999000
    assert "ended" in ends


@pytest.mark.parametrize("template", [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro a(n) %}{% for b in range(n) %}{{ a(n) }}{% endfor %}{% endmacro %}"
    "{% for a in range(n) %}{% for b in range(n) %}{{ b }}{% endfor %}{% endfor %}",
])  # fmt: skip
def test_a_template_that_takes_too_long_is_refused(monkeypatch, tiny_model: str, template: str):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{% if n %}" + template + "{% endif %}{{ messages[0].content }}"
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.3)

    def chat(n: int) -> Chat:
        return Chat([{"role": "user", "content": "a"}], "messages[1]", None, {"n": n})

    with pytest.raises(InvalidRequest) as caught:
        render_all(tokenizer, [chat(99_999)], 512)
    assert caught.value.message.startswith(
        "messages[1]: expected messages, tools and chat_template_"
    )
    assert "within 0.3 s of CPU time" in caught.value.message
    monkeypatch.undo()
    assert render_all(tokenizer, [chat(0)], 512) == tokenizer(["a"])["input_ids"]


def test_the_thread_may_import_what_starts_a_process():
    """As transformers imports trio and torch.cuda where these, and CUDA's bindings, are installed."""
    script = (
        "from gevent import monkey; monkey.patch_all()\n"
        "import ctypes.util, importlib, subprocess, sys\n"
        "from app.inputs.turns import Turns\n"
        "turns = Turns()\n"
        "print(turns.call(importlib.import_module, 'trio').__name__)\n"
        "print(turns.call(ctypes.util.find_library, 'dl'))\n"
        "print(subprocess.run(['true']).returncode)"
    )
    words = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("trio\nNone\n0\n", 0), done.stderr
