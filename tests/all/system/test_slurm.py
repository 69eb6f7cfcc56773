"""deploy/slurm/serve.sbatch on a Slurm of one node: real daemons, real gunicorn, stub engines."""

import getpass
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil
import pytest
import requests

from harness.servers import REPOSITORY, alive, environment, free_port, wait_until
from tests.all.system.packages import need, need_root, path_of

SCRIPT = REPOSITORY / "deploy" / "slurm" / "serve.sbatch"
STUB = f"{sys.executable} -m harness.stub_worker"
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs={num_cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class Slurm:
    """munged, slurmctld and slurmd, with all their files in one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._environ = environment(SLURM_CONF=str(folder / "slurm.conf"))
        munge = folder / "munge"
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(mode=0o755)
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        host = os.uname().nodename.partition(".")[0]
        (folder / "slurm.conf").write_text(
            CONFIG.format(
                host=host, folder=folder, controller_port=free_port(), node_port=free_port(),
                num_cores=max(2, os.cpu_count() or 2),
            )
        )  # fmt: skip
        files = {
            "key": key, "socket": munge / "socket", "pid": munge / "pid",
            "log": munge / "log", "seed": munge / "seed",
        }  # fmt: skip
        options = [
            f"--{'key' if name == 'key' else name}-file={path}" for name, path in files.items()
        ]
        options = [one.replace("--socket-file", "--socket") for one in options]
        try:
            self._start("munged", "--foreground", "--force", *options)
            wait_until(lambda: (munge / "socket").exists(), 10)
            self._start("slurmctld", "-D", "-c")
            self._start("slurmd", "-D", "-c", "-N", host)
            wait_until(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T"), 20, self.logs)
        except BaseException:
            self.stop()
            raise

    def _start(self, program: str, *words: str) -> None:
        with (self.folder / f"{program}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [str(path_of(program)), *words], env=self._environ, stdout=output, stderr=output
                )
            )

    def run(self, *words: str, **variables: str) -> str:
        done = subprocess.run(
            words, env=self._environ | variables, cwd=self.folder, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        return done.stdout + done.stderr

    def submit(self, *words: str, **variables: str) -> "Job":
        cores = ["--nodes=1", "--ntasks-per-node=2", "--oversubscribe"]
        submitted = self.run("sbatch", "--parsable", *cores, str(SCRIPT), *words, **variables)
        assert submitted.strip().isdigit(), submitted + self.logs()
        return Job(self, submitted.strip())

    def logs(self) -> str:
        return "\n".join(
            f"== {one}\n{one.read_text()[-3000:]}" for one in self.folder.glob("*.log")
        )

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(60)


class Job:
    """A submitted job."""

    def __init__(self, slurm: Slurm, number: str):
        self._slurm = slurm
        self.number = number
        self.folder = slurm.folder / f"titopool-{number}"

    @property
    def log(self) -> str:
        path = self._slurm.folder / f"titopool-{self.number}.log"
        return (path.read_text() if path.exists() else "") + self._slurm.logs()

    @property
    def url(self) -> str:
        return (self.folder / "url").read_text().strip()

    def show(self) -> str:
        return self._slurm.run("scontrol", "show", "job", self.number)

    def is_over(self) -> bool:
        return not any(
            f"JobState={one}" in self.show() for one in ("PENDING", "RUNNING", "COMPLETING")
        )

    def wait_for_state(self, state: str) -> None:
        ended = lambda: f"JobState={state} " in self.show()  # noqa: E731
        wait_until(ended, 40, lambda: self.show() + self.log)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    need("munged", "slurmctld", "slurmd", "sbatch")
    need_root()
    # A socket's path has at most 107 characters.
    started = Slurm(tmp_path_factory.mktemp("slurm"))
    yield started
    started.stop()


@pytest.fixture
def submit(slurm: Slurm) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(*words: str, **variables: str) -> Job:
        variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PORT": str(free_port()), "WORKER_PORT": str(two_free_ports()), "WORKERS_PER_NODE": "2",
            "WORKER_COMMAND": STUB, "PYTHONPATH": str(REPOSITORY), "USER": getpass.getuser(),
            "TITOPOOL_DRAIN_TIMEOUT_S": "20", **variables,
        }  # fmt: skip
        jobs.append(slurm.submit(*words, **variables))
        return jobs[-1]

    yield start
    for job in jobs:
        slurm.run("scancel", job.number)
    for job in jobs:
        # The next job's test must not meet them.
        wait_until(lambda job=job: job.is_over() and not processes_of(job), 30)


def two_free_ports() -> int:
    """The first of two neighbours that were free a moment ago."""
    while True:
        port = free_port()
        with suppress(OSError, OverflowError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port + 1))
            return port


def processes_of(job: Job) -> list[psutil.Process]:
    """What Slurm, or the job's script, has started for the job."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            # The daemons are older than the job.
            if one.environ().get("SLURM_JOB_ID") == job.number:
                found.append(one)
    return alive(found)


def test_a_job_serves_until_its_time_ends_and_loses_no_request(slurm: Slurm, submit):
    job = submit(WORKER_COMMAND=f"{STUB} --delay-s 8")
    wait_until(lambda: (job.folder / "url").exists(), 40, lambda: job.log)
    assert (job.folder.stat().st_mode & 0o777) == 0o700
    wait_until(
        lambda: requests.get(f"{job.url}/ready").json()["num_ready"] == 2, 20, lambda: job.log
    )
    names = {one["worker"] for one in requests.get(f"{job.url}/ready").json()["workers"]}
    host = os.uname().nodename
    assert names == {f"{host}-0", f"{host}-1"}
    url = job.url
    with ThreadPoolExecutor(8) as pool:
        send = lambda n: requests.post(  # noqa: E731
            f"{url}/generate/", json={"prompts": [[n, 7]], "max_tokens": 2}, timeout=60
        )
        answers = [pool.submit(send, n) for n in range(1, 9)]
        metrics = lambda: requests.get(f"{url}/metrics").text  # noqa: E731
        running = re.compile(r"^titopool_worker_sequences{.*} 4.0$", re.M)
        wait_until(lambda: len(running.findall(metrics())) == 2, 10, metrics)
        # As at the time limit: to the script alone.
        slurm.run("scancel", "--batch", "--signal=TERM", job.number)
        assert [one.result().json()["completion_ids"] for one in answers] == [
            [[7, n]] for n in range(1, 9)
        ]
    job.wait_for_state("COMPLETED")
    assert "ExitCode=0:0" in job.show()
    assert not (job.folder / "url").exists()
    wait_until(lambda: not processes_of(job), 10, lambda: str(processes_of(job)))


def test_slurm_signals_a_job_before_its_time_limit(slurm: Slurm, submit):
    job = submit(WORKER_COMMAND=f"{STUB} --delay-s 3")
    wait_until(lambda: (job.folder / "url").exists(), 40, lambda: job.log)
    url = job.url
    ready = lambda: requests.get(f"{url}/ready", timeout=10)  # noqa: E731
    wait_until(lambda: ready().json()["num_ready"] == 2, 20, lambda: job.log)
    # The shortest limit that is longer than the script's 90 s: slurmctld, which looks at the limits
    # every 30 s, finds that the signal is due.
    assert not slurm.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=2")
    limit = datetime.fromisoformat(re.findall(r"EndTime=(\S+)", job.show())[0])
    with ThreadPoolExecutor(100) as pool:
        answers = []
        send = lambda n: requests.post(  # noqa: E731
            f"{url}/generate/", json={"prompts": [[n, 7]], "max_tokens": 2}, timeout=60
        )

        def is_draining() -> bool:
            # Requests overlap, so that some are open when the signal comes.
            answers.append(pool.submit(send, len(answers) + 1))
            return ready().status_code == 503

        wait_until(is_draining, 45, lambda: job.log)
        assert ready().json()["draining"]
        assert not answers[-2].done()
        for n, answer in enumerate(answers, 1):
            assert answer.result().json()["completion_ids"] == [[7, n]]
    job.wait_for_state("COMPLETED")
    assert datetime.now() < limit
    wait_until(lambda: not processes_of(job), 10, lambda: str(processes_of(job)))


def test_a_worker_that_dies_is_restarted(slurm: Slurm, submit):
    job = submit()
    wait_until(lambda: (job.folder / "url").exists(), 40, lambda: job.log)
    ready = lambda: requests.get(f"{job.url}/ready").json()["num_ready"]  # noqa: E731
    wait_until(lambda: ready() == 2, 20, lambda: job.log)
    victim, *_ = (one for one in processes_of(job) if "--endpoint" in one.cmdline())
    victim.send_signal(signal.SIGKILL)
    wait_until(lambda: "has died; restarting it" in job.log, 10, lambda: job.log)
    wait_until(lambda: ready() == 2, 20, lambda: job.log)


def test_a_job_whose_workers_cannot_start_fails_with_the_cause(slurm: Slurm, submit):
    job = submit(WORKER_COMMAND=f"{STUB} --no-such-option 1")
    job.wait_for_state("FAILED")
    assert "unrecognized arguments: --no-such-option" in job.log
    wait_until(lambda: not processes_of(job), 10, lambda: str(processes_of(job)))
