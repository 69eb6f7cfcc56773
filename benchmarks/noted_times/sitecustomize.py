"""Notes when a request passes the parts of a server, in each of its processes.

Python imports this module at its start where `PYTHONPATH` has this folder. With `NOTED_TIMES`, a
folder, each process appends lines `SECONDS NAME` to a file there, by the clock that all processes of a
host share. A name ends with `(` where a function begins and with `)` where it ends.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable
from typing import Any

FOLDER = os.environ.get("NOTED_TIMES", "")
# Class and function by module, and the name of its lines.
POINTS: dict[str, list[tuple[str, str, str]]] = {
    "app.gunicorn_worker": [("FrontEnd", "handle_request", "front.request")],
    "app.pool.link": [("Link", "submit", "front.submit"), ("Link", "_handle", "front.message")],
    "workers.serving.server": [
        ("WorkerServer", "_start_job", "worker.job"),
        ("WorkerServer", "_send_results", "worker.send"),
    ],
    "vllm.v1.engine.output_processor": [("OutputProcessor", "process_outputs", "outputs")],
    "vllm.v1.engine.core": [
        ("EngineCoreProc", "preprocess_add_request", "core.receive"),
        ("EngineCoreProc", "_handle_client_request", "core.request"),
        ("EngineCore", "step", "core.step"),
        ("EngineCore", "step_with_batch_queue", "core.step"),
    ],
    "vllm.v1.executor.uniproc_executor": [("UniProcExecutor", "sample_tokens", "core.sample")],
}


class _File:
    """The file of this process; a fork opens its own."""

    pid = descriptor = -1

    def note(self, name: str) -> None:
        if self.pid != os.getpid():
            self.pid = os.getpid()
            flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY
            self.descriptor = os.open(f"{FOLDER}/{self.pid}.txt", flags)
        os.write(self.descriptor, f"{time.monotonic():.6f} {name}\n".encode())


_file = _File()


def _noted(inner: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(inner)
    def outer(*args: Any, **options: Any) -> Any:
        _file.note(f"{name}(")
        result = inner(*args, **options)
        # So that what has no request's tokens can be told apart.
        size = f" {len(args[1])}" if name == "outputs" else ""
        _file.note(f"{name}){size}")
        return result

    return outer


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the modules of `POINTS` as usual, and wraps their functions."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in POINTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_wrap(module: Any) -> None:
            load(module)
            for class_name, function, name in POINTS[fullname]:
                owner = getattr(module, class_name)
                setattr(owner, function, _noted(getattr(owner, function), name))

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


if FOLDER:
    sys.meta_path.insert(0, _Finder())
