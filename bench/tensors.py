"""The tensor plane: put rows, then get them in another process, through shared memory and through gloo.

    python bench/tensors.py [--quick] [--json PATH] [--baseline-python PYTHON]

``--baseline-python`` is a Python that has TransferQueue (``pip install TransferQueue torch``). A put writes rows into
the producer's tensor store and sends their ids and lengths to the controller; a get is the controller's answer to a
pull and the transfer of the rows that it announces, until they can be read. Messages and links are those of flowrt,
but the controller is a stub without tables: `bench/metadata.py` measures the cost of the tables. GB/s (10^9 bytes) are
the bytes over the seconds of put and get together, the median of the repeats after a warm-up; the sides that are
compared take turns. The id at the start of every row is checked.

``peak_memory_x`` is the peak memory of all processes, minus what the same processes held after as many rows of 1 KB,
over the bytes of the payload. 2.0 is one copy at the producer and one at the consumer. The rest is ids, lengths and
messages (about 160 bytes a row at both ends together: 0.02 % of rows of 1 MB), and pages of libraries, whose shares
change when other processes of the machine map or unmap them during the measurement.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from common.children import Child, ask_all, start_all
from common.harness import Bench, Figures, Options
from common.peer_queue import start_queue
from data_plane.raw import WarmMemory, run_gloo, run_tcp
from data_plane.stub_controller import CONSUMER, PRODUCER, TRANSPORTS, StubController

from flowrt.runtime.event_loop import serve_loop

KB, MB, GB = 10**3, 10**6, 10**9
SIZES = {"1kb": (KB, 4096), "100kb": (100 * KB, 512), "1mb": (MB, 128), "16mb": (16 * MB, 16), "64mb": (64 * MB, 4)}
BASELINE_SIZES = ("1kb", "100kb", "1mb", "16mb")
RAGGED = BASELINE_SIZES
BASELINE = "baseline"
MEMORY_ROWS = 512
SAMPLE_S = 0.005


def sizes_of(case: str) -> list[int]:
    """Bytes of each row of a case: of ``1mb`` all equal, of ``1mb_ragged`` random, 0.5 to 1.5 times as large."""
    size, count = SIZES[case.removesuffix("_ragged")]
    if not case.endswith("_ragged"):
        return [size] * count
    rng = random.Random(7)
    return [rng.randrange(size // 2, size * 3 // 2) for _ in range(count)]


class FlowrtPlane:
    """A producer and a consumer process, and the stub controller between them."""

    def __init__(self, controller: StubController, producer: Child, consumer: Child) -> None:
        self._controller, self._producer, self._consumer = controller, producer, consumer
        self._first = self._next = self.held = 0

    async def make(self, sizes: list[int]) -> None:
        self._first += 1
        await asyncio.to_thread(partial(self._producer.ask, "make", sizes=sizes, first=self._first))

    async def once(self, transport: str, count: int, verify: bool = True) -> tuple[float, float]:
        """Seconds of a put and of a get of ``count`` rows; ``verify`` checks the id of every row."""
        # New ids each time: the release of the previous ids and the next put arrive in any order.
        ids = tuple(range(self._next, self._next + count))
        self._next += count
        put_s = await asyncio.to_thread(partial(self._producer.ask, "put", first=ids[0]))
        get = partial(self._consumer.ask, "get", transport=transport, first=self._first, verify=verify)
        get_s = await asyncio.to_thread(get)
        self.held = held_bytes((self._producer.pid, self._consumer.pid))
        self._controller.free(ids)
        return put_s, get_s

    async def peak_memory_ratio(self, transport: str) -> float:
        """Growth of both processes to their peak while rows of 1 MB are put and got, over the bytes of these rows."""
        ends = (self._producer.pid, self._consumer.pid)
        for sizes in ([MB] * 4, [KB] * MEMORY_ROWS):
            await self.make(sizes)
            await self.once(transport, len(sizes))
        await asyncio.to_thread(self._producer.ask, "drop")
        before, peak, done = held_bytes(ends), [0], threading.Event()

        def watch() -> None:
            while not done.wait(SAMPLE_S):
                peak[0] = max(peak[0], held_bytes(ends))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            await self.make([MB] * MEMORY_ROWS)
            await self.once(transport, MEMORY_ROWS, verify=False)
            peak[0] = max(peak[0], self.held)
        finally:
            done.set()
            watcher.join()
        await asyncio.to_thread(self._producer.ask, "drop")
        return (peak[0] - before) / (MEMORY_ROWS * MB)


def held_bytes(pids: tuple[int, ...]) -> int:
    """Memory of these processes in bytes (proportional set size: a page that n processes map counts 1/n in each)."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


