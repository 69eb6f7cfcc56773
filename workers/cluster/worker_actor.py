"""The Ray actor of one worker: it runs a supervisor of that worker on its node.

The supervisor restarts a worker whose process dies. Ray restarts the actor, on another node if it
must, when its process or node dies.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray

from titopool.settings.config import ENV_PREFIX
from titopool.settings.logs import configure_logging
from titopool.settings.sources import from_environment
from titopool.wire.run_dir import CURVE_KEY, make_run_dir, write_wanted
from workers.supervisor.phase_pipe import Load
from workers.supervisor.supervisor import Supervisor


@dataclass(frozen=True)
class WorkerState:
    """What an actor reports of its worker."""

    # "" before the worker's process listens.
    endpoint: str
    node_id: str
    # "" before the worker's first report.
    phase: str
    load: Load | None
    # Why the worker cannot start; "" while it runs.
    failure: str
    has_ended: bool


class WorkerActor:
    """One worker. Ray makes the object anew on the node where it restarts the actor."""

    def __init__(self, index: int, settings: Mapping[str, str], secret: str, port: int):
        """Starts the worker.

        Args:
            settings: `TITOPOOL_…` variables.
            secret: the CURVE key.
            port: on which the worker listens; 0: any free one, another after a restart.
        """
        run_dir = make_run_dir()
        key_file = Path(run_dir, CURVE_KEY)
        key_file.touch(mode=0o600)
        key_file.write_text(secret)
        # `ray start --node-ip-address` chooses it.
        endpoint = endpoint_at(ray.util.get_node_ip_address(), port)
        # Ray's GPUs for this actor are in CUDA_VISIBLE_DEVICES. vLLM starts its own Ray workers for an
        # engine that spans nodes.
        os.environ |= {
            **settings,
            ENV_PREFIX + "RUN_DIR": run_dir, ENV_PREFIX + "CURVE_KEY_FILE": str(key_file),
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        }  # fmt: skip
        config = from_environment()
        configure_logging(config.log_level, log_format=config.log_format)
        self._run_dir = run_dir
        self._failure = ""
        self._supervisor = Supervisor(
            config, parent_pid=os.getppid(), url=None, of_one=(index, endpoint)
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except Exception as error:
            self._failure = str(error)

    def state(self) -> WorkerState:
        """The worker as of now."""
        endpoint, phase, load = self._supervisor.state()
        return WorkerState(
            endpoint, ray.get_runtime_context().get_node_id(), phase, load, self._failure,
            not self._thread.is_alive(),
        )  # fmt: skip

    def leave(self) -> None:
        """Lets the worker finish its jobs and end; `state` then says so."""
        write_wanted(self._run_dir, 0)

    def stop(self) -> None:
        """Ends the worker at once."""
        self._supervisor.stop()
        self._thread.join()


def endpoint_at(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
