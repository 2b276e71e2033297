"""Ranks that are forked from one process with all imports, which would take each of them seconds."""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
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
            _become(port, rank, work)
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


def _become(port: int, rank: int, work: Callable[[dist.Store, int], None]) -> NoReturn:
    code = 1
    try:
        work(dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=DEADLINE_S)), rank)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
