"""gunicorn's settings, and the hooks with which its master starts and stops the workers.

The master starts only a supervisor process (`python -m workers.supervisor`, on a Ray cluster
`python -m workers.cluster`): the master forks,
so it must hold no thread, ZeroMQ socket or engine. `gunicorn.conf.py` and `titopool serve` both
use this module.
"""

import ctypes
import faulthandler
import gc
import logging
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gevent
from gevent.monkey import get_original

from app.counts.shared_file import add_ended, forget_all
from app.draining import END_TIMEOUT_S, Draining, wait_until_idle
from app.http.browsers import is_loopback
from app.http.connections import limits_within
from app.http.keys import Keys
from app.http.tls import ssl_context  # noqa: F401
from app.inputs.chat_template import template_of_file
from app.shared_database import check_folder
from titopool.errors import ConfigError
from titopool.launch import child_environment
from titopool.secret_files import read_secret_file
from titopool.settings.config import ENV_PREFIX, SECRET_VARIABLES
from titopool.settings.files import CONFIG_VARIABLE
from titopool.settings.gpus import number_of_workers
from titopool.settings.logs import configure_logging, show, show_as
from titopool.settings.sources import (
    check_engine_options,
    check_model,
    from_environment,
    ignored_variables,
)
from titopool.tracing import check_installed
from titopool.wire.run_dir import CURVE_KEY, FAILURE, make_run_dir, write_endpoints
from titopool.wire.sockets import fault_of_listening, read_curve_key, worker_endpoint

try:
    _config = from_environment()
    check_engine_options(_config)
    check_model(_config)
    check_installed(_config.otlp_endpoint)
    if any(endpoint.startswith("tcp://") for endpoint in _config.endpoints):
        read_curve_key(_config.curve_key_file)
    template_of_file(_config.chat_template)
    _keys = Keys(_config)
    if _config.tls_key_file:
        read_secret_file(_config.tls_key_file, "tls_key_file")
        if not os.access(_config.tls_cert_file, os.R_OK):
            raise ConfigError(
                f"tls_cert_file: expected a file that can be read, got {_config.tls_cert_file}"
            )
except ConfigError as error:
    sys.exit(f"titopool: {error}")

# All processes of this server have the settings of its start, also if the file changes meanwhile.
os.environ.pop(CONFIG_VARIABLE, None)
os.environ.update(_config.to_environment())

# Many systems have a soft limit of 1,024 descriptors; raise it to the hard limit.
_num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (_num_descriptors, _num_descriptors))
_num_open, _num_connections = limits_within(
    sys.maxsize if _num_descriptors == resource.RLIM_INFINITY else _num_descriptors,
    max_open_requests=_config.max_open_requests,
)
# Front ends read their settings from the environment.
os.environ[ENV_PREFIX + "MAX_OPEN_REQUESTS"] = str(_num_open)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


