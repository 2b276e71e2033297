"""The metadata plane: rows/s, round trips, memory and start, compared with a bare echo and with TransferQueue.

    python bench/metadata.py [--quick] [--json PATH] [--baseline-python PYTHON] [--sections rows trips …]

``--baseline-python`` is a Python that has TransferQueue (``pip install TransferQueue torch``); without it only flowrt
is measured. Every figure is the median of the repeats; the sides that are compared take turns within each repeat, on
the same machine and with the same commands, and every row that comes out is checked. Client processes are started and
warmed up before anything is timed; seconds are those of the monotonic clock, which all processes share.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from common.children import Child, raise_open_files, start_all
from common.report import Samples, write
from control_plane import controllers, rows
from control_plane import round_trips as trips
from rich.console import Console
from rich.table import Table

SECTIONS = ("start", "rows", "trips", "core", "ledger")
REPEATS = 5
BASELINE = "baseline_"
AT_LEAST, AT_MOST = "at least", "at most"
TARGETS: dict[str, tuple[str, float]] = {
    "times_baseline_1": (AT_LEAST, 20.0),
    "times_baseline_64": (AT_LEAST, 15.0),
    "times_baseline_512": (AT_LEAST, 10.0),
    "pull_ratio_100k": (AT_MOST, 1.2),
    "scaling_4x4": (AT_LEAST, 1.0),
    "controller_rss_mb": (AT_MOST, 80.0),
    "start_s": (AT_MOST, 1.0),
    "rtt_over_echo_64": (AT_LEAST, 0.5),
    "rtt_over_echo_4096": (AT_LEAST, 0.5),
    "rtt_p99_ms_4096": (AT_MOST, 20.0),
    "core_flatness": (AT_LEAST, 0.8),
    "core_flatness_workers": (AT_MOST, 1.2),
    "ledger_ratio": (AT_MOST, 1.25),
}


class Bench:
    """One invocation: its options, and the samples that its sections measure."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, console: Console) -> None:
        self.baseline_python: str = arguments.baseline_python
        self.repeats = 3 if arguments.quick else REPEATS
        self.shrink = 4 if arguments.quick else 1
        self.window_s = 0.4 if arguments.quick else 1.0
        self.folder = folder
        self.console = console
        self.samples = Samples()

    def start(self) -> None:
        client, *baselines = start_all(self._clients())
        controllers.start(client, self.folder / "bytecode", Samples())  # writes the bytecode
        for repeat in range(self.repeats):
            controllers.start(client, self.folder / f"start{repeat}", self.samples)
            for baseline in baselines:
                controllers.start_baseline(baseline, self.baseline_python, self.samples)
        for child in (client, *baselines):
            child.leave()

    def _clients(self) -> list[Child]:
        baselines = (
            [Child("control_plane/baseline.py", "client", python=self.baseline_python)] if self.baseline_python else []
        )
        return [Child("control_plane/streamers.py"), *baselines]

    def rows(self) -> None:
        systems = [rows.System("", self.folder / "rows")]
        systems[0].folder.mkdir()
        if self.baseline_python:
            systems.append(rows.System(BASELINE, self.folder, self.baseline_python, stream_requests=160))
        for system in systems:
            system.start_clients(2 * max(rows.CLIENTS))
            system.start_queue()
            rows.warm(system)
            system.stop_queue()
        for _ in range(self.repeats):
            for system in systems:
                system.start_queue()
                rows.warm(system)
            for size in rows.REQUESTS:
                for system in systems:
                    rows.put_and_get(system, size, self.shrink, self.samples)
                for way in ("", "_pipelined") if self.baseline_python else ():
                    name = f"rows_per_s_{size}{way}"
                    gain = self.samples.last(name) / self.samples.last(BASELINE + name)
                    self.samples.add(f"times_baseline_{size}{way}", gain)
            for system in systems:
                rows.pull_ratio(system, self.samples)
                system.stop_queue()
            for system in systems:
                rows.scaling(system, self.shrink, self.samples)
        for system in systems:
            system.leave()

    def trips(self) -> None:
        workers = trips.WorkerPool(raise_open_files(), max(trips.SIZES))
        (feeder,) = start_all([Child("control_plane/streamers.py")])
        for repeat in range(self.repeats):
            folder = self.folder / f"trips{repeat}"
            trips.one_repeat(workers, feeder, folder, trips.SIZES, self.window_s, self.samples)
        workers.leave()
        feeder.leave()

    def core(self) -> None:
        controllers.core(self.repeats, self.shrink, self.samples)

    def ledger(self) -> None:
        (trainers,) = start_all([Child("control_plane/trainers.py")])
        for repeat in range(self.repeats + 1):
            # The first is a warm-up. Runs shorter than a second would mostly measure their start.
            samples, folder = self.samples if repeat else Samples(), self.folder / f"ledger{repeat}"
            controllers.ledger(trainers, folder, repeat % 2 == 0, max(self.shrink // 2, 1), samples)
        trainers.leave()

    def table(self, metrics: dict[str, float]) -> Table:
        title = f"flowrt's metadata plane: medians of {self.repeats} on {os.cpu_count()} cores"
        table = Table("metric", "flowrt", "least … most", "TransferQueue", "target", title=title)
        for name, value in metrics.items():
            if name.startswith(BASELINE):
                continue
            least, most = self.samples.spread(name)
            baseline = f"{metrics[BASELINE + name]:,.4g}" if BASELINE + name in metrics else ""
            verdict = ""
            if name in TARGETS:
                side, target = TARGETS[name]
                met = value >= target if side == AT_LEAST else value <= target
                verdict = f"[{'green' if met else 'red'}]{side} {target:g}"
            table.add_row(name, f"{value:,.4g}", f"{least:,.4g} … {most:,.4g}", baseline, verdict)
        return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--quick", action="store_true", help="3 repeats, a quarter of the work")
    parser.add_argument("--baseline-python", default="", help="a Python that has TransferQueue; default: none")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    arguments = parser.parse_args()
    console = Console(width=130)
    load_before = os.getloadavg()[0]
    raise_open_files()
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        bench = Bench(arguments, Path(folder), console)
        measure: dict[str, Callable[[], None]] = {section: getattr(bench, section) for section in SECTIONS}
        for section in SECTIONS:
            if section in arguments.sections:
                console.print(f"{section} …")
                measure[section]()
    metrics = bench.samples.medians()
    console.print(bench.table(metrics))
    write(arguments.json, metrics, repeats=bench.repeats, load_before=load_before, load_after=os.getloadavg()[0])


if __name__ == "__main__":
    main()
