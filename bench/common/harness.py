"""How every benchmark measures: options, parts, one table with bounds, the results file, the exit code.

    python bench/NAME.py [--parts PART ...] [--quick] [--json PATH] [--list]

Figures are printed as soon as their part is measured, each with its bound, and PATH is written after each part.
Without ``--parts`` PATH is replaced. With it, the figures of other parts stay in PATH; ``machine.part_commits`` has the
commit of each part, and the command names the parts of other commits. Quick and whole runs are never in one file.

The exit code is 1 if a figure misses its bound; in a quick run only bounds of at most `ERROR` count, because the run is
too small for bounds on speed, size and learning.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # for the proofs in tests, which are not installed
GIT_S = 10.0
ERROR = 1e-3
"""Bounds of at most this limit numerical errors, at any size of a run; others limit speed, size and learning."""
Figures = Mapping[str, float]
"""Measured numbers by name."""
Options = argparse.Namespace
Part = Callable[[Options], Figures]
Measured = TypeVar("Measured")


class Skipped(Exception):
    """A part that cannot be measured here; the message is the reason."""


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
    git = ["git", "-C", str(ROOT)]
    commands = ["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", ".", ":!bench/results"]
    with suppress(OSError):
        runs = (subprocess.run([*git, *command], capture_output=True, text=True, timeout=GIT_S) for command in commands)
        tree, changes = (run.stdout.strip() for run in runs)
        return f"{tree}-dirty" if tree and changes else tree
    return ""


def beyond(metrics: Figures, most: Figures, least: Figures, *, quick: bool) -> list[str]:
    """The figures that miss their bound; in a quick run only bounds of at most ERROR count.

    Args:
        metrics: figures by name.
        most: the largest value of a figure.
        least: the smallest value of a figure.
        quick: whether the run was too small to hold its speed, size and learning against their goals.
    """
    judged = {name: bound for name, bound in most.items() if not quick or bound <= ERROR}
    missed = [name for name, bound in judged.items() if not metrics.get(name, bound) <= bound]
    return missed + [name for name, floor in least.items() if not quick and not metrics.get(name, floor) >= floor]


class ResultsFile:
    """The figures of a run, and those of other parts that the file has from earlier runs.

    Args:
        path: the file; None: nothing is kept.
        quick: whether this run is a quick one.
        is_partial: whether figures of other parts stay in the file.

    Raises ValueError if figures of a quick run and of a whole one would be mixed.
    """

    def __init__(self, path: Path | None, *, quick: bool, is_partial: bool) -> None:
        self.metrics: dict[str, float] = {}
        self.part_commits: dict[str, str] = {}
        self._path, self._quick, self._commit = path, quick, commit()
        if path is None or not is_partial or not path.is_file():
            return
        written = json.loads(path.read_text())
        machine = written["machine"]
        if machine.get("quick", False) != quick:
            kinds = ("a quick run", "a whole run") if quick else ("a whole run", "a quick run")
            raise ValueError(f"{path} has figures of {kinds[1]}; write those of {kinds[0]} to another file")
        self.metrics = written["metrics"]
        self.part_commits = machine.get("part_commits", {"all others": machine.get("commit", "")})

    def add(self, part: str, figures: Figures, about: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
        """Add the figures of a part and write the file, with ``about`` as a part of ``machine``."""
        self.metrics |= figures
        self.part_commits[part] = self._commit
        if self._path is None:
            return
        machine: dict[str, Any] = {"processor": processor(), "cores": os.cpu_count()}
        machine |= {"python": platform.python_version(), "commit": self._commit}
        machine |= {"load": round(os.getloadavg()[1], 2), **about}
        machine |= {"quick": True} if self._quick else {}
        machine["part_commits"] = self.part_commits
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"metrics": self.metrics, "machine": machine, **tables}, indent=2) + "\n"
        partly = self._path.with_suffix(".part")
        partly.write_text(text)
        partly.replace(self._path)

    def older(self) -> dict[str, str]:
        """The commits of parts that were measured on another one than this run."""
        return {part: of for part, of in self.part_commits.items() if of != self._commit}


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A benchmark.

    Attributes:
        about: what it measures: the docstring of its script.
        parts: its measurements by name; each takes the options and returns figures. Its docstring says what they are.
        most: the largest value of a figure; a figure without a bound is only reported.
        least: the smallest value of a figure.
        derived: figures of the figures of all parts.
        add_options: adds options of its own to the parser.
        machine: conditions of the measurement, for the results file.
        tables: what the results file has besides figures, by name.
    """

    about: str | None
    parts: Mapping[str, Part]
    most: Figures = field(default_factory=dict)
    least: Figures = field(default_factory=dict)
    derived: Callable[[Figures], Figures] = _nothing
    add_options: Callable[[argparse.ArgumentParser], object] = _nothing
    machine: Callable[[Options], Mapping[str, Any]] = _nothing
    tables: Callable[[], Mapping[str, Any]] = dict

    def main(self) -> int:
        """Measure what the command line asks for. Returns the exit code."""
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--parts", nargs="+", choices=[*self.parts], metavar="PART", default=[])
        parser.add_argument("--json", type=Path, help="write {metrics, machine} here; keep what other parts wrote")
        parser.add_argument("--quick", action="store_true", help="a small measurement, to try the benchmark")
        parser.add_argument("--list", action="store_true", help="print what each part measures, and measure nothing")
        self.add_options(parser)
        options = parser.parse_args()
        if options.list:
            print("\n\n".join(f"{name}: {(part.__doc__ or '').strip()}" for name, part in self.parts.items()))
            return 0
        try:
            results = ResultsFile(options.json, quick=options.quick, is_partial=bool(options.parts))
        except ValueError as error:
            parser.error(str(error))
        measured: dict[str, float] = {}
        for name in options.parts or self.parts:
            begin_s = time.monotonic()
            try:
                figures = dict(self.parts[name](options))
            except Skipped as reason:
                print(f"{name} is not measured: {reason}", flush=True)
                continue
            derived = self.derived(results.metrics | figures)
            measured |= figures | dict(derived)
            results.add(name, figures | dict(derived), self.machine(options), self.tables())
            print(f"{name}: {time.monotonic() - begin_s:.0f} s", flush=True)
            self._show(figures)
        self._show(self.derived(results.metrics))
        for part, of in results.older().items():
            print(f"{options.json} has figures of {part} from another commit: {of}")
        missed = beyond(measured, self.most, self.least, quick=options.quick)
        for name in missed:
            print(f"{name} is {measured[name]:.4g}, its bound is {self.bound_of(name)}")
        return int(bool(missed))

    def _show(self, figures: Figures) -> None:
        for name, value in figures.items():
            print(f"  {name:<50}{value:>14,.6g}   {self.bound_of(name)}", flush=True)

    def bound_of(self, figure: str) -> str:
        """The bounds of a figure as text; empty if it has none."""
        least = [f">= {self.least[figure]:g}"] if figure in self.least else []
        return ", ".join([*least, *([f"<= {self.most[figure]:g}"] if figure in self.most else [])])


def quick_part(measure: Callable[[bool], Figures], about: str | None = None) -> Part:
    """The part of a measurement that takes whether the run is quick; ``about``: its text, else the docstring."""

    def part(options: Options) -> Figures:
        return measure(options.quick)

    part.__doc__ = about or measure.__doc__
    return part


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


def by_turns(sides: Mapping[str, Callable[[int], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """The results of each side, which takes the number of the round; every other round is in reverse order."""
    results: dict[str, list[Measured]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in reversed(list(sides)) if number % 2 else sides:
            results[name].append(sides[name](number))
    return results


def median_ratio(some: list[float], others: list[float]) -> float:
    """The median of the ratios of two sides in the same round."""
    return statistics.median(value / other for value, other in zip(some, others, strict=True))


def percentile(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[round(share * (len(ranked) - 1))]
