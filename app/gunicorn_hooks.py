"""gunicorn's settings, and the hooks by which its master starts and stops the workers.

The master only starts a supervisor process (`python -m workers.supervisor`): it forks, and
must hold no thread, socket or engine of its own. `gunicorn.conf.py` and `titopool serve`
both use this module.
"""

import faulthandler
import gc
import logging
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gevent
from gevent.monkey import get_original

from app.descriptors import limits_within
from titopool.errors import ConfigError
from titopool.launch import child_environment
from titopool.settings.config import ENV_PREFIX, FAILURE_FILE
from titopool.settings.gpus import number_of_workers
from titopool.settings.logs import configure_logging
from titopool.settings.sources import check_engine_options, from_environment, ignored_variables
from titopool.wire.sockets import read_curve_key

try:
    _config = from_environment()
    check_engine_options(_config)
    if any(endpoint.startswith("tcp://") for endpoint in _config.endpoints):
        read_curve_key(_config.curve_key_file)
except ConfigError as error:
    sys.exit(f"titopool: {error}")

# Many systems allow 1,024 descriptors unless asked for more.
_num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (_num_descriptors, _num_descriptors))
_num_open, _num_connections = limits_within(
    sys.maxsize if _num_descriptors == resource.RLIM_INFINITY else _num_descriptors,
    max_open_requests=_config.max_open_requests,
)
# Where the front ends read it.
os.environ[ENV_PREFIX + "MAX_OPEN_REQUESTS"] = str(_num_open)

bind = (
    f"[{_config.host}]:{_config.port}" if ":" in _config.host else f"{_config.host}:{_config.port}"
)
# The engines need cores too.
workers = _config.num_front_ends or min(4, max(1, len(os.sched_getaffinity(0)) // 2))
# A greenlet for each connection: a thread hand-over costs more than all else of a request.
worker_class = "gevent"
worker_connections = _num_connections
backlog = 4096
keepalive = 75
loglevel = _config.log_level
# A front end gives a sign of life each second; this long without means that it hangs.
timeout = 120
# SIGTERM lets requests end for so long; with the workers' own end it stays under 10 s.
graceful_timeout = 3
control_socket_disable = True

# Longer than a worker takes to stop its engine.
SUPERVISOR_STOP_TIMEOUT_S = 6.0
# Where a client on this host reaches a server that listens on every address.
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}

_supervisor: subprocess.Popen[bytes] | None = None
# A descriptor of that process, which a front end inherits. Unlike its number it stays that
# process's, also when the process has ended before a front end looks.
_supervisor_fd = -1
_own_run_dir: str | None = None


def when_ready(server: Any) -> None:
    """In the master, once the port is bound and before the front ends are forked."""
    global _supervisor, _supervisor_fd, _own_run_dir
    if ignored := ignored_variables():
        server.log.info("Ignored variables of a Kubernetes Service: %s", ", ".join(ignored))
    if _num_open < _config.max_open_requests:
        server.log.warning(
            "max_open_requests is %d here, not %d: a process may open %d files and connections "
            "(ulimit -n, LimitNOFILE, Docker's ulimits)",
            _num_open, _config.max_open_requests, _num_descriptors,
        )  # fmt: skip
    if _config.endpoints:
        return
    try:
        num_workers = number_of_workers(_config)
    except ConfigError as error:
        sys.exit(f"titopool: {error}")
    run_dir: str = _config.run_dir
    if run_dir:
        os.makedirs(run_dir, mode=0o700, exist_ok=True)
    else:
        run_dir = _own_run_dir = tempfile.mkdtemp(prefix="titopool-")
    # Where front ends and supervisor find the sockets.
    os.environ[ENV_PREFIX + "RUN_DIR"] = run_dir
    os.environ[ENV_PREFIX + "NUM_WORKERS"] = str(num_workers)
    _supervisor = subprocess.Popen(
        [sys.executable, "-m", "workers.supervisor", "--parent-pid", str(os.getpid())]
        + [word for url in _urls(server) for word in ("--url", url)]
        + (["--remove-run-dir"] if _own_run_dir else []),
        env=child_environment(os.environ),
        stdin=subprocess.DEVNULL,
        # A signal from the terminal is for the master, which stops the front ends first.
        start_new_session=True,
    )
    # Python takes milliseconds to start, so it cannot have ended and been reaped yet.
    _supervisor_fd = os.pidfd_open(_supervisor.pid)


def post_worker_init(worker: Any) -> None:
    """In each front end: connects to the workers before the first request."""
    configure_logging(_config.log_level)
    give_logging_native_locks()
    # A crash in a library's native code leaves each thread's traceback in the log.
    faulthandler.enable()
    service = worker.wsgi.extensions["titopool"]
    service.start()
    # What is imported by now stays: the collector need not look at it again.
    gc.freeze()
    if _supervisor is not None:
        gevent.spawn(_end_with_supervisor, _supervisor_fd, os.getppid())
    stop_accepting = signal.getsignal(signal.SIGTERM)

    def end_in_time(number: int, frame: Any) -> None:
        # Requests that are still open just before gunicorn gives up on them get an answer.
        gevent.spawn_later(max(0.0, worker.cfg.graceful_timeout - 1.0), service.close)
        assert callable(stop_accepting)
        stop_accepting(number, frame)

    signal.signal(signal.SIGTERM, end_in_time)


def give_logging_native_locks() -> None:
    """Takes gevent's locks out of the logging module, whose users are also native threads.

    A gevent lock can leave a greenlet waiting for ever when another thread (the tokenizer's)
    logs at the same time. It also fails, with a traceback on the screen, when the interpreter
    ends. A native lock does neither, and writing a line yields to no other greenlet.
    """
    # The class in C. gevent leaves the function threading.RLock as it is, but that function then
    # makes locks of threading's Python class, which gevent has given its own inner lock.
    new_lock = get_original("_thread", "RLock")
    vars(logging)["_lock"] = new_lock()
    for reference in vars(logging)["_handlerList"]:
        if (handler := reference()) is not None:
            handler.lock = new_lock()

    def create_lock(handler: logging.Handler) -> None:
        handler.lock = new_lock()

    # For handlers that libraries add later: transformers does, in the tokenizer's thread.
    vars(logging)["Handler"].createLock = create_lock


def _end_with_supervisor(supervisor_fd: int, master_pid: int) -> None:
    """Ends the server when the supervisor is gone, and the workers with it.

    In the front ends, because the master holds no threads and gunicorn tells it nothing of
    this child.
    """
    select.select([supervisor_fd], [], [])
    if os.getppid() == master_pid:
        os.kill(master_pid, signal.SIGTERM)


def worker_int(worker: Any) -> None:
    """In a front end that must stop at once: its waiting requests get their answer."""
    worker.wsgi.extensions["titopool"].close()


def worker_abort(worker: Any) -> None:
    """In a front end that the master found hanging."""
    worker_int(worker)


def worker_exit(server: Any, worker: Any) -> None:
    """In a front end that ends: leaves out the interpreter's own end.

    That takes a second once the tokenizer's modules are there, and can write tracebacks of
    what is taken apart in an unlucky order.
    """
    reason = sys.exc_info()[1]
    # The master calls this too, for a process that it finds gone.
    if worker.pid == os.getpid() and isinstance(reason, SystemExit):
        code = reason.code or 0
        if isinstance(code, int):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code & 0xFF)


