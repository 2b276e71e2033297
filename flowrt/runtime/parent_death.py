"""Death of the parent: a process that is killed when its parent dies, however the parent dies.

``python -m flowrt.runtime.parent_death MODULE ARGUMENTS`` runs a module in such a process, from its first import on.
"""

import ctypes
import os
import runpy
import signal
import sys

from flowrt.runtime.host import pid_namespace

LAUNCHER = "FLOWRT_LAUNCHER"
"""Environment variable: `pid_namespace` and process id of the launcher, if there is one."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies (Linux only).

    Ends this process at once, with exit code 1, if the launcher that `LAUNCHER` names has died already.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    namespace, _, pid = os.environ.get(LAUNCHER, "").rpartition(" ")
    # The environment may have been passed on to another host, where another process, or none, has this id.
    if namespace == pid_namespace() and not is_alive(int(pid)):
        os._exit(1)  # the launcher died before the call of prctl


def adopt_orphans(adopts: bool = True) -> None:
    """Become the parent of each descendant whose parent dies, or stop that. No effect on systems other than Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts))


def this_launcher() -> str:
    """The value of `LAUNCHER` for processes that this process starts."""
    return f"{pid_namespace()} {os.getpid()}"


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists on this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
