"""A stub worker that the harness can hold at a chosen point.

    python -m tests.all.chaos.worker --control PATH … (options of harness.stub_worker)

A point is the name of a command with `:before` (received, not yet run) or `:after` (run, not yet
answered), or of a job: `Generate:before`, `Generate:after`, `Chunk:after`.
"""

import asyncio
import json
import os
import signal
import sys
from typing import Any

from harness import stub_worker
from harness.stub_worker import StubEngine
from titopool.wire.commands import AnnounceTensors, AwaitStep, Command, CommandDone
from titopool.wire.messages import Chunk, Job, JobProgress
from workers.engine.base import Generated, OnChunk, Slots
from workers.serving.server import WorkerServer

# Seconds that a worker waits at a point if the harness does not release it.
HOLD_S = 20.0


class Points:
    """Reports an armed point to the harness when it is reached, and waits there for the release."""

    def __init__(self, server: WorkerServer, engine: StubEngine, control: str):
        self._server, self._engine, self._control = server, engine, control
        self._armed = ""
        self._go = asyncio.Event()
        self._answer_command = server._control.answer
        self._run_job = engine.run
        server._control.answer = self._answer  # type: ignore[method-assign]
        engine.run = self._run  # type: ignore[method-assign]
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(self._control)
        self._send(worker=self._server._worker_id.lstrip("w"), pid=os.getpid())
        while line := await reader.readline():
            message = json.loads(line)
            if "arm" in message:
                self._armed = message["arm"]
                self._go.clear()
            elif "go" in message:
                self._armed = ""
                self._go.set()
            elif "state" in message:
                self._send(state=self._state())

    def _send(self, **message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _state(self) -> dict[str, Any]:
        front_ends = self._server._front_ends.values()
        status = self._server._control.status()
        return {
            "jobs": sum(len(one.jobs) for one in front_ends),
            "sequences": sum(one.slots.num_running + one.slots.num_held for one in front_ends),
            "tokens": sum(one.num_tokens for one in front_ends),
            "front_ends": len(front_ends),
            "tasks": len(asyncio.all_tasks()),
            "runs": self._engine.weights.runs.is_set(),
            "lease_left_s": status["lease_left_s"],
            "phase": status["state"],
            "version": status["weight_version"],
            "histories": len(self._engine.versions._histories),
            "requests": len(self._engine.versions.open),
        }

    async def _reach(self, point: str) -> None:
        if self._armed == point:
            self._armed = ""
            self._send(reached=point)
            try:
                async with asyncio.timeout(HOLD_S):
                    await self._go.wait()
            except TimeoutError:
                pass

    async def _answer(self, command: Command, identity: bytes = b"") -> CommandDone:
        action = command.action
        name = type(action).__name__
        if isinstance(action, AwaitStep):
            name += f"({action.step})"
        if isinstance(action, AnnounceTensors) and action.calls == "lists":
            name += "(list)" if action.list_id else "(start)"
        await self._reach(f"{name}:before")
        done = await self._answer_command(command, identity)
        await self._reach(f"{name}:after")
        return done

    async def _run(self, job: Job, on_chunk: OnChunk, slots: Slots) -> Generated:
        await self._reach("Generate:before")

        def forward(chunk: Chunk | JobProgress) -> None:
            on_chunk(chunk)
            if isinstance(chunk, Chunk) and self._armed == "Chunk:after":
                # `on_chunk` is synchronous, so this point does not wait for the release.
                self._armed = ""
                self._send(reached="Chunk:after")

        generated = await self._run_job(job, forward, slots)
        await self._reach("Generate:after")
        return generated


def replace_engine(control: str) -> None:
    """In a process that is about to run `python -m workers`: a stub in place of vLLM."""
    import workers.engine.vllm
    import workers.serving.server

    arguments = stub_worker.parser().parse_args(["--endpoint", "", "--delay-s", "0.05"])
    workers.engine.vllm.VllmEngine = (  # type: ignore[assignment,misc]
        lambda config, on_cpu: stub_worker.engine_of(arguments)
    )
    signal.signal(stub_worker.BLOCK_SIGNAL, stub_worker.stand_still)
    run = workers.serving.server.WorkerServer.run

    async def with_points(server: WorkerServer) -> str:
        points = Points(server, server._engine, control)  # type: ignore[arg-type]
        try:
            return await run(server)
        finally:
            del points

    workers.serving.server.WorkerServer.run = with_points  # type: ignore[method-assign]


def main() -> None:
    parser = stub_worker.parser()
    parser.add_argument("--control", required=True)
    arguments = parser.parse_args()
    kept: list[Points] = []

    def prepare(server: WorkerServer, engine: StubEngine) -> None:
        kept.append(Points(server, engine, arguments.control))

    sys.exit(asyncio.run(stub_worker.serve(arguments, prepare)))


if __name__ == "__main__":
    main()
