"""The speed of the machine, for `bench/tensors.py`: gloo, loopback TCP and warm shared memory without flowrt.

python bench/data_plane/raw.py gloo RANK FILE SIZE COUNT     one end of a bare two-rank group
python bench/data_plane/raw.py tcp RANK PORT SIZE COUNT      one end of a bare connection
"""

import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from datetime import timedelta
from typing import cast

import numpy as np
import torch

GB = 1e9
REPEATS = 9
TIMEOUT_S = 60


def gloo(rank: int, file: str, size: int, count: int) -> None:
    """Send ``count`` buffers of ``size`` bytes from rank 0 to rank 1, several in flight; rank 1 prints GB/s."""
    from torch.distributed import FileStore, ProcessGroup, ProcessGroupGloo, Work

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    group = cast(ProcessGroup, ProcessGroupGloo(FileStore(file, 2), rank, 2, options))
    in_flight = 8 if size <= 1 << 20 else 2
    buffers = torch.ones(count, size, dtype=torch.uint8)
    ready = torch.zeros(1, dtype=torch.uint8)
    seconds = []
    for _ in range(REPEATS + 1):
        (group.send if rank else group.recv)([ready], 1 - rank, 0).wait()
        begin_s = time.perf_counter()
        flying: deque[Work] = deque()
        for number in range(count):
            if len(flying) == in_flight:
                flying.popleft().wait()
            move = group.recv if rank else group.send
            flying.append(move([buffers[number]], 1 - rank, number + 1))
        for work in flying:
            work.wait()
        seconds.append(time.perf_counter() - begin_s)
    if rank:
        print(size * count / GB / statistics.median(seconds[1:]))


def tcp(rank: int, port: int, size: int, count: int) -> None:
    """The same over a socket from rank 1 to rank 0, into one buffer; rank 0 prints its port, then GB/s."""
    buffer = memoryview(bytearray(size))
    if rank:
        link = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        for _ in range((REPEATS + 1) * count):
            link.sendall(buffer)
        return
    with socket.create_server(("127.0.0.1", port)) as server:
        print(server.getsockname()[1], flush=True)
        link, _ = server.accept()
    seconds = []
    for _ in range(REPEATS + 1):
        begin_s = time.perf_counter()
        for _ in range(count):
            got = 0
            while got < size:
                got += link.recv_into(buffer[got:])
        seconds.append(time.perf_counter() - begin_s)
    print(size * count / GB / statistics.median(seconds[1:]))


def run_gloo(size: int, count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "gloo"]
        rest = [f"{folder}/store", str(size), str(count)]
        first = subprocess.Popen([*command, "0", *rest])
        try:
            output = subprocess.run([*command, "1", *rest], check=True, capture_output=True, timeout=TIMEOUT_S).stdout
        finally:
            first.kill()
            first.wait()
        return float(output)


def run_tcp(size: int, count: int) -> float:
    command = [sys.executable, __file__, "tcp"]
    with subprocess.Popen([*command, "0", "0", str(size), str(count)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        port = first.stdout.readline().strip()
        subprocess.run([*command, "1", port, str(size), str(count)], check=True, timeout=TIMEOUT_S)
        return float(first.stdout.readline())


class WarmMemory:
    """Shared memory whose pages have been written, and ``count`` rows of ``size`` bytes to copy into it."""

    def __init__(self, size: int, count: int) -> None:
        self._size, total = size, size * count
        fd = os.memfd_create("bench")
        os.ftruncate(fd, total)
        self._memory = mmap.mmap(fd, total)
        os.close(fd)
        self._source = np.ones(total, dtype=np.uint8)
        self.once()

    def once(self) -> float:
        """Seconds of one copy of every row."""
        target, total = np.frombuffer(self._memory, dtype=np.uint8), self._source.size
        begin_s = time.perf_counter()
        for start in range(0, total, self._size):
            np.copyto(target[start : start + self._size], self._source[start : start + self._size])
        return time.perf_counter() - begin_s


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, rank, where, size, count = sys.argv[1:]
    if kind == "gloo":
        gloo(int(rank), where, int(size), int(count))
    else:
        tcp(int(rank), int(where), int(size), int(count))
