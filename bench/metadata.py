"""The metadata plane: rows/s, round trips, memory and start, compared with a bare echo and with TransferQueue.

    python bench/metadata.py [--quick] [--json PATH] [--baseline-python PYTHON] [--parts rows trips ...]

``--baseline-python`` is a Python that has TransferQueue (``pip install TransferQueue torch``); without it only flowrt
is measured. Every figure is the median of the repeats; the sides that are compared take turns within each repeat, on
the same machine and with the same commands, and every row that comes out is checked. Client processes are started and
warmed up before anything is timed; seconds are those of the monotonic clock, which all processes share.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.children import Child, raise_open_files, start_all
from common.harness import Bench, Figures, Options, Samples
from control_plane import controllers, rows
from control_plane import round_trips as trips

REPEATS, QUICK_REPEATS = 5, 3
BASELINE = "baseline_"


@contextmanager
def working_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        yield Path(folder)


def repeats_of(options: Options) -> int:
    return QUICK_REPEATS if options.quick else REPEATS


def shrink_of(options: Options) -> int:
    """By how much there is less work."""
    return 4 if options.quick else 1


def start(options: Options) -> Figures:
    """Time of the controller from its start to the first row, and its memory."""
    samples, python = Samples(), options.baseline_python
    baselines = [Child("control_plane/baseline.py", python=python)] if python else []
    client, *baselines = start_all([Child("control_plane/streamers.py"), *baselines])
    with working_folder() as folder:
        controllers.start(client, folder / "bytecode", Samples())  # writes the bytecode
        for repeat in range(repeats_of(options)):
            controllers.start(client, folder / f"start{repeat}", samples)
            for baseline in baselines:
                controllers.start_baseline(baseline, python, samples)
    for child in (client, *baselines):
        child.leave()
    return samples.medians()


def rows_a_second(options: Options) -> Figures:
    """Rows put and got, with many rows outstanding, with several clients."""
    samples, shrink = Samples(), shrink_of(options)
    with working_folder() as folder:
        systems = [rows.System("", folder / "rows")]
        systems[0].folder.mkdir()
        if options.baseline_python:
            systems.append(rows.System(BASELINE, folder, options.baseline_python, stream_requests=160))
        for system in systems:
            system.start_clients(2 * max(rows.CLIENTS))
            system.start_queue()
            rows.warm(system)
            system.stop_queue()
        for _ in range(repeats_of(options)):
            for system in systems:
                system.start_queue()
                rows.warm(system)
            for size in rows.REQUESTS:
                for system in systems:
                    rows.put_and_get(system, size, shrink, samples)
                for way in ("", "_pipelined") if options.baseline_python else ():
                    name = f"rows_per_s_{size}{way}"
                    samples.add(f"times_baseline_{size}{way}", samples.last(name) / samples.last(BASELINE + name))
            for system in systems:
                rows.pull_ratio(system, samples)
                system.stop_queue()
            for system in systems:
                rows.scaling(system, shrink, samples)
        for system in systems:
            system.leave()
    return samples.medians()


def round_trips(options: Options) -> Figures:
    """Pulls of one row, answered to many workers."""
    samples = Samples()
    workers = trips.WorkerPool(raise_open_files(), max(trips.SIZES))
    (feeder,) = start_all([Child("control_plane/streamers.py")])
    with working_folder() as folder:
        for repeat in range(repeats_of(options)):
            window_s = 0.4 if options.quick else 1.0
            trips.one_repeat(workers, feeder, folder / f"trips{repeat}", trips.SIZES, window_s, samples)
    workers.leave()
    feeder.leave()
    return samples.medians()


def ledger(options: Options) -> Figures:
    """A small training run with and without the ledger."""
    samples = Samples()
    (trainers,) = start_all([Child("control_plane/trainers.py")])
    with working_folder() as folder:
        for repeat in range(repeats_of(options) + 1):
            # The first is a warm-up. Runs shorter than a second would mostly measure their start.
            recorded, shrink = samples if repeat else Samples(), max(shrink_of(options) // 2, 1)
            controllers.ledger(trainers, folder / f"ledger{repeat}", repeat % 2 == 0, shrink, recorded)
    trainers.leave()
    return samples.medians()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--baseline-python", default="", help="a Python that has TransferQueue; default: none")


BENCH = Bench(
    about=__doc__,
    parts={"start": start, "rows": rows_a_second, "trips": round_trips, "ledger": ledger},
    most={
        "pull_ratio_100k": 1.2,
        "controller_rss_mb": 80.0,
        "start_s": 1.0,
        "rtt_p99_ms_4096": 20.0,
        "ledger_ratio": 1.25,
    },
    least={
        "times_baseline_1": 20.0,
        "times_baseline_64": 15.0,
        "times_baseline_512": 10.0,
        "scaling_4x4": 1.0,
        "rtt_over_echo_64": 0.5,
        "rtt_over_echo_4096": 0.5,
    },
    add_options=add_options,
    machine=lambda options: {"repeats": repeats_of(options)},
)

if __name__ == "__main__":
    raise_open_files()
    sys.exit(BENCH.main())