def on_exit(server: Any) -> None:
    """In the master, after the front ends: stops the workers. Exits 1 after a failed start."""
    if _supervisor is None:
        return
    was_alive = _is_alive(_supervisor.pid)
    _stop(_supervisor.pid)
    run_dir = Path(os.environ[ENV_PREFIX + "RUN_DIR"])
    has_failed = (run_dir / FAILURE_FILE).exists()
    (run_dir / FAILURE_FILE).unlink(missing_ok=True)
    if _own_run_dir:
        shutil.rmtree(_own_run_dir, ignore_errors=True)
    if not has_failed and not was_alive:
        server.log.error("the supervisor has ended by itself, and the workers with it")
    if has_failed or not was_alive:
        sys.exit(1)


def _stop(pid: int) -> None:
    # gunicorn reaps every child of the master, so Popen cannot tell whether this one lives.
    deadline = time.monotonic() + SUPERVISOR_STOP_TIMEOUT_S
    sent = signal.SIGTERM
    while _is_alive(pid):
        os.kill(pid, sent)
        while _is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        deadline += 1
        sent = signal.SIGKILL


def _is_alive(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _urls(server: Any) -> list[str]:
    """Where this server answers, as a client on this host reaches it."""
    urls = []
    for listener in server.LISTENERS:
        address = listener.sock.getsockname()
        # A Unix socket's address is no tuple.
        if isinstance(address, tuple):
            host = LOOPBACK.get(address[0], str(address[0]))
            urls.append(
                f"http://[{host}]:{address[1]}" if ":" in host else f"http://{host}:{address[1]}"
            )
    return urls[:1]
