"""What every bench says of itself: its metrics and the machine, in one file."""

import json
import os
import platform
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any


def processor() -> str:
    """The processor by the name that its maker gave it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write(path: Path | None, metrics: dict[str, float], **about: Any) -> None:
    """Write {metrics, machine} as JSON; ``about`` joins what is said of the machine."""
    if path is None:
        return
    machine = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version(), **about}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"metrics": metrics, "machine": machine}, indent=2) + "\n")


class Samples:
    """Repeated measurements by metric; what is reported is the median."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, metric: str, value: float) -> None:
        self._values[metric].append(value)

    def last(self, metric: str) -> float:
        return self._values[metric][-1]

    def medians(self) -> dict[str, float]:
        return {metric: float(f"{statistics.median(values):.6g}") for metric, values in self._values.items()}

    def spread(self, metric: str) -> tuple[float, float]:
        """The least and the greatest."""
        return min(self._values[metric]), max(self._values[metric])

    def repeats(self) -> int:
        """How often the least measured of them was measured."""
        return min(map(len, self._values.values()), default=0)


def percentile(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[round(share * (len(ranked) - 1))]
