"""Observability: the cost and the correctness of the page, the recorder, the stored samples and the attribution.

    python bench/seeing.py [--parts PART ...] [--json PATH] [--quick] [--list]

A part is a module of bench/seeing_parts: its function `measure` takes whether the run is quick and returns figures by
name, `BOUNDS` are the largest that are allowed, `FLOORS` the smallest; its docstring says what is measured.
"""

import importlib
import sys
from pathlib import Path

from common.harness import Bench, quick_part

PARTS = Path(__file__).with_name("seeing_parts")
MODULES = {
    path.stem: importlib.import_module(f"{PARTS.name}.{path.stem}")
    for path in sorted(PARTS.glob("*.py"))
    if path.stem != "__init__"
}
BENCH = Bench(
    about=__doc__,
    parts={name: quick_part(module.measure, module.__doc__) for name, module in MODULES.items()},
    most={name: bound for module in MODULES.values() for name, bound in getattr(module, "BOUNDS", {}).items()},
    least={name: floor for module in MODULES.values() for name, floor in getattr(module, "FLOORS", {}).items()},
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
