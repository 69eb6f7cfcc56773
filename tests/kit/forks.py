"""Runs scripts in forks of a process that has imported their modules once.

`python -m tests.kit.forks MODULE …` imports the modules, then reads a job (JSON) from each line of its
standard input, runs it in a fork and answers with a line. Each script runs in a separate
process, as with `python -c`: it may change modules, register functions with atexit and call
os._exit.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.servers import REPOSITORY, environment
from titopool.collector import without_collector

# Seconds to import torch and vLLM on a busy machine.
START_TIMEOUT_S = 120.0


class Forks:
    """A process that has imported modules and runs scripts in forks, one at a time.

    The process starts with the first script, and again after a script that timed out. It ends
    with the test process.
    """

    def __init__(self, *modules: str, **variables: str):
        """`variables`: environment variables of the process."""
        self._modules = modules
        # Without this variable, torch initializes CUDA to count GPUs, and forks cannot use CUDA.
        self._variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **variables}
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.end)

    def run(self, script: str, *arguments: str, timeout_s: float = 240.0) -> str:
        """The output of `script`, run with `arguments` in sys.argv; it must exit with 0."""
        with TemporaryDirectory() as name:
            output, errors = Path(name, "output"), Path(name, "errors")
            job = {
                "script": script, "arguments": arguments, "output": str(output),
                "errors": str(errors),
            }  # fmt: skip
            try:
                code = self._ask(job, timeout_s)
            except BaseException:
                # The process may still run this script.
                self.end()
                raise
            assert code == 0, f"exit code {code}: {errors.read_text(errors='replace')[-3000:]}"
            return output.read_text()

    def end(self) -> None:
        """Kills the process and its fork."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None

    def _ask(self, job: dict, timeout_s: float) -> int:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.kit.forks", *self._modules],
                env=environment(**self._variables), cwd=REPOSITORY, bufsize=0,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            # The first line says that the modules are imported.
            self._read_number(START_TIMEOUT_S)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        return self._read_number(timeout_s)

    def _read_number(self, timeout_s: float) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        line, deadline = b"", time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                is_readable = selector.select(max(0.0, deadline - time.monotonic()))
                assert is_readable, f"no answer within {timeout_s:g} s"
                read = self._process.stdout.read(100)
                assert read, "the process that forks has ended; its output is above"
                line += read
        return int(line)


def main() -> None:
    """Imports the modules on the command line, then forks for each job until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Stdout is for answers only: what libraries print goes to stderr.
    os.dup2(2, 1)
    with without_collector():
        for name in sys.argv[1:]:
            importlib.import_module(name)
    # Without this call, a fork's final garbage collection visits all imported objects for 2 s.
    gc.freeze()
    print(0, file=answers)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.close(answers.fileno())
            return run_script(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers)


def run_script(script: str, arguments: list[str], output: str, errors: str) -> None:
    """Runs `script` in a fork as `python -c` does; the interpreter ends afterwards."""
    for descriptor, path in ((0, os.devnull), (1, output), (2, errors)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
