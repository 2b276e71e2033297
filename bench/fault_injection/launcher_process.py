"""One command of a run (`flowrt run` or `flowrt resume`) in a process of its own, and all that it starts."""

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
from fault_injection.processes import Forked

from flowrt import cli
from flowrt.launcher import local_run
from flowrt.runtime.parent_death import die_with_parent

LEAVE_S = 3.0
COLUMNS = "1000"
SIGNALS_OF = {one.name: one for one in signal.Signals} | {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
"""The signals that faults send, by their kinds."""


class Life:
    """A launcher, from its start to its end. It is forked: make it where there is no thread."""

    def __init__(self, folder: Path, words: Sequence[str], links: Sequence[str]) -> None:
        """``folder`` holds all of the trial, the run directory and its directory for temporary files among it."""
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
            self._become(list(words), list(links), theirs)
        theirs.close()

    def _become(self, words: list[str], links: list[str], orders: socket.socket) -> NoReturn:
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
            vars(local_run)["Children"] = functools.partial(Forked, table=self._table, links=links, orders=orders)
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
        """Its output."""
        if not self.output.exists():
            return ""
        with self.output.open("rb") as output:
            output.seek(self._output_start)
            return output.read().decode(errors="replace")

    # ---- its processes

    def started(self) -> list[tuple[str, int]]:
        """Names and process ids of all that were ever started in this trial, the last ones last."""
        if not self._table.exists():
            return []
        lines = [line.rpartition(" ") for line in self._table.read_text().splitlines()]
        return [(name, int(pid)) for name, _, pid in lines if pid.isdecimal()]

    @property
    def started_nothing(self) -> bool:
        """Whether this launcher has not started a process."""
        return len(self.started()) == self._started_before

    def find(self, victim: str) -> list[psutil.Process]:
        """The present processes of that name; empty when there is none."""
        if self.is_over():
            return []
        me = psutil.Process(self.pid)
        if victim == LAUNCHER:
            return [me]
        try:
            below = [one for one in me.children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return []
        if victim == EVERYTHING:
            return [me, *below]
        wanted = "trainer" if victim in RANKS else victim
        pids = [pid for name, pid in self.started() if name == wanted]
        found = [one for one in below if pids and one.pid == pids[-1]]
        if victim in RANKS and victim != AGENT:
            found = [rank for one in found for rank in self._ranks(one) if rank[0] == victim.removeprefix("rank-")]
            return [process for _, process in found]
        return found

    @staticmethod
    def _ranks(agent: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
        with contextlib.suppress(psutil.Error):
            for process in agent.children():
                with contextlib.suppress(psutil.Error):
                    if "flowrt.roles.trainer" in process.cmdline():
                        yield process.environ().get("RANK", ""), process

    def strike(self, victim: str, kind: str, found: Sequence[psutil.Process]) -> None:
        """Do it to processes that were found just now."""
        if kind in LINK_KINDS or kind == "relent":
            with contextlib.suppress(OSError):
                self._orders.send(f"{kind} {victim}".encode())
            return
        number = SIGNALS_OF[kind]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def relent(self, victim: str, kind: str, found: Sequence[psutil.Process]) -> None:
        """End what lasts."""
        if kind == "stop":
            self.strike(victim, "SIGCONT", found)
        else:
            self.strike(victim, "relent", found)

    def left(self) -> list[psutil.Process]:
        """Living processes of this trial, found by what they are descended from and by what they were started with."""
        pids = {pid for _, pid in self.started()} | {self.pid}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                    continue
                # Those that were forked do not show what they were started with, but their sessions are their own.
                is_started = process.create_time() >= self._began_at() and {process.pid, os.getsid(process.pid)} & pids
                words = [*process.cmdline(), *process.environ().values()]
                if is_started or any(str(self.folder) in word for word in words):
                    found.append(process)
        return found

    def _began_at(self) -> float:
        return time.time() - (time.monotonic() - self.began_s) - 1.0

    def kill(self) -> None:
        """End all of it, and wait for the launcher."""
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.code is None:
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
            self._orders.close()


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def used(path: Path) -> bool:
    """Whether a living process has the file mapped."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if str(path) in Path(f"/proc/{process.pid}/maps").read_text():
                return True
    return False


Waits = Iterator[None]


def wait(condition: Callable[[], bool], deadline_s: float) -> Waits:
    """Come back here until it holds, or time is up."""
    end_s = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end_s:
        yield
