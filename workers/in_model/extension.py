"""What titopool adds to vLLM's worker, in the process that holds the model.

vLLM mixes this class into its own worker (`worker_extension_cls`) and refuses names that
it has itself, hence the prefix. State of ours lives in `_titopool_…` attributes.
"""

import atexit
import gc
import os
import select
import signal
import threading

from workers.in_model.logprobs_patch import send_lists
from workers.in_model.weight_extension import WeightExtension

# vLLM imports this module in every process that holds a part of the model, before its first step.
send_lists()
# The interpreter's end need not search all that vLLM has imported for cycles: that takes 2 s.
atexit.register(gc.freeze)


class WorkerExtension(WeightExtension):
    """Methods that the engine adapter calls through `collective_rpc`."""

    def titopool_die_with(self, pid: int) -> int:
        """Ends this process, and vLLM's above it, when process `pid` is gone.

        vLLM's processes outlive the one that started them when that one is killed, and
        keep the GPU's memory. Returns the id of this process.
        """
        watched = os.pidfd_open(pid)
        # The engine core stands between `pid` and this process when they are not the same.
        above = os.getppid() if os.getppid() != pid else None
        threading.Thread(
            target=_kill_after, args=(watched, above), name="titopool-die-with", daemon=True
        ).start()
        return os.getpid()


def _kill_after(watched: int, above: int | None) -> None:
    select.select([watched], [], [])
    if above is not None:
        try:
            os.kill(above, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os.kill(os.getpid(), signal.SIGKILL)
