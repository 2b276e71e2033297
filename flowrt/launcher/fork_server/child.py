"""The fork server process: imports what workers import, then forks one for each order of the launcher.

``python -m flowrt.launcher.fork_server.child FD PADDING``, started by `fork_server.parent`. Importing torch and
transformers takes seconds of a core for each worker, a fork takes milliseconds.
"""

import argparse
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

import numpy as np

from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.parent_death import die_with_parent
from flowrt.runtime.waits import BoundedElsewhere, blocking

LAUNCHER = BoundedElsewhere("the end of the launcher, which ends this process")
JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler sends to all processes of a job. Workers handle them; the fork server ignores them."""
MAX_MESSAGE_BYTES = 1 << 16
MAX_FDS = 16
SHARED = (
    "flowrt.engines.tiny_model",
    "flowrt.engines.fsdp.trainer",
    "flowrt.engines.torch.rollout",
    "flowrt.engines.torch.trainer",
    "flowrt.recipes.tasks.registry",
    "flowrt.roles.engine_setup",
    "flowrt.roles.main",
    "flowrt.roles.checkpoints",
)
"""Modules imported before the first fork; not a worker's own module, which is run as ``__main__``."""


def unsafe_reason() -> str:
    """Why this process must not fork; empty if it may fork."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"it has {threads} threads: a fork would copy the locks that the others hold"
    from flowrt.transport.devices import cuda_is_here, npu_is_here

    if cuda_is_here() or npu_is_here():
        return "there are accelerators, whose libraries do not survive a fork"
    return ""


def serve(orders: socket.socket) -> NoReturn:
    """Report whether forking is safe; then fork for each order and report exit codes, until ``orders`` is closed."""
    reason = unsafe_reason()
    orders.send(json.dumps({"unsafe": reason}).encode())
    if reason:
        print(f"nothing is forked: {reason}", flush=True)  # noqa: T201 (its output is its log)
        os._exit(0)
    # Forked processes share these pages as long as no garbage collection writes to them.
    gc.collect()
    gc.freeze()
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    own_pid = os.getpid()
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    while True:
        for key, _ in blocking(selector.select, LAUNCHER, "an order, or the end of a worker", "the launcher"):
            if key.fileobj is orders:
                data, fds, _, _ = socket.recv_fds(orders, MAX_MESSAGE_BYTES, MAX_FDS)
                if not data:
                    os._exit(0)
                order = json.loads(data)
                complete = len(fds) == 1 + len(order["fds"])
                signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)  # until the child has its own handlers
                pid, pid_fd, failed = _fork() if complete else (0, -1, "too many open files")
                if pid == 0 and not failed:
                    orders.close()
                    selector.close()
                    _run(order, fds, own_pid)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
                for fd in fds:
                    os.close(fd)
                orders.send(json.dumps({"failed": failed} if failed else {"forked": pid}).encode())
                if not failed:
                    selector.register(pid_fd, selectors.EVENT_READ, pid)
            else:
                _, status = os.waitpid(key.data, 0)
                selector.unregister(key.fileobj)
                os.close(key.fd)
                orders.send(json.dumps({"pid": key.data, "code": os.waitstatus_to_exitcode(status)}).encode())


def _fork() -> tuple[int, int, str]:
    """Fork; returns the process id (0 in the child), a pidfd, and the error, which must not end forked processes."""
    try:
        pid = os.fork()
    except OSError as error:
        return 0, -1, str(error.strerror)
    if pid == 0:
        return 0, -1, ""
    try:
        return pid, os.pidfd_open(pid), ""
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 0, -1, str(error.strerror)


def _run(order: dict[str, Any], fds: list[int], parent: int) -> NoReturn:
    """Become the ordered process: session, signals, descriptors, environment, random state, title, arguments."""
    os.setsid()
    for number in JOB_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)  # the fork server died before the call above
    os.environ.update(order["environment"])
    log, *passed = fds
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, number in zip([null, log, log, *passed], [0, 1, 2, *order["fds"]], strict=True):
        os.dup2(fd, number)
    for fd in {log, null, *passed} - {0, 1, 2, *order["fds"]}:
        os.close(fd)
    random.seed()
    np.random.seed()
    _set_title(" ".join(order["words"]))
    _, _, module, *arguments = order["words"]
    sys.argv = [module, *arguments]
    code: Any = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code
    except KeyboardInterrupt:  # ends by the signal, as under python, and so is told from a failure
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:  # noqa: BLE001 (the process ends with it, as under python)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _set_title(line: str) -> None:
    """Set the command line that ps shows."""
    # Without this setproctitle also overwrites the initial environment, which identifies processes of a run.
    os.environ["SPT_NOENV"] = "1"
    from setproctitle import setproctitle

    setproctitle(line)
    del os.environ["SPT_NOENV"]


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="fork server of a launcher")
    parser.add_argument("orders", type=int, help="file descriptor of the launcher's socket")
    parser.add_argument("padding", help="any text as long as the longest command line of a worker")
    orders = socket.socket(fileno=parser.parse_args().orders)
    for module in SHARED:
        importlib.import_module(module)
    _set_title(f"{sys.executable} {RUN_MODULE} flowrt.launcher.fork_server.child")
    serve(orders)


if __name__ == "__main__":
    main()
