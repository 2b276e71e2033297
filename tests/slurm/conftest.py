"""A SLURM cluster for tests: a controller and three nodes as processes of this machine, gone when the tests are."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from flowrt.runtime.parent_death import die_with_parent

NODES = ("n1", "n2", "n3")
CORES = 4
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
TOKEN = "FLOWRT_SLURM_TEST"
START_S = 30.0
LOOK_EVERY_S = 0.2
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
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
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
KillWait=5
MpiDefault=none
GresTypes=npu
"""
NPUS = 8
"""What SLURM believes each node to have: it only counts them."""


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


class Cluster:
    """Daemons of a cluster that nobody else sees: ports, spool and state of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._daemons: list[subprocess.Popen[bytes]] = []
        ports = free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        conf = CONF.format(host=host, user=getpass.getuser(), port=ports[0], directory=directory)
        for name, port in zip(NODES, ports[1:], strict=True):
            (directory / f"spool-{name}").mkdir()
            conf += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CORES} RealMemory=2000"
            conf += f" Gres=npu:{NPUS}\n"
        conf += f"PartitionName=train Nodes={NODES[0]},{NODES[1]},{NODES[2]} Default=YES State=UP\n"
        conf += f"PartitionName=generate Nodes={','.join(NODES)} State=UP\n"
        (directory / "state").mkdir()
        (directory / "slurm.conf").write_text(conf)
        (directory / "gres.conf").write_text(f"NodeName={','.join(NODES)} Name=npu Count={NPUS}\n")
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

    def _start(self, *words: str) -> None:
        with (self.directory / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                [*words, "-f", str(self.directory / "slurm.conf")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._daemons.append(daemon)

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """What a command of SLURM prints; empty when it fails (the controller may still be starting)."""
        ended = subprocess.run(words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=30)
        return ended.stdout.strip()

    def submit(self, script: Path, *arguments: object, options: tuple[str, ...] = ()) -> str:
        """The number of the job."""
        words = ["sbatch", "--parsable", *options, str(script), *map(str, arguments)]
        ended = subprocess.run(
            words, env=self.environment, cwd=script.parent, capture_output=True, text=True, timeout=30
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def job(self, number: str) -> Mapping[str, str]:
        """What SLURM knows about a job."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def wait_for(self, number: str, deadline_s: float, log: Callable[[], str]) -> str:
        """The exit code of a job that has ended, as CODE:SIGNAL."""
        over = lambda: self.job(number).get("JobState") in OVER  # noqa: E731
        self.wait_until(over, deadline_s, lambda: f"job {number} goes on: {self.job(number)}\n{log()}")
        return self.job(number)["ExitCode"]

    def wait_until(self, condition: Callable[[], object], deadline_s: float, what: Callable[[], str] = str) -> None:
        end_s = time.monotonic() + deadline_s
        while not condition():
            said = (self.directory / "slurmctld.log").read_text()[-2000:]
            assert time.monotonic() < end_s, f"after {deadline_s:.0f} s: {what()}\n{said}"
            time.sleep(LOOK_EVERY_S)

    def processes(self) -> list[psutil.Process]:
        """Daemons, steps and jobs of this cluster, by what they have in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(TOKEN) == str(self.directory) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        return found

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
        left = self.processes()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(left, timeout=10)
        assert not alive, alive


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three idle nodes."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"SLURM is not installed: there is no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("slurmd only runs as root")
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:
        cluster = Cluster(Path(directory))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
