"""Processes that descend from this one, and their end (Linux; elsewhere none are found)."""

import contextlib
import os
import signal
from collections.abc import Collection


def children(pid: int) -> list[int]:
    """Ids of the child processes of a process, from /proc; empty if it has ended."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                pids += map(int, file.read().split())
        return pids
    if os.path.exists(f"/proc/{pid}/task/{pid}/stat") and not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return _by_parent(pid)  # a kernel without this file
    return pids


def _by_parent(pid: int) -> list[int]:
    pids = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == pid:
                pids.append(int(name))
    return pids


def descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Ids of the processes that descend from a process, without those of its children in ``spared``, and theirs."""
    pids: list[int] = []
    level = [child for child in children(pid) if child not in spared]
    while level:
        pids += level
        level = [child for parent in level for child in children(parent)]
    return pids


def end_descendants(spared: Collection[int] = ()) -> None:
    """Kill the descendants of this process, which adopts orphans, and wait for their end.

    They are stopped first, so that none starts another one while they are killed.

    Args:
        spared: children of this process that stay, with their descendants.
    """
    pid = os.getpid()
    while pids := descendants(pid, spared):
        stopped: set[int] = set()
        while new := [descendant for descendant in pids if descendant not in stopped]:
            for descendant in new:
                _send(descendant, signal.SIGSTOP)
            stopped.update(new)
            pids = descendants(pid, spared)
        for descendant in stopped:
            _send(descendant, signal.SIGKILL)
        for child in [child for child in children(pid) if child not in spared]:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
