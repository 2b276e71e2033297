"""One `flowrt run` or `flowrt resume` in a process of its own, and all processes that it starts."""

import contextlib
import functools
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import psutil
from fault_injection.faults import AGENT, EVERYTHING, LAUNCHER, LINK_KINDS, RANKS
from fault_injection.processes import ForkedChildren

from flowrt import cli
from flowrt.launcher import local_run
from flowrt.runtime.parent_death import die_with_parent

LEAVE_S = 3.0
COLUMNS = "1000"
SIGNALS_OF = {member.name: member for member in signal.Signals} | {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
"""The signals that faults send, by their kinds."""


class LauncherProcess:
    """A launcher process. The constructor forks, so it must be called before a thread is started."""

    def __init__(self, folder: Path, words: Sequence[str], links: Sequence[str]) -> None:
        """``folder`` is that of the trial, ``words`` is the command, ``links`` are the workers that get a proxy."""
        self.folder = folder
        self.began_s = time.monotonic()
        self.code: int | None = None
        self._table = folder / "processes.txt"
        self._started_before = len(self.started())
        self.output = folder / "output.txt"
        self._output_start = self.output.stat().st_size if self.output.exists() else 0
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._orders.close()
            self._run_command(list(words), list(links), theirs)
        theirs.close()

    def _run_command(self, words: list[str], links: list[str], orders: socket.socket) -> NoReturn:
        code = 1
        try:
            die_with_parent()
            os.setsid()
            output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ |= {"TMPDIR": str(self.folder / "tmp"), "COLUMNS": COLUMNS, "OMP_NUM_THREADS": "1"}
            tempfile.tempdir = None
            vars(local_run)["Children"] = functools.partial(
                ForkedChildren, table=self._table, links=links, orders=orders
            )
            code = cli.main(words)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:  # noqa: BLE001 (as the interpreter does, and this process ends with it)
            traceback.print_exc()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self._orders.close()
        return self.code is not None

    def read_output(self) -> str:
        """The standard output and error of this launcher and its children so far."""
        if not self.output.exists():
            return ""
        with self.output.open("rb") as output:
            output.seek(self._output_start)
            return output.read().decode(errors="replace")

    # ---- processes

    def started(self) -> list[tuple[str, int]]:
        """Names and process ids of all processes that were started in this trial, in order of their start."""
        if not self._table.exists():
            return []
        lines = [line.rpartition(" ") for line in self._table.read_text().splitlines()]
        return [(name, int(pid)) for name, _, pid in lines if pid.isdecimal()]

    @property
    def started_nothing(self) -> bool:
        """Whether this launcher has not started a process."""
        return len(self.started()) == self._started_before

    def find(self, victim: str) -> list[psutil.Process]:
        """The living processes of the victim; empty if there is none."""
        if self.is_over():
            return []
        me = psutil.Process(self.pid)
        if victim == LAUNCHER:
            return [me]
        try:
            below = [child for child in me.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return []
        if victim == EVERYTHING:
            return [me, *below]
        wanted = "trainer" if victim in RANKS else victim
        pids = [pid for name, pid in self.started() if name == wanted]
        processes = [process for process in below if pids and process.pid == pids[-1]]
        if victim in RANKS and victim != AGENT:
            ranks = (rank for process in processes for rank in self._ranks(process))
            return [process for rank, process in ranks if rank == victim.removeprefix("rank-")]
        return processes

    @staticmethod
    def _ranks(agent: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
        with contextlib.suppress(psutil.Error):
            for process in agent.children():
                with contextlib.suppress(psutil.Error):
                    if "flowrt.roles.trainer" in process.cmdline():
                        yield process.environ().get("RANK", ""), process

    def inject(self, victim: str, kind: str, processes: Sequence[psutil.Process]) -> None:
        """Inject a fault: a message to the proxy of the victim, or a signal to ``processes``."""
        if kind in LINK_KINDS or kind == "relent":
            with contextlib.suppress(OSError):
                self._orders.send(f"{kind} {victim}".encode())
            return
        number = SIGNALS_OF[kind]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def end_fault(self, victim: str, kind: str, processes: Sequence[psutil.Process]) -> None:
        """End a lasting fault: continue the stopped ``processes``, or reopen the link of the victim."""
        if kind == "stop":
            self.inject(victim, "SIGCONT", processes)
        else:
            self.inject(victim, "relent", processes)

    def left(self) -> list[psutil.Process]:
        """Living processes of this trial, found by process id, session, command line or environment."""
        pids = {pid for _, pid in self.started()} | {self.pid}
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                    continue
                # Forked processes have the command line of their parent, but a known process id or session.
                is_started = process.create_time() >= self._began_at() and {process.pid, os.getsid(process.pid)} & pids
                words = [*process.cmdline(), *process.environ().values()]
                if is_started or any(str(self.folder) in word for word in words):
                    processes.append(process)
        return processes

    def _began_at(self) -> float:
        return time.time() - (time.monotonic() - self.began_s) - 1.0

    def kill(self) -> None:
        """Kill all processes of the trial, and wait for the launcher."""
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.code is None:
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
            self._orders.close()


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_mapped(path: Path) -> bool:
    """Whether a living process has the file mapped."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if str(path) in Path(f"/proc/{process.pid}/maps").read_text():
                return True
    return False


Waits = Iterator[None]


def wait(condition: Callable[[], bool], deadline_s: float) -> Waits:
    """Yield until ``condition`` holds, at most ``deadline_s`` seconds."""
    end_s = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end_s:
        yield
