"""Round trips: pulls of one slot that a controller answers in a second, compared with an echo of the same size.

The clients are real sockets, one a worker, in a few processes; every worker has one request outstanding. In a closed
loop every worker pulls again at once: its rate is the largest that can be served (``rtt_per_s_*``), and the time of a
trip is then, by Little's law, the number of workers divided by the rate. At 4,096 workers ``rtt_p50_ms`` and
``rtt_p99_ms`` are of a paced load instead, in which each worker pulls again a second after its last answer; the times
of the closed loop are ``rtt_closed_*``.
"""

import time
from pathlib import Path

from common.children import Child, ask_all, cpu_s, start_all
from common.harness import Samples, percentile

SIZES = (1, 64, 4096)
PACED = 4096
PAUSE_S = 1.0
PROCESSES = 2
FILES_A_WORKER = 2  # a mailbox and a connection
WARM_S = 0.2
START_S = 0.1
HIGHEST_RATE = 60_000  # rows that are ready for each second of a measurement


class WorkerPool:
    """All workers, in client processes that are kept; the workers join one server after another."""

    def __init__(self, open_files: int, largest: int) -> None:
        needed = -(-largest * FILES_A_WORKER // max(open_files - 100, 1))
        if open_files < largest + 100:
            raise SystemExit(f"{largest} workers need a server with {largest + 100} open files; raise ulimit -Hn")
        count = max(PROCESSES, needed)
        self.processes = start_all([Child("control_plane/raw_workers.py") for _ in range(count)])
        self.joined = 0

    def grow(self, address: str, size: int) -> list[Child]:
        """Let workers join until there are ``size``; returns the processes that have workers."""
        share, rest = divmod(size - self.joined, len(self.processes))
        shares = [share + (place < rest) for place in range(len(self.processes))]
        first = self.joined
        for process, count in zip(self.processes, shares, strict=True):
            process.tell("join", address=address, first=first, count=count)
            first += count
        present = [process.answer() for process in self.processes]
        self.joined = size
        return [process for process, count in zip(self.processes, present, strict=True) if count]

    def part(self) -> None:
        ask_all(self.processes, "part")
        self.joined = 0

    def leave(self) -> None:
        for process in self.processes:
            process.leave()


class Queue:
    """The controller under test, and a source that keeps its queue filled."""

    def __init__(self, feeder: Child, run_dir: Path) -> None:
        run_dir.mkdir()
        self.server = Child("control_plane/servers.py", "stream", "--run-dir", str(run_dir))
        self.address = self.server.wait_ready()
        self._feeder = feeder
        self._ready = 0
        feeder.ask("join", address=self.address)

    def fill(self, rows: int) -> None:
        if rows > self._ready:
            self._feeder.ask("fill", part="rows", rows=rows - self._ready)
            self._ready = rows

    def count_served(self, rows: int) -> None:
        self._ready -= rows

    def close(self) -> None:
        self._feeder.ask("leave")
        self.server.kill()


def one_repeat(
    workers: WorkerPool, feeder: Child, folder: Path, sizes: tuple[int, ...], window_s: float, samples: Samples
) -> None:
    """Measure the controller and then the echo, each in a new process, at each number of workers."""
    folder.mkdir()
    for size in sizes:
        queue = Queue(feeder, folder / str(size))
        queue.fill(1)
        grant = workers.grow(queue.address, 1)[0].ask("sample")
        queue.count_served(1)
        _measure_size(workers.grow(queue.address, size), queue.server, queue, f"rtt {size}", window_s, samples)
        queue.close()
        workers.part()
        echo = Child("control_plane/servers.py", "echo", "--reply", grant)
        processes = workers.grow(echo.wait_ready(), size)
        _measure_size(processes, echo, None, f"echo {size}", window_s, samples)
        echo.kill()
        workers.part()
        samples.add(f"rtt_over_echo_{size}", samples.last(f"rtt_per_s_{size}") / samples.last(f"echo_per_s_{size}"))


def _measure_size(
    processes: list[Child], server: Child, queue: Queue | None, what: str, window_s: float, samples: Samples
) -> None:
    name, size = what.split()
    per_s, closed_s, server_us = _measure(processes, server, queue, window_s, 0.0, HIGHEST_RATE)
    samples.add(f"{name}_per_s_{size}", per_s)
    samples.add(f"{name}_server_us_{size}", server_us)
    trips = {"": closed_s}
    if size == str(PACED):
        _, paced_s, _ = _measure(processes, server, queue, 2 * window_s, PAUSE_S, int(1.5 * PACED / PAUSE_S))
        trips = {"": paced_s, "closed_": closed_s}
    for loop, seconds in trips.items():
        samples.add(f"{name}_{loop}p50_ms_{size}", 1e3 * percentile(seconds, 0.5))
        samples.add(f"{name}_{loop}p99_ms_{size}", 1e3 * percentile(seconds, 0.99))


def _measure(
    processes: list[Child], server: Child, queue: Queue | None, window_s: float, pause_s: float, highest: int
) -> tuple[float, list[float], float]:
    """Round trips a second, seconds of each, and microseconds of the server's processor time for each.

    Of a window twice as long, if no round trip ends in this one, as on a machine with much other load.
    """
    # A paced load is steady after one whole pause.
    warm_s = WARM_S + pause_s
    if queue is not None:
        queue.fill(int(highest * (warm_s + window_s)) + PACED)
    before_s = cpu_s(server.pid)
    at_s = time.monotonic() + START_S
    results = ask_all(processes, "pull", at_s=at_s, warm_s=warm_s, window_s=window_s, pause_s=pause_s)
    spent_s = cpu_s(server.pid) - before_s
    served = sum(result["served"] for result in results)
    if queue is not None:
        queue.count_served(served)
    trips = [trip for result in results for trip in result["trips"]]
    if not trips:
        return _measure(processes, server, queue, 2 * window_s, pause_s, highest)
    return len(trips) / window_s, trips, 1e6 * spent_s / served
