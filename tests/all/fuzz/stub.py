"""A stub worker (`harness/stub_worker.py`) that reports whether its engine is paused.

An update is complete only with the tensor `LAST`.

    FUZZ_STATE_FILE=… python -m tests.all.fuzz.stub --endpoint ipc://…
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from harness import stub_worker
from titopool.errors import InvalidRequest
from titopool.wire.pool_state import PauseMode

# A model of two tensors: an update without LAST is incomplete.
FIRST, LAST = "first", "last"
# The engine refuses this name.
REFUSED = "refused"
# This tensor is announced and never sent.
NEVER = "never"
RUNNING, PAUSED = "runs", "stands"


class ReportingWeights(stub_worker.StubWeights):
    """Checks names as a real engine does, and writes to a file whether generation is paused."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._file = Path(os.environ["FUZZ_STATE_FILE"])
        self._report(RUNNING)
        self._is_hung = False

    def _report(self, state: str) -> None:
        draft = self._file.with_suffix(".new")
        draft.write_text(state)
        draft.replace(self._file)

    async def call(self, method: str, *args: Any) -> list[Any]:
        if method in ("begin", "check", "take"):
            names = [one[0] for one in msgspec.msgpack.decode(args[0])]
            self._check_names(method, names, is_partial=method == "begin" and args[1])
            missing = [] if LAST in names else [LAST]
            return [
                {"missing": missing, "ignored": [], "kept": [], "split_layers": "", "staging": "kv"}
            ]
        if method == "join":
            self._is_hung = False
        answers = await super().call(method, *args)
        if method == "status" and self._is_hung:
            answers = [{**answers[0], "num_received": 0}]
        return answers

    def _check_names(self, method: str, names: list[str], *, is_partial: bool) -> None:
        if REFUSED in names or (method == "begin" and LAST not in names and not is_partial):
            raise InvalidRequest(f"names: expected those of the model, got {names}", param="names")
        if method != "check":
            self._is_hung = NEVER in names

    async def pause(self, policy: PauseMode) -> None:
        # Generation continues until vLLM has answered.
        await asyncio.sleep(0.002)
        await super().pause(policy)
        self._report(PAUSED)

    async def resume(self) -> None:
        await asyncio.sleep(0.002)
        await super().resume()
        self._report(RUNNING)


if __name__ == "__main__":
    stub_worker.StubWeights = ReportingWeights  # type: ignore[misc]
    sys.exit(asyncio.run(stub_worker.serve(stub_worker.parser().parse_args())))
