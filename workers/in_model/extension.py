"""The class that titopool mixes into vLLM's worker (`worker_extension_cls`).

Runs in: vLLM's processes that hold the model. vLLM refuses names that its worker class has already,
so names of methods and attributes begin with `titopool` and `_titopool`.
"""

import atexit
import contextlib
import gc
import os
import select
import signal
import threading
from typing import Any

from titopool.settings.config import variable_of
from workers.in_model.host import Answer, Host, answer_of
from workers.in_model.logprobs_patch import add_raw, send_lists
from workers.in_model.served_model import ServedModel
from workers.in_model.vllm_fixes import (
    keep_masks_apart,
    load_below_adapters,
    permit_amx_tiles,
    route_by_sigmoid_on_cpus,
)

# vLLM imports this module in every process that holds the model, before its first step.
send_lists()
if os.environ.get(variable_of("raw_logprobs")) == "true":
    add_raw()
keep_masks_apart()
load_below_adapters()
route_by_sigmoid_on_cpus()
permit_amx_tiles()
# The garbage collection at the interpreter's exit would take 2 s: exclude all objects from it.
atexit.register(gc.freeze)


class WorkerExtension:
    """Methods that the engine adapter calls through `collective_rpc`."""

    _titopool_host: Host | None = None

    def titopool(self, method: str, *args: Any) -> Answer:
        """The answer of a method of `Host`."""

        def call() -> Any:
            if self._titopool_host is None:
                self._titopool_host = Host(ServedModel(self))
            return getattr(self._titopool_host, method)(*args)

        return answer_of(method, call)

    def titopool_die_with(self, pid: int) -> int:
        """Ends this process, and its parent in vLLM, when process `pid` has ended.

        vLLM's processes survive when their starter is killed, and keep the GPU's memory. Returns the
        id of this process.
        """
        watched = os.pidfd_open(pid)
        # A parent other than `pid` is the engine core, which started this process.
        parent = os.getppid() if os.getppid() != pid else None
        threading.Thread(
            target=_kill_after, args=(watched, parent), name="titopool-die-with", daemon=True
        ).start()
        return os.getpid()


def _kill_after(watched: int, parent: int | None) -> None:
    select.select([watched], [], [])
    if parent is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
