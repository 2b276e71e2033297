"""A process that ends when its parent does, however the parent ends."""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

LAUNCHER = "FLOWRT_LAUNCHER"
"""Environment variable with the place (`where_ids_hold`) and process id of the launcher, if there is one."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies; elsewhere than on Linux nothing happens."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    place, _, pid = os.environ.get(LAUNCHER, "").rpartition(" ")
    # The environment may have come along to another host, where the number is somebody else's or nobody's.
    if place == where_ids_hold() and not _lives(int(pid)):
        os._exit(1)  # it was gone before we could ask


def this_launcher() -> str:
    """The value of `LAUNCHER` for what this process starts."""
    return f"{where_ids_hold()} {os.getpid()}"


def where_ids_hold() -> str:
    """Where a process id means the same process: one boot of one host, one namespace. A name alone, hosts may share."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
