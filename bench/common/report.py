"""The results file of a bench: its metrics and the machine."""

import json
import os
import platform
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

GIT_S = 10.0
ERROR = 1e-3
"""Bounds of at most this limit numerical errors, at any size of a run; others limit speed, size and learning."""


def processor() -> str:
    """The model name of the processor; its architecture where the system does not know the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The checked-out commit; with "-dirty" after changes outside bench/results. Empty outside a checkout."""
    here = ["git", "-C", str(Path(__file__).parents[2])]
    commands = ["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", ".", ":!bench/results"]
    with suppress(OSError):
        runs = (
            subprocess.run([*here, *command], capture_output=True, text=True, timeout=GIT_S) for command in commands
        )
        tree, changes = (run.stdout.strip() for run in runs)
        return f"{tree}-dirty" if tree and changes else tree
    return ""


def write(path: Path | None, metrics: dict[str, float], **about: Any) -> None:
    """Write {metrics, machine} as JSON, with ``about`` as part of machine; without a path, do nothing."""
    if path is None:
        return
    machine: dict[str, Any] = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    machine |= {"commit": commit(), **about}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"metrics": metrics, "machine": machine}, indent=2) + "\n")


def beyond(
    metrics: Mapping[str, float], bounds: Mapping[str, float], floors: Mapping[str, float], *, quick: bool
) -> list[str]:
    """The figures that miss their bound; in a quick run only bounds of at most ERROR count.

    Args:
        metrics: figures by name.
        bounds: the largest value of a figure.
        floors: the smallest value of a figure.
        quick: whether the run was too small to hold its speed, size and learning against their goals.
    """
    judged = {name: bound for name, bound in bounds.items() if not quick or bound <= ERROR}
    missed = [name for name, bound in judged.items() if not metrics.get(name, bound) <= bound]
    return missed + [name for name, floor in floors.items() if not quick and not metrics.get(name, floor) >= floor]


class Samples:
    """Repeated measurements by metric, reported as medians."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, metric: str, value: float) -> None:
        self._values[metric].append(value)

    def last(self, metric: str) -> float:
        return self._values[metric][-1]

    def medians(self) -> dict[str, float]:
        return {metric: float(f"{statistics.median(values):.6g}") for metric, values in self._values.items()}

    def spread(self, metric: str) -> tuple[float, float]:
        """The smallest and the largest value of a metric."""
        return min(self._values[metric]), max(self._values[metric])

    def repeats(self) -> int:
        """The smallest number of measurements of any metric."""
        return min(map(len, self._values.values()), default=0)


def percentile(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[round(share * (len(ranked) - 1))]
