"""Workers that need no time to begin: forked from a process that has imported everything that they import.

``python -m flowrt.workers.nursery --orders FD ROOM`` (`flowrt.launch.nursery` starts it). Importing torch and
transformers costs seconds of a core for each worker of a run, a fork costs milliseconds. This process has one thread,
no accelerator, and no socket but the one to the launcher, so what it forks is as good as new.
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

from flowrt.lifeline import die_with_parent
from flowrt.waiting import Guard, blocking

LAUNCHER = Guard("the end of the launcher, which takes it along")
JOB_WIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What a whole job may be sent: workers know what to do then, and would die with this process."""
MOST_BYTES = 1 << 16
MOST_FDS = 16
SHARED = (
    "flowrt.engines.build",
    "flowrt.engines.fsdp",
    "flowrt.engines.torch_rollout",
    "flowrt.engines.torch_train",
    "flowrt.recipes.subjects",
    "flowrt.workers.engines",
    "flowrt.workers.entry",
    "flowrt.workers.saving",
)
"""What workers import, less their own modules: those are run as if python had been started with them."""


def unfit() -> str:
    """Why nothing may be forked from this process; empty when all is well."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"it has {threads} threads: a fork would take along what the others hold locked"
    from flowrt.transport.devices import cuda_is_here, npu_is_here

    if cuda_is_here() or npu_is_here():
        return "there are accelerators, whose libraries do not survive a fork"
    return ""


def nurse(orders: socket.socket) -> NoReturn:
    """Say whether anything can be forked; then fork what is ordered and tell what became of it.

    Until the launcher is gone.
    """
    why = unfit()
    orders.send(json.dumps({"unfit": why}).encode())
    if why:
        print(f"nothing is forked: {why}", flush=True)  # noqa: T201 (its output is its log)
        os._exit(0)
    # Whoever is forked shares these pages for as long as no collector writes to them.
    gc.collect()
    gc.freeze()
    for number in JOB_WIDE:
        signal.signal(number, signal.SIG_IGN)
    me = os.getpid()
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    while True:
        for key, _ in blocking(selector.select, LAUNCHER, "an order, or the end of a worker", "the launcher"):
            if key.fileobj is orders:
                data, fds, _, _ = socket.recv_fds(orders, MOST_BYTES, MOST_FDS)
                if not data:
                    os._exit(0)
                order = json.loads(data)
                came = len(fds) == 1 + len(order["fds"])
                signal.pthread_sigmask(signal.SIG_BLOCK, JOB_WIDE)  # until who is forked ignores them no more
                pid, end, failed = _fork() if came else (0, -1, "too many open files")
                if pid == 0 and not failed:
                    orders.close()
                    selector.close()
                    _become(order, fds, me)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_WIDE)
                for fd in fds:
                    os.close(fd)
                orders.send(json.dumps({"failed": failed} if failed else {"born": pid}).encode())
                if not failed:
                    selector.register(end, selectors.EVENT_READ, pid)
            else:
                _, status = os.waitpid(key.data, 0)
                selector.unregister(key.fileobj)
                os.close(key.fd)
                orders.send(json.dumps({"pid": key.data, "code": os.waitstatus_to_exitcode(status)}).encode())


def _fork() -> tuple[int, int, str]:
    """The child (in it: 0), what tells of its end, and why there is none: the others must not die of that."""
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


def _become(order: dict[str, Any], fds: list[int], nursery: int) -> NoReturn:
    """The process that was ordered: its output, its environment, its arguments, its name, chances of its own."""
    os.setsid()
    for number in JOB_WIDE:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    die_with_parent()
    if os.getppid() != nursery:
        os._exit(1)  # it died before we could ask to die with it
    os.environ.update(order["environment"])
    log, *passed = fds
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, wanted in zip([nothing, log, log, *passed], [0, 1, 2, *order["fds"]], strict=True):
        os.dup2(fd, wanted)
    for fd in {log, nothing, *passed} - {0, 1, 2, *order["fds"]}:
        os.close(fd)
    random.seed()
    np.random.seed()
    _name(" ".join(order["words"]))
    _, _, module, *arguments = order["words"]
    sys.argv = [module, *arguments]
    code: Any = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_WIDE)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code
    except (Exception, KeyboardInterrupt):  # noqa: BLE001 (whatever it is, this process ends with it)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _name(line: str) -> None:
    """What ps shows."""
    # The place of the environment would be taken, too, and what a process was started with could not be seen any more.
    os.environ["SPT_NOENV"] = "1"
    from setproctitle import setproctitle

    setproctitle(line)
    del os.environ["SPT_NOENV"]


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="a process that workers of this host are forked from")
    parser.add_argument("--orders", type=int, required=True, help="file descriptor of the launcher's socket")
    parser.add_argument("room", help="anything: as long as the longest command line of a worker may be")
    orders = socket.socket(fileno=parser.parse_args().orders)
    for module in SHARED:
        importlib.import_module(module)
    _name(f"{sys.executable} -m flowrt.workers.nursery")
    nurse(orders)


if __name__ == "__main__":
    main()
