"""A process that ends when its parent does, however the parent ends."""

import ctypes
import os
import signal
import sys

LAUNCHER = "FLOWRT_LAUNCHER"
"""Environment variable with the process id of the local launcher, if there is one."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies; elsewhere than on Linux nothing happens."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and not _lives(int(launcher)):
        os._exit(1)  # it was gone before we could ask


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
