"""Rows through a queue: put and get at several sizes of a request, with many rows outstanding, with several clients.

flowrt's streamers and the baseline's clients get the same commands.
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.children import Child, ask_all, start_all
from common.harness import Samples
from common.peer_queue import start_queue

REQUESTS = {1: 1000, 64: 300, 512: 60}
"""Number of requests of a measurement, by rows a request."""
DEPTH = 8
OUTSTANDING = (1_000, 100_000)
WARM_PULLS, PULLS, PULLED_ROWS = 50, 25, 32
STREAM_ROWS = 64
CLIENTS = (1, 4)


@dataclass
class System:
    """A queue to be measured: how its processes are started, how its metrics are named."""

    prefix: str
    folder: Path
    baseline_python: str = ""  # empty: flowrt
    stream_requests: int = 1600  # of all producers together
    clients: list[Child] = field(default_factory=list)
    _queues: list[Child] = field(default_factory=list)
    _parts: int = 0

    def start_clients(self, count: int) -> None:
        def start() -> Child:
            if self.baseline_python:
                return Child("control_plane/baseline.py", python=self.baseline_python)
            return Child("control_plane/streamers.py")

        self.clients += start_all([start() for _ in range(count - len(self.clients))])

    def start_queue(self, sources: int = 1) -> None:
        """Start a queue and let all clients join it. The baseline keeps one queue, which takes seconds to start."""
        if self.baseline_python:
            if not self._queues:
                self._queues.append(start_queue(self.baseline_python))
                ask_all(self.clients, "join", address=self._queues[0].wait_ready()["address"])
            return
        self._parts += 1
        run_dir = self.folder / f"queue{self._parts}"
        run_dir.mkdir()
        self._queues.append(
            Child("control_plane/servers.py", "stream", "--run-dir", str(run_dir), "--sources", str(sources))
        )
        ask_all(self.clients, "join", address=self._queues[-1].wait_ready())

    def stop_queue(self, for_good: bool = False) -> None:
        """Stop the queue that was started last; that of the baseline only ``for_good``."""
        if not self._queues or (self.baseline_python and not for_good):
            return
        if not self.baseline_python:
            ask_all(self.clients, "leave")
        self._queues.pop().leave()

    def part(self) -> str:
        """An unused name for a set of rows."""
        self._parts += 1
        return f"rows{self._parts}"

    def leave(self) -> None:
        self.stop_queue(for_good=True)
        for client in self.clients:
            client.leave()


def put_and_get(system: System, rows: int, shrink: int, samples: Samples) -> None:
    """Rows/s of a put and then a get of ``rows`` rows a request, with one request and with DEPTH in flight."""
    producer, consumer = system.clients[:2]
    for depth in (1, DEPTH):
        part = system.part()
        requests = max(REQUESTS[rows] // shrink, DEPTH)
        load: dict[str, Any] = {"part": part, "rows": rows, "requests": requests}
        if depth > 1:
            load["depth"] = depth
        seconds = producer.ask("put", **load) + consumer.ask("get", **load)
        producer.ask("clear", part=part, rows=0)
        name = f"{system.prefix}rows_per_s_{rows}" + ("_pipelined" if depth > 1 else "")
        samples.add(name, rows * requests / seconds)


def warm(system: System) -> None:
    """Warm up every client and the queue with a tenth of the requests of a measurement."""
    for producer, consumer in zip(system.clients[::2], system.clients[1::2], strict=True):
        for rows, requests in REQUESTS.items():
            load = {"part": system.part(), "rows": rows, "requests": requests // 10}
            producer.ask("put", **load)
            consumer.ask("get", **load)
            producer.ask("clear", part=load["part"], rows=0)


def pull_ratio(system: System, samples: Samples) -> None:
    """Median time of a pull with 100,000 rows outstanding over that with 1,000: two queues, pulled from by turns."""
    producer, consumer = system.clients[:2]
    system.start_queue()
    parts = [system.part() for _ in OUTSTANDING]
    queues = range(-len(parts), 0)
    for part, queue, outstanding in zip(parts, queues, OUTSTANDING, strict=True):
        producer.ask("fill", part=part, rows=outstanding, queue=queue)
    times = consumer.ask("pull_times", parts=parts, rows=PULLED_ROWS, count=PULLS, warm=WARM_PULLS)
    p50_s = [statistics.median(seconds) for seconds in times]
    for part, queue, outstanding in zip(parts, queues, OUTSTANDING, strict=True):
        consumer.ask("clear", part=part, rows=outstanding - WARM_PULLS - PULLS * PULLED_ROWS, queue=queue)
    system.stop_queue()
    for outstanding, seconds in zip(OUTSTANDING, p50_s, strict=True):
        samples.add(f"{system.prefix}pull_p50_ms_{outstanding}", 1e3 * seconds)
    samples.add(f"{system.prefix}pull_ratio_100k", p50_s[1] / p50_s[0])


def scaling(system: System, shrink: int, samples: Samples) -> None:
    """Producers and consumers at the same time: rows a second from the first put to the last get."""
    rates = {}
    for count in CLIENTS:
        system.start_queue(sources=count)
        part, requests = system.part(), system.stream_requests // shrink // count
        total = requests * count * STREAM_ROWS
        producers, consumers = system.clients[0 : 2 * count : 2], system.clients[1 : 2 * count : 2]
        at_s = time.monotonic() + 0.3
        for client in consumers:
            client.tell("drain", part=part, rows=STREAM_ROWS, total=total)
        for client in producers:
            client.tell("put", part=part, rows=STREAM_ROWS, requests=requests, at_s=at_s, last=True)
        for client in producers:
            client.answer()
        drained = [client.answer() for client in consumers]
        if sum(result["rows"] for result in drained) != total:
            raise ValueError(f"{total} rows were put and {drained} came out")
        rates[count] = total / (max(result["last_s"] for result in drained) - at_s)
        samples.add(f"{system.prefix}stream_rows_per_s_{count}x{count}", rates[count])
        producers[0].ask("clear", part=part, rows=0)
        system.stop_queue()
    samples.add(f"{system.prefix}scaling_4x4", rates[CLIENTS[1]] / rates[CLIENTS[0]])
