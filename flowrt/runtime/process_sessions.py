"""Sessions of processes: the processes of a server and the named shared memory that they use, killed and removed.

``python -m flowrt.runtime.process_sessions`` is the reaper that `SessionReaper` starts. It holds no copy of this
process's descriptors, so that it is not affected by how this process ends.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.waits import BoundedElsewhere, blocking, sleep_blocking

SHARED = Path("/dev/shm")  # noqa: S108 - the system's directory of named shared memory
PROCESSES = Path("/proc")
KILL_TIMEOUT_S = 60.0
POLL_S = 0.02
END = BoundedElsewhere("the end of the process that started the reaper, or its request")


class SessionReaper:
    """A process that kills the processes of a session when this process ends, however it ends.

    A parent-death signal alone covers the first process of a session: a process that this one has started, and that
    has not yet asked for such a signal itself, would remain.

    Raises OSError if no process can be started.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, RUN_MODULE, "flowrt.runtime.process_sessions"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def enter(self) -> None:
        """Name the calling process, the first of a new session, to the reaper; called between fork and exec."""
        os.write(self._pipe.fileno(), b"%d\n" % os.getpid())

    def close(self) -> None:
        """End the reaper, which kills what is left of the session. Raises TimeoutExpired if it does not end."""
        self._pipe.close()
        wait = partial(self._process.wait, KILL_TIMEOUT_S)
        blocking(wait, KILL_TIMEOUT_S, "the end of killed processes", "the system")


def kill_session(session: int) -> None:
    """Kill all processes of a session, wait until they have ended, and remove their shared memory.

    Waits at most KILL_TIMEOUT_S seconds.
    """
    names = mapped_names(session)
    for _ in range(round(KILL_TIMEOUT_S / POLL_S)):
        if not (running := _running(session)):
            break
        for process in running:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        sleep_blocking(POLL_S)
    remove_unused(names)


def mapped_names(session: int) -> frozenset[tuple[Path, int]]:
    """The named shared memory that processes of a session have mapped: paths and inodes.

    Found by inode, because a semaphore is mapped under a temporary name.
    """
    inodes: set[int] = set()
    for process in _running(session):
        with suppress(OSError):
            inodes |= _mapped_inodes(process)
    return frozenset((path, inode) for path, inode in _shared_names() if inode in inodes)


def remove_unused(names: frozenset[tuple[Path, int]]) -> None:
    """Remove the shared memory of these paths and inodes, unless a process of this user has it mapped."""
    left = names & frozenset(_shared_names())
    if not left:
        return
    used: set[int] = set()
    for process in _processes():
        with suppress(OSError):
            used |= _mapped_inodes(process)
    for path, inode in left:
        if inode not in used:
            with suppress(OSError):
                path.unlink()


def _running(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    return [process for process in _processes() if _session_of(process) == session]


def _session_of(process: int) -> int:
    """The session of a process; 0 if it has ended."""
    try:
        text = (PROCESSES / str(process) / "stat").read_text(errors="replace")
    except OSError:
        return 0
    # "id (name) state parent group session …"; the name may contain anything.
    state, _, _, session = text.rpartition(")")[2].split()[:4]
    return 0 if state in "ZX" else int(session)


def _shared_names() -> list[tuple[Path, int]]:
    try:
        with os.scandir(SHARED) as entries:
            return [(Path(entry.path), entry.inode()) for entry in entries]
    except OSError:
        return []  # a system without named shared memory


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROCESSES) if name.isdigit()]
    except OSError:
        return []


def _mapped_inodes(process: int) -> set[int]:
    """Inodes of shared memory. A line of the maps file is: addresses, rights, offset, device, inode, path."""
    lines = (PROCESSES / str(process) / "maps").read_text(errors="replace").splitlines()
    fields = (line.split(maxsplit=5) for line in lines if f"{SHARED}/" in line)
    return {int(field[4]) for field in fields}


def main() -> None:
    """Kill the sessions that standard input names, one a line, when it ends."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # what ends the other process, too
    named = blocking(sys.stdin.buffer.read, END, "the end of the process that started the reaper", "that process")
    for session in named.split():
        kill_session(int(session))


if __name__ == "__main__":
    main()
