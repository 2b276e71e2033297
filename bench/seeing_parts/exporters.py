"""Exporters: whether they write the numbers of the run.

`numbers_wrong` counts, of 50 random pairs of metric and step of a real run, those that differ between metrics.jsonl and
TensorBoard (single precision), W&B (offline file) or the Prometheus text of a run that ended with that step;
`trace_wrong` counts spans of the run's timeline that a Perfetto trace lacks or has at another time (1 us), and slices
of a track that overlap.
"""

import gzip
import json
import os
import random
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from common.exported_numbers import (
    metrics_numbers,
    prometheus_numbers,
    tensorboard_numbers,
    wandb_numbers,
)
from common.jobs import flowrt, run_job

from flowrt.observability.exporters.exported_names import exported_name, prometheus_name
from flowrt.observability.exporters.prometheus import prometheus_text
from flowrt.observability.run_reader import RunReader

BOUNDS = {"numbers_wrong": 0.0, "trace_wrong": 0.0}
DRAWN = 50
SINGLE = 2.0**-23
US = 1e-6


def measure(quick: bool) -> dict[str, float]:
    """Run, export, and compare."""
    with tempfile.TemporaryDirectory(prefix="flowrt-exporters-") as name:
        directory = Path(name)
        run_dir = run_job(directory / "run", "--steps", 30 if quick else 120).run_dir
        _export(run_dir, "--tensorboard", directory / "tb")
        _export(run_dir, "--wandb", "--wandb-dir", directory)
        _export(run_dir, "--perfetto", directory / "run.json.gz")
        return {
            "numbers_wrong": float(_count_wrong(run_dir, directory)),
            "trace_wrong": float(_count_wrong_spans(run_dir, directory / "run.json.gz")),
        }


def _export(run_dir: Path, *arguments: object) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    flowrt("export", run_dir, *arguments, env=environment)


def _count_wrong(run_dir: Path, directory: Path) -> int:
    known = metrics_numbers(run_dir)
    board = tensorboard_numbers(directory / "tb")
    [path] = (directory / "wandb").glob("offline-run-*/run-*.wandb")
    logged = wandb_numbers(path)
    draw = random.Random(0)
    drawn = [(step, name) for step, line in known.items() for name in line if name != "step"]
    chosen = draw.sample(drawn, min(DRAWN, len(drawn)))
    wrong = 0
    for step, name in chosen:
        value, exported = known[step][name], exported_name(name)
        single = board.get(step, {}).get(exported)
        is_right = single is not None and abs(single - value) <= SINGLE * abs(value)
        is_right &= logged.get(step, {}).get(exported) == value
        is_right &= _prometheus(run_dir, directory / "cut", step).get(prometheus_name(exported)) == value
        wrong += not is_right
    return wrong


def _prometheus(run_dir: Path, cut: Path, step: int) -> dict[str, float]:
    """The Prometheus text of the run up to this step."""
    cut.mkdir(exist_ok=True)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[: step + 1]))
    return prometheus_numbers(prometheus_text(RunReader(cut).figures()))


def _count_wrong_spans(run_dir: Path, trace_path: Path) -> int:
    trace = json.loads(gzip.decompress(trace_path.read_bytes()))["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X"]
    tracks: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for slice_ in slices:
        start_ns = round(1000 * slice_["ts"])
        tracks[slice_["pid"], slice_["tid"]].append((start_ns, start_ns + round(1000 * slice_["dur"])))
    overlaps = sum(end > start for track in tracks.values() for (_, end), (start, _) in pairwise(sorted(track)))
    drawn = sorted(
        (slice_["name"], slice_["ts"] * US, slice_["dur"] * US) for slice_ in slices if slice_["cat"] != "version"
    )
    texts = [gzip.decompress(path.read_bytes()) for path in sorted((run_dir / "timeline").glob("*.jsonl.gz"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    known = sorted(
        (line.get("wait") or line["kind"], line["start_s"], line["end_s"] - line["start_s"]) for line in lines
    )
    differing = sum(
        span[0] != other[0] or abs(span[1] - other[1]) > US or abs(span[2] - other[2]) > US
        for span, other in zip(drawn, known, strict=False)
    )
    wrong: int = overlaps + differing + abs(len(drawn) - len(known))
    return wrong