class Baseline:
    """TransferQueue with a producer and a consumer process."""

    def __init__(self, python: str) -> None:
        self._queue = start_queue(python)
        address = self._queue.wait_ready()["address"]
        self._producer, self._consumer = start_all([Child("data_plane/baseline.py", python=python) for _ in range(2)])
        ask_all([self._producer, self._consumer], "join", address=address)
        self._part = 0

    def make(self, sizes: list[int]) -> None:
        self._producer.ask("make", sizes=sizes, first=1000)

    def once(self, count: int) -> tuple[float, float]:
        self._part += 1
        part = f"part{self._part}"
        seconds = self._producer.ask("put", part=part), self._consumer.ask("get", part=part, count=count, first=1000)
        self._producer.ask("clear", part=part)
        return seconds

    def close(self) -> None:
        for child in (self._producer, self._consumer, self._queue):
            child.leave()


def rate(metrics: dict[str, float], name: str, case: str, size: int, seconds: list[tuple[float, float]]) -> None:
    metrics[f"{name}_gbps_{case}"] = size / GB / statistics.median(map(sum, seconds))
    metrics[f"{name}_get_gbps_{case}"] = size / GB / statistics.median(get_s for _, get_s in seconds)


async def measure(plane: FlowrtPlane, baseline: Baseline | None, repeats: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for case in [*SIZES, *(f"{case}_ragged" for case in RAGGED)]:
        sizes = sizes_of(case)
        await plane.make(sizes)
        also_baseline = baseline is not None and case.removesuffix("_ragged") in BASELINE_SIZES
        if baseline is not None and also_baseline:
            await asyncio.to_thread(baseline.make, sizes)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in (*TRANSPORTS, BASELINE)}
        warm, copies_s = WarmMemory(sum(sizes) // len(sizes), len(sizes)), []
        for _ in range(repeats + 1):
            copies_s.append(await asyncio.to_thread(warm.once))
            for transport in TRANSPORTS:
                seconds[transport].append(await plane.once(transport, len(sizes)))
            if baseline is not None and also_baseline:
                seconds[BASELINE].append(await asyncio.to_thread(baseline.once, len(sizes)))
        for name, timings in seconds.items():
            if timings:
                rate(metrics, name, case, sum(sizes), timings[1:])
        if not case.endswith("_ragged"):
            size, count = SIZES[case]
            metrics[f"raw_gloo_gbps_{case}"] = await asyncio.to_thread(run_gloo, size, count)
            metrics[f"raw_tcp_gbps_{case}"] = await asyncio.to_thread(run_tcp, size, count)
            metrics[f"raw_shm_gbps_{case}"] = size * count / GB / statistics.median(copies_s[1:])
    return metrics


async def measure_memory() -> dict[str, float]:
    """Measure each transport in new processes: memory kept from another transport would lower its figure."""
    metrics = {}
    for transport in TRANSPORTS:
        async with producer_and_consumer() as plane:
            metrics[f"peak_memory_x_{transport}"] = await plane.peak_memory_ratio(transport)
    return {**metrics, "peak_memory_x": max(metrics.values())}


@asynccontextmanager
async def producer_and_consumer() -> AsyncIterator[FlowrtPlane]:
    controller = StubController()
    with contextlib.ExitStack() as stack:
        ends = [Child("data_plane/ends.py", controller.address, name) for name in (PRODUCER, CONSUMER)]
        for end in ends:
            stack.callback(end.leave)
            await asyncio.to_thread(end.wait_ready)
        await asyncio.wait_for(controller.all_joined.wait(), 30)
        yield FlowrtPlane(controller, *ends)
    controller.close()


def ratios(metrics: dict[str, float]) -> dict[str, float]:
    """The ratios that have targets; those whose denominator was not measured are left out."""
    both = (*BASELINE_SIZES, *(f"{case}_ragged" for case in RAGGED))
    pairs = {f"shm_times_baseline_{case}": (f"shm_gbps_{case}", f"baseline_gbps_{case}") for case in both}
    pairs |= {f"gloo_times_baseline_{case}": (f"gloo_gbps_{case}", f"baseline_gbps_{case}") for case in BASELINE_SIZES}
    pairs |= {f"gloo_over_raw_{case}": (f"gloo_get_gbps_{case}", f"raw_gloo_gbps_{case}") for case in ("1mb", "64mb")}
    pairs["shm_over_raw_16mb"] = ("shm_gbps_16mb", "raw_shm_gbps_16mb")
    return {name: metrics[own] / metrics[other] for name, (own, other) in pairs.items() if other in metrics}


async def measure_rates(options: Options) -> Figures:
    with contextlib.ExitStack() as stack:
        baseline = None
        if options.baseline_python:
            baseline = await asyncio.to_thread(Baseline, options.baseline_python)
            stack.callback(baseline.close)
        async with producer_and_consumer() as plane:
            metrics = await measure(plane, baseline, 3 if options.quick else 9)
    return metrics | ratios(metrics)


def rates(options: Options) -> Figures:
    """GB/s of each transport by the size of rows, with the speed of the machine and that of TransferQueue."""
    return serve_loop(measure_rates(options))


def memory(_: Options) -> Figures:
    """Peak memory over the bytes of the payload."""
    return serve_loop(measure_memory())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--baseline-python", default="", help="a Python that has TransferQueue")


BENCH = Bench(about=__doc__, parts={"memory": memory, "rates": rates}, add_options=add_options)

if __name__ == "__main__":
    sys.exit(BENCH.main())
