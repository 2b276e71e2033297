"""A SLURM cluster for tests: a controller and three nodes as local processes, which end after the tests."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from flowrt.runtime.parent_death import die_with_parent

NODES = ("n1", "n2", "n3")
CORES = 4
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
TOKEN = "FLOWRT_SLURM_TEST"
START_S = 30.0
POLL_S = 0.2
END_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
CONF = """\
ClusterName=flowrt
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={port}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters={select}
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
KillWait=5
MpiDefault=none
GresTypes=gpu,npu
"""
NPUS = 4
GPUS = 4
"""Devices that SLURM assumes on each node; it only counts them."""
MEMORY_MB = 2000
MEMORY_MANAGED = f"CR_Core_Memory\nDefMemPerNode={MEMORY_MB // 2}"
"""Memory is a resource, as on most clusters: a job, and by default its first step, takes its part of a node's."""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]


class Cluster:
    """Daemons of a private cluster with its own ports, spool and state."""

    def __init__(self, directory: Path, select: str) -> None:
        """``select``: the resources that jobs consume."""
        self.directory = directory
        self._daemons: list[subprocess.Popen[bytes]] = []
        ports = free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        conf = CONF.format(host=host, user=getpass.getuser(), port=ports[0], directory=directory, select=select)
        for name, port in zip(NODES, ports[1:], strict=True):
            (directory / f"spool-{name}").mkdir()
            conf += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CORES}"
            conf += f" RealMemory={MEMORY_MB} Features=fast Gres=gpu:{GPUS},npu:{NPUS}\n"
        conf += f"PartitionName=train Nodes={NODES[0]},{NODES[1]},{NODES[2]} Default=YES State=UP\n"
        conf += f"PartitionName=generate Nodes={','.join(NODES)} State=UP\n"
        (directory / "state").mkdir()
        (directory / "slurm.conf").write_text(conf)
        for device in range(GPUS):
            (directory / f"gpu{device}").touch()  # SLURM counts no GPUs without device files
        nodes = f"NodeName={','.join(NODES)}"
        gpus = f"{nodes} Name=gpu File={directory}/gpu[0-{GPUS - 1}]\n"
        (directory / "gres.conf").write_text(f"{gpus}{nodes} Name=npu Count={NPUS}\n")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "SLURM_CONF": str(directory / "slurm.conf"),
            TOKEN: str(directory),
            "OMP_NUM_THREADS": "1",
        }

    def start(self) -> None:
        self._start("slurmctld", "-D")
        for name in NODES:
            self._start("slurmd", "-D", "-N", name)
        self.wait_until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(NODES)), START_S)

    def _start(self, *command: str) -> None:
        with (self.directory / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                [*command, "-f", str(self.directory / "slurm.conf")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._daemons.append(daemon)

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """The output of a SLURM command; empty when it fails (the controller may still be starting)."""
        result = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=30)
        return result.stdout.strip()

    def submit(self, script: Path, *arguments: object, options: tuple[str, ...] = ()) -> str:
        """Submit a script. Returns the number of the job."""
        command = ["sbatch", "--parsable", *options, str(script), *map(str, arguments)]
        result = subprocess.run(
            command, env=self.environment, cwd=script.parent, capture_output=True, text=True, timeout=30
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def test(self, script: Path) -> str:
        """What sbatch says of a script that it checks without submitting it."""
        command = ["sbatch", "--test-only", str(script)]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30).stderr

    def job(self, number: str) -> Mapping[str, str]:
        """The fields of ``scontrol show job``."""
        fields = self.run("scontrol", "show", "job", number).split()
        return dict(field.partition("=")[::2] for field in fields if "=" in field)

    def wait_for(self, number: str, deadline_s: float, log: Callable[[], str]) -> str:
        """The exit code of a job that has ended, as CODE:SIGNAL."""
        has_ended = lambda: self.job(number).get("JobState") in END_STATES  # noqa: E731
        self.wait_until(has_ended, deadline_s, lambda: f"job {number} still runs: {self.job(number)}\n{log()}")
        return self.job(number)["ExitCode"]

    def wait_until(self, condition: Callable[[], object], deadline_s: float, what: Callable[[], str] = str) -> None:
        end_s = time.monotonic() + deadline_s
        while not condition():
            log_end = (self.directory / "slurmctld.log").read_text()[-2000:]
            assert time.monotonic() < end_s, f"after {deadline_s:.0f} s: {what()}\n{log_end}"
            time.sleep(POLL_S)

    def processes(self) -> list[psutil.Process]:
        """Daemons, steps and jobs of this cluster, identified by a variable in their environment."""
        members = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(TOKEN) == str(self.directory) and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        return members

    def close(self) -> None:
        """End jobs, then daemons; kill what is left."""
        self.run("scancel", "--user", getpass.getuser(), "--signal=KILL", "--full")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
        remaining = self.processes()
        for process in remaining:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(remaining, timeout=10)
        assert not alive, alive


@contextmanager
def running_cluster(select: str) -> Iterator[Cluster]:
    """Three idle nodes."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"SLURM is not installed: there is no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("slurmd only runs as root")
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:
        cluster = Cluster(Path(directory), select)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster where memory is a resource."""
    with running_cluster(MEMORY_MANAGED) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def core_cluster() -> Iterator[Cluster]:
    """A cluster where only cores are a resource."""
    with running_cluster("CR_Core") as cluster:
        yield cluster
