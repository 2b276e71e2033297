"""Observability: the cost and the correctness of the page, the recorder, the stored samples and the attribution.

    python bench/seeing.py [ROW ...] [--json PATH] [--quick]

A row is a module of bench/seeing_parts: its function `measure` returns figures by name, `BOUNDS` are the largest that
are allowed, `FLOORS` the smallest; its docstring says what is measured. Without names all rows are measured; `--list`
prints them.

Exits with 1 if a figure misses its bound. With --quick only bounds of at most 1e-3 count, which limit numerical
errors: the runs are then too small for the bounds on speed, size and learning.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.report import beyond, write

PARTS = Path(__file__).with_name("seeing_parts")


@dataclass(frozen=True, slots=True)
class Row:
    """A module of bench/seeing_parts."""

    measure: Callable[[bool], Mapping[str, float]]
    """Takes ``quick``; returns the figures by name."""
    bounds: Mapping[str, float]
    floors: Mapping[str, float]
    about: str


def load(name: str) -> Row:
    """The row of this name."""
    module = importlib.import_module(f"{PARTS.name}.{name}")
    return Row(
        module.measure,
        getattr(module, "BOUNDS", {}),
        getattr(module, "FLOORS", {}),
        (module.__doc__ or "").strip(),
    )


def main() -> int:
    names = sorted(path.stem for path in PARTS.glob("*.py") if path.stem != "__init__")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--list", action="store_true", help="print what each row measures, and measure nothing")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.rows if name not in names]
    if unknown:
        parser.error(f"there is no row {unknown[0]!r}; choose from {', '.join(names)}")
    rows = {name: load(name) for name in arguments.rows or names}
    if arguments.list:
        print("\n\n".join(f"{name}: {row.about}" for name, row in rows.items()))
        return 0
    metrics: dict[str, float] = {}
    broken: list[str] = []
    for row in rows.values():
        figures = row.measure(arguments.quick)
        for name, value in figures.items():
            bound = f"<= {row.bounds[name]:g}" if name in row.bounds else ""
            bound = f">= {row.floors[name]:g}" if name in row.floors else bound
            is_beyond = value > row.bounds.get(name, value) or value < row.floors.get(name, value)
            print(f"{name:<28}{value:12.6g}   {bound}{'   beyond its bound' if is_beyond else ''}", flush=True)
        metrics |= figures
        broken += beyond(figures, row.bounds, row.floors, quick=arguments.quick)
    write(arguments.json, metrics)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