bind = _address(_config.host, _config.port)
# Half of the cores stay free for the engines.
workers = _config.num_front_ends or min(4, max(1, len(os.sched_getaffinity(0)) // 2))
# One greenlet for each connection: switching threads would cost more than the rest of a request.
worker_class = "app.gunicorn_worker.FrontEnd"
worker_connections = _num_connections
backlog = 4096
keepalive = 75
# No header of a client chooses a route: gunicorn would take these from every client on this host.
forwarder_headers = ""
certfile = _config.tls_cert_file or None
keyfile = _config.tls_key_file or None
loglevel = _config.log_level
logger_class = "app.gunicorn_log.Log"
show_as(_config.log_format)
# Seconds. A front end reports to the master each second; one that is silent for this long hangs.
timeout = 120
# Seconds for open requests of a front end that a reload (SIGHUP) ends.
graceful_timeout = max(1, round(_config.drain_timeout_s) + END_TIMEOUT_S)
control_socket_disable = True

# glibc's number of the option.
M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 2**18
# A worker needs less than this to stop its engine.
SUPERVISOR_STOP_TIMEOUT_S = 6.0
# The front ends of a master that was killed leave its port within a second.
PORT_TIMEOUT_S = 2.0
# Addresses at which a client on this host reaches a server that listens on all of them.
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}

_supervisor: subprocess.Popen[bytes] | None = None
# The supervisor's pidfd, which front ends inherit. Unlike the pid, it never refers to another
# process, even if the supervisor ends before a front end is forked.
_supervisor_fd = -1
_own_run_dir: str | None = None


def on_starting(server: Any) -> None:
    """In the master, before gunicorn binds: ends it with one line where it could not.

    gunicorn itself would try for five seconds, with two lines for each try. A socket that systemd or
    another master hands over is bound already.
    """
    if server.master_pid or "LISTEN_FDS" in os.environ or server.cfg.reuse_port:
        return
    deadline = time.monotonic() + PORT_TIMEOUT_S
    # The address of a Unix socket is a string, and a descriptor a number.
    for host, port in [one for one in server.cfg.address if isinstance(one, tuple)]:
        while fault := fault_of_listening(host, port):
            if time.monotonic() > deadline:
                sys.exit(
                    f"titopool: {fault}; choose another with --host and --port (TITOPOOL_HOST, "
                    "TITOPOOL_PORT), or stop what is there"
                )
            time.sleep(0.1)


def when_ready(server: Any) -> None:
    """In the master, with the port bound and before any front end: starts the supervisor."""
    global _supervisor, _supervisor_fd, _own_run_dir
    _drain_at_sigterm(server)
    # Of gunicorn's own options too.
    os.environ[ENV_PREFIX + "NUM_FRONT_ENDS"] = str(server.num_workers)
    if warning := _open_to_the_network(server):
        show(f"\ntitopool: {warning}\n")
    if ignored := ignored_variables():
        server.log.info("Ignored variables of a Kubernetes Service: %s", ", ".join(ignored))
    if _num_open < _config.max_open_requests:
        server.log.warning(
            "max_open_requests is %d here, not %d: a process may open %d files and connections; "
            "raise the limit (ulimit -n, LimitNOFILE, Docker's ulimits)",
            _num_open, _config.max_open_requests, _num_descriptors,
        )  # fmt: skip
    run_dir: str = _config.run_dir
    try:
        if run_dir:
            os.makedirs(run_dir, mode=0o700, exist_ok=True)
            forget_all(run_dir)
        else:
            run_dir = _own_run_dir = make_run_dir()
        # Front ends share files in it. They and the supervisor find the workers' sockets there.
        os.environ[ENV_PREFIX + "RUN_DIR"] = run_dir
        check_folder(run_dir)
        if _config.endpoints:
            return
        num_workers = _config.num_workers if _config.cluster else number_of_workers(_config)
        os.environ[ENV_PREFIX + "NUM_WORKERS"] = str(num_workers)
        # A range of a file, of which a number of workers alone would win over both ends.
        os.environ[ENV_PREFIX + "MAX_WORKERS"] = str(_config.max_workers)
        # The supervisor replaces it; front ends may start before.
        if _config.cluster:
            key_file = _config.curve_key_file or os.path.join(run_dir, CURVE_KEY)
            os.environ[ENV_PREFIX + "CURVE_KEY_FILE"] = key_file
            read_curve_key(key_file)
            write_endpoints(run_dir, [])
        else:
            local = [worker_endpoint(run_dir, index) for index in range(num_workers)]
            write_endpoints(run_dir, local)
    except (ConfigError, OSError) as error:
        if _own_run_dir:
            shutil.rmtree(_own_run_dir, ignore_errors=True)
        sys.exit(f"titopool: {error}")
    _supervisor = subprocess.Popen(
        [sys.executable, "-m", "workers.cluster" if _config.cluster else "workers.supervisor"]
        + ["--parent-pid", str(os.getpid())]
        + [word for url in _urls(server) for word in ("--url", url)]
        + (["--requires-key"] if _keys.guard_generation else [])
        + (["--remove-run-dir"] if _own_run_dir else []),
        env=child_environment(
            {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        ),
        stdin=subprocess.DEVNULL,
        # Signals from the terminal must reach only the master, which stops the front ends first.
        start_new_session=True,
    )
    # The pid is still the supervisor's: Python needs milliseconds to start, before it could end.
    _supervisor_fd = os.pidfd_open(_supervisor.pid)


def child_exit(server: Any, worker: Any) -> None:
    """In the master, after a front end has ended: keeps what it has counted."""
    if run_dir := os.environ.get(ENV_PREFIX + "RUN_DIR"):
        add_ended(run_dir, worker.pid)


def _drain_at_sigterm(server: Any) -> None:
    stop = server.handle_term

    def handle_term() -> None:
        # Without workers, open requests end at once or never.
        has_workers = _supervisor is None or _is_alive(_supervisor.pid)
        wait_until_idle(server, _config.drain_timeout_s if has_workers else 0.0)
        stop()

    server.handle_term = handle_term


def _open_to_the_network(server: Any) -> str:
    """What other machines may do without a key, and the settings against it; "" if nothing."""
    addresses = [listener.sock.getsockname() for listener in server.LISTENERS]
    # The address of a Unix socket is a string.
    hosts = [str(one[0]) for one in addresses if isinstance(one, tuple)]
    exposed = [host for host in hosts if not is_loopback(host)]
    if not exposed or _keys.guard_generation:
        return ""
    what = (
        "generate"
        if _keys.guard_administration
        else "generate, pause it and replace the model's weights"
    )
    return (
        f"WARNING: NO KEY IS SET, and this server listens at {', '.join(exposed)}. Everybody who "
        f"reaches this address may {what}. Set TITOPOOL_API_KEY or api_key_file, or host to "
        "127.0.0.1."
    )


def post_fork(server: Any, worker: Any) -> None:
    """Lets signals end a front end that begins.

    Its own handlers come 0.3 s later. Until then it would have those of gunicorn's master, which only
    queue a signal, and the master would wait for `graceful_timeout`.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def post_worker_init(worker: Any) -> None:
    """In each front end, before its first request: connects to the workers."""
    configure_logging(_config.log_level, log_format=_config.log_format)
    if _config.log_level != "debug":
        worker.log.error_log.addFilter(leave_out_sent_bytes)
    give_logging_native_locks()
    return_large_blocks()
    # After a crash in native code, the log has each thread's traceback.
    faulthandler.enable()
    service = worker.wsgi.extensions["titopool"]
    service.draining = Draining(worker)
    service.tokenizer.leaves_out_torch = True
    service.start()
    worker.wsgi.extensions["titopool_history"].start()
    # Imported modules live as long as the process: exempt them from garbage collection.
    gc.freeze()
    if _supervisor is not None:
        gevent.spawn(_end_with_supervisor, _supervisor_fd, os.getppid())
    stop_accepting = signal.getsignal(signal.SIGTERM)

    def end_in_time(number: int, frame: Any) -> None:
        # One second before gunicorn kills open requests, fail them: their clients get a response.
        gevent.spawn_later(max(0.0, worker.cfg.graceful_timeout - 1.0), service.close)
        assert callable(stop_accepting)
        stop_accepting(number, frame)

    signal.signal(signal.SIGTERM, end_in_time)


def return_large_blocks() -> None:
    """Returns the memory of large bodies to the system as soon as they are freed.

    glibc keeps such blocks otherwise: each one that is freed raises its threshold, up to 32 MiB.
    """
    # Other C libraries have no such function.
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def leave_out_sent_bytes(record: logging.LogRecord) -> bool:
    """A filter for gunicorn's log: a line on malformed HTTP keeps the client's address only.

    gunicorn repeats what it could not parse, which may be the end of a body.
    """
    if found := re.match(r"Invalid request from ip=[^ ]*(?=: )", record.msg):
        record.msg = found[0]
    return True


def give_logging_native_locks() -> None:
    """Replaces gevent's locks in the logging module by native ones.

    Native threads, such as the tokenizer's, log too. With a gevent lock, a greenlet that logs at
    the same time can wait forever, and the interpreter's exit prints a traceback. A native lock
    has neither problem, as writing a log line does not switch greenlets.
    """
    # Use the C class: gevent patches the Python class behind `threading.RLock`.
    new_lock = get_original("_thread", "RLock")
    vars(logging)["_lock"] = new_lock()
    for reference in vars(logging)["_handlerList"]:
        if (handler := reference()) is not None:
            handler.lock = new_lock()

    def create_lock(handler: logging.Handler) -> None:
        handler.lock = new_lock()

    # For handlers that libraries add later, such as transformers in the tokenizer's thread.
    vars(logging)["Handler"].createLock = create_lock


def _end_with_supervisor(supervisor_fd: int, master_pid: int) -> None:
    """Ends the server after the supervisor has ended, because the workers end with it.

    Runs in the front ends: the master has no threads, and gunicorn has no hook for this child.
    """
    select.select([supervisor_fd], [], [])
    if os.getppid() == master_pid:
        os.kill(master_pid, signal.SIGTERM)


def worker_int(worker: Any) -> None:
    """In a front end that must stop immediately, or that the master aborts: fails open requests."""
    worker.wsgi.extensions["titopool"].close()


worker_abort = worker_int


def worker_exit(server: Any, worker: Any) -> None:
    """In a front end that ends: exits without the interpreter's shutdown.

    With the tokenizer's modules loaded, that shutdown takes a second and can print tracebacks.
    """
    reason = sys.exc_info()[1]
    # The master also calls this hook, for a front end that has already ended.
    if worker.pid == os.getpid() and isinstance(reason, SystemExit):
        code = reason.code or 0
        if isinstance(code, int):
            if worker.wsgi is not None and (traces := worker.wsgi.extensions["titopool"].traces):
                traces.flush()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code & 0xFF)


def on_exit(server: Any) -> None:
    """In the master, after the front ends ended: stops the workers.

    Exits with status 1 after a failed start, or if the supervisor ended unexpectedly.
    """
    if _supervisor is None:
        if _own_run_dir:
            shutil.rmtree(_own_run_dir, ignore_errors=True)
        return
    was_alive = _is_alive(_supervisor.pid)
    _stop_process(_supervisor.pid)
    failure = Path(os.environ[ENV_PREFIX + "RUN_DIR"], FAILURE)
    has_failed = failure.exists()
    failure.unlink(missing_ok=True)
    if _own_run_dir:
        shutil.rmtree(_own_run_dir, ignore_errors=True)
    if not has_failed and not was_alive:
        server.log.error("the supervisor has ended by itself, and the workers with it")
    if has_failed or not was_alive:
        sys.exit(1)


def _stop_process(pid: int) -> None:
    # gunicorn reaps all children of the master, so Popen cannot tell whether this one is alive.
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
    """The server's URL for a client on this host, in a list; none if it listens on Unix sockets."""
    for listener in server.LISTENERS:
        address = listener.sock.getsockname()
        # The address of a Unix socket is a string.
        if isinstance(address, tuple):
            scheme = "https" if _config.tls_cert_file else "http"
            return [f"{scheme}://{_address(LOOPBACK.get(address[0], str(address[0])), address[1])}"]
    return []
