"""Names in shared memory of another program: gone with it, even where it was killed and could not remove them."""

import os
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")  # noqa: S108 - where the system names shared memory, no place of ours
PROCESSES = Path("/proc")


def named_by(session: int) -> frozenset[tuple[Path, int]]:
    """What the processes of a session have mapped of shared memory that has a name: its path and inode.

    Told by inode: a semaphore is mapped under another name than it has in the end.
    """
    found: set[int] = set()
    for process in _processes():
        with suppress(OSError):
            if os.getsid(process) == session:
                found |= _mapped_by(process)
    return frozenset((path, inode) for path, inode in _names() if inode in found)


def remove(names: frozenset[tuple[Path, int]]) -> None:
    """Remove those that are still there and that no process of this user has mapped."""
    left = names & frozenset(_names())
    if not left:
        return
    used: set[int] = set()
    for process in _processes():
        with suppress(OSError):
            used |= _mapped_by(process)
    for path, inode in left:
        if inode not in used:
            with suppress(OSError):
                path.unlink()


def _names() -> list[tuple[Path, int]]:
    try:
        with os.scandir(SHARED) as entries:
            return [(Path(entry.path), entry.inode()) for entry in entries]
    except OSError:
        return []  # a system without it


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROCESSES) if name.isdigit()]
    except OSError:
        return []


def _mapped_by(process: int) -> set[int]:
    """Inodes; a line of maps is: addresses, rights, offset, device, inode, path."""
    lines = (PROCESSES / str(process) / "maps").read_text(errors="replace").splitlines()
    fields = (line.split(maxsplit=5) for line in lines if f"{SHARED}/" in line)
    return {int(field[4]) for field in fields}
