"""Modules that run in forks as `python -m` runs them, and the processes that these start.

Runs in: the process of `harness/fork_server.py`, its forks, and their forks. A real server starts its
supervisor, and the supervisor its workers, with `subprocess.Popen`. Here that is `ForkingPopen`: what
has been imported is forked, so each process has the parent that it has in production.
"""

import asyncio
import gc
import inspect
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from setproctitle import setproctitle

from titopool.helpers.fork_server import drop_descriptors

# Proxies of Flask raise where torch inspects the globals of all modules.
WITH_PROXIES = ("flask", "app")
MAKE_CHILD = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class ForkingPopen(subprocess.Popen[bytes]):
    """`subprocess.Popen` that forks for `python -m MODULE …`, where MODULE is one of `RUNS`."""

    # `Popen` calls it to make the process.
    def _execute_child(self, args: Any, *options: Any) -> None:
        module = args[2] if list(args[:2]) == [sys.executable, "-m"] else ""
        if module not in RUNS:
            super()._execute_child(args, *options)  # type: ignore[misc]
            return
        given = MAKE_CHILD.bind(self, args, *options).arguments
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            run_module(module, args[3:], given["env"], lambda: _part(given))
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in PIPES))  # type: ignore[attr-defined]


def _part(given: Mapping[str, Any]) -> None:
    """Leaves the parent's session, descriptors, signal handlers, loggers and garbage to the parent.

    Args:
        given: `Popen`'s options and the descriptors of its pipes; -1: the parent's standard one.
    """
    if given["start_new_session"]:
        os.setsid()
    for target, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        if given[name] != -1:
            os.dup2(given[name], target)
    drop_descriptors(given["pass_fds"])
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for logger in map(logging.getLogger, (None, "gunicorn.error", "gunicorn.access")):
        logger.handlers.clear()
    gc.freeze()


def run_module(
    module: str, arguments: Sequence[str], environ: Mapping[str, str], part: Callable[[], None]
) -> NoReturn:
    """In a fork: becomes what `python -m module arguments` is, and ends with it.

    Args:
        part: called first; drops what is the parent's.
    """
    code: Any = 1
    try:
        part()
        os.environ.clear()
        os.environ.update(environ)
        time.tzset()
        sys.argv = [module, *arguments]
        # Tests find processes by their command lines.
        setproctitle(" ".join([sys.executable, "-m", module, *arguments]))
        code = RUNS[module](list(arguments))
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the interpreter's end, which visits all imported objects.
        os._exit(code or 0)


def _serve(arguments: list[str]) -> int:
    from harness import front_end_notes
    from titopool import cli, launch
    from titopool.commands import serve

    def execute(module: str, *words: str, environ: Mapping[str, str]) -> None:
        assert module == "titopool.launch"
        os.environ.clear()
        os.environ.update(launch.child_environment(environ))
        sys.argv = [module, *words]
        launch.run_gunicorn()

    serve.execute = execute  # type: ignore[assignment]
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    if path := os.environ.get(front_end_notes.VARIABLE):
        front_end_notes.note_at(path)
    return cli.main(["serve", *arguments])


def _supervise(arguments: list[str]) -> int:
    from workers.supervisor.supervisor import main

    return main(arguments)


def _work_as_stub(arguments: list[str]) -> int:
    from harness import stub_worker

    return asyncio.run(stub_worker.serve(stub_worker.parser().parse_args(arguments)))


def _be_template(arguments: list[str]) -> int:
    import torch

    # A new process would read it as torch is loaded, and has no Flask.
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    for name in list(sys.modules):
        if name.partition(".")[0] in WITH_PROXIES:
            del sys.modules[name]
    from workers import template

    template.main()
    return 0


RUNS: dict[str, Callable[[list[str]], int]] = {
    "titopool serve": _serve,
    "workers.supervisor": _supervise,
    "harness.stub_worker": _work_as_stub,
}


def import_engine() -> None:
    """Imports what a worker with vLLM imports, with the environment of one on CPUs; adds it to `RUNS`."""
    from titopool.collector import without_collector
    from titopool.settings.config import ServerConfig
    from workers.environment import default_engine_options, prepare_environment

    # As the supervisor sets it.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    prepare_environment(os.environ, on_cpu=True)
    default_engine_options(ServerConfig(), os.environ, on_cpu=True, seed=0)
    with without_collector():
        import vllm.v1.engine.async_llm  # noqa: F401

        import workers.template  # noqa: F401
        from workers.vllm_internals import check_internals

        # It imports all modules that titopool uses.
        check_internals()
    RUNS["workers.template"] = _be_template
