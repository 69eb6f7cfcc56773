"""`python -m workers.cluster`: gunicorn's master starts it with `--cluster ray`."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from titopool.errors import ConfigError
from titopool.settings.logs import configure_logging, show
from titopool.settings.sources import from_environment
from titopool.wire.run_dir import own_run_dir
from titopool.wire.sockets import read_curve_key
from workers.supervisor.master import end_master, parser_of, remove_orphaned_run_dir
from workers.supervisor.supervisor import StartFailed, greeting, is_healthy

logger = logging.getLogger("workers.cluster")

# Ray's default hides lines that several workers print.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the pool until a signal arrives or the parent has ended; returns the exit code."""
    options = parser_of("python -m workers.cluster").parse_args(argv)
    config = from_environment()
    configure_logging(config.log_level, log_format=config.log_format)
    own_run_dir(config.run_dir)
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.append(number))
    try:
        import ray

        from workers.cluster.ray_pool import RayPool

        # RAY_ADDRESS, else a cluster that runs on this host, else a new one.
        ray.init(namespace="titopool", logging_level="WARNING")
        nodes = [node for node in ray.nodes() if node["Alive"]]
        logger.info(
            "Ray at %s with %d nodes: %s",
            ray.get_runtime_context().gcs_address, len(nodes),
            ", ".join(str(node["NodeManagerAddress"]) for node in nodes),
        )  # fmt: skip
        pool = RayPool(config, read_curve_key(config.curve_key_file)[1].decode())
        has_greeted = False
        try:
            while not stopped and os.getppid() == options.parent_pid:
                pool.poll()
                if (
                    not has_greeted
                    and pool.is_ready
                    and (not options.url or is_healthy(options.url))
                ):
                    has_greeted = True
                    show(greeting(config, options.url, requires_key=options.requires_key))
        finally:
            pool.stop()
            ray.shutdown()
        remove_orphaned_run_dir(options, config.run_dir)
        return 0
    except (StartFailed, ConfigError, ConnectionError) as error:
        cause = str(error)
    except ImportError as error:
        cause = f"--cluster ray needs Ray: pip install 'titopool[ray]' ({error})"
    except Exception as error:
        logger.exception("the pool failed")
        cause = f"the pool failed: {error}"
    end_master(options, config.run_dir, cause)
    return 1


if __name__ == "__main__":
    sys.exit(main())
