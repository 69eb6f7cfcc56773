"""Equal calls share one; outcomes are kept within a number of bytes."""

import asyncio

import pytest

from workers.shared_calls import SharedCalls


def run(scenario) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await scenario()

    asyncio.run(limited())


class Calls:
    """Calls that end when told, and their number."""

    def __init__(self, outcome: str = "outcome"):
        self.outcome = outcome
        self.number = 0
        self.may_end = asyncio.Event()

    async def call(self) -> str:
        self.number += 1
        await self.may_end.wait()
        if self.outcome == "failure":
            raise ValueError("as asked")
        return self.outcome


def test_equal_calls_share_one_at_once_and_later():
    async def scenario() -> None:
        shared, calls = SharedCalls(100, len), Calls()
        waiting = [asyncio.create_task(shared.outcome(b"a", calls.call)) for _ in range(3)]
        await asyncio.sleep(0)
        # The one that made the call leaves.
        waiting[0].cancel()
        calls.may_end.set()
        assert await waiting[1] == await waiting[2] == ("outcome", False)
        assert await shared.outcome(b"a", calls.call) == ("outcome", False)
        assert await shared.outcome(b"b", calls.call) == ("outcome", True)
        assert calls.number == 2

    run(scenario)


def test_a_failure_reaches_all_and_is_not_kept():
    async def scenario() -> None:
        shared, calls = SharedCalls(100, len), Calls("failure")
        calls.may_end.set()
        failed = await asyncio.gather(
            *(shared.outcome(b"a", calls.call) for _ in range(2)), return_exceptions=True
        )
        assert [type(one) for one in failed] == [ValueError] * 2
        with pytest.raises(ValueError, match="as asked"):
            await shared.outcome(b"a", calls.call)
        assert calls.number == 2

    run(scenario)


def test_the_least_recently_used_outcomes_are_dropped():
    async def scenario() -> None:
        shared = SharedCalls(10, len)
        calls, large, running = Calls("12345"), Calls("x" * 11), Calls()
        calls.may_end.set()
        large.may_end.set()
        waiting = asyncio.create_task(shared.outcome(b"running", running.call))
        for key in (b"a", b"b", b"a", b"c"):
            await shared.outcome(key, calls.call)
        assert calls.number == 3
        assert [await shared.outcome(key, calls.call) for key in (b"a", b"b")] == [
            ("12345", False), ("12345", True),
        ]  # fmt: skip
        # Larger than all that is kept.
        assert await shared.outcome(b"large", large.call) == ("x" * 11, True)
        assert await shared.outcome(b"large", large.call) == ("x" * 11, True)
        running.may_end.set()
        assert await waiting == ("outcome", True)

    run(scenario)


def test_a_call_ends_with_its_last_caller():
    async def scenario() -> None:
        shared, calls = SharedCalls(100, len), Calls()
        waiting = [asyncio.create_task(shared.outcome(b"a", calls.call)) for _ in range(2)]
        await asyncio.sleep(0)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        # The next caller makes a call of its own.
        calls.may_end.set()
        assert await shared.outcome(b"a", calls.call) == ("outcome", True)
        assert calls.number == 2
        assert not shared._num_callers

    run(scenario)
