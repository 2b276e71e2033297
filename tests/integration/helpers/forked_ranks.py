"""Ranks that are forked from one process with all imports, which would take each of them seconds."""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch.distributed as dist

DEADLINE_S = 240.0


def run_ranks(ranks: int, work: Callable[[dist.Store, int], None]) -> NoReturn:
    """Call ``work(store, rank)`` in a forked process for each rank, then exit. If one fails the others are killed."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    left: set[int] = set()
    for rank in range(ranks):  # before the store, which starts a thread
        pid = os.fork()
        if pid == 0:
            listener.close()
            exit_after(partial(_run_rank, port, rank, work))
        left.add(pid)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    failed = False
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status and not failed:
            failed = True
            for other in left:
                os.kill(other, signal.SIGKILL)
    del store
    sys.stdout.flush()
    os._exit(int(failed))


def _run_rank(port: int, rank: int, work: Callable[[dist.Store, int], None]) -> None:
    work(dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=DEADLINE_S)), rank)


def exit_after(work: Callable[[], object]) -> NoReturn:
    """Exit a forked process after this call: with code 1 and its traceback if it raises an error, else with 0."""
    code = 1
    try:
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
