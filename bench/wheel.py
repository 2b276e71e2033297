"""What a user of the installed wheel does works without the repository and without extras.

    python bench/wheel.py [--parts newest oldest] [--json PATH] [--quick]
    python bench/wheel.py --programs DIR [--json PATH]    # of an environment of yours, of another Python or torch

The wheel is built from the sdist and installed by this Python into environments of its own (about 1.2 GB each, deleted
afterwards). Environments (with --quick: newest):

- newest: what pip chooses;
- oldest: each dependency at its lower bound.

torch is that of constraints.txt in both. Commands run in another directory, without HOME and PYTHONPATH, in an
environment whose path has a space: every command of `flowrt`, the examples, a live page, a run whose processes are
started by hand, and what needs an extra. A command fails by another exit code, a traceback, or by not doing what it is
for.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from common.distributions import build
from common.harness import Bench, Figures, Options, Part, Skipped
from installed.commands import CASES, PROCESSES, prepare
from installed.environment import NEWEST, OLDEST, Environment, make


def failures(environment: Environment) -> Figures:
    """Numbers of commands and of failures; each is printed as it ends."""
    prepare(environment.work)
    checks: Mapping[str, Callable[[Environment], str]] = {
        **{" ".join(case.words): case.fault for case in CASES},
        **PROCESSES,
    }
    failed = 0
    for name, check in checks.items():
        fault = check(environment)
        failed += bool(fault)
        print(f"{'FAILED' if fault else 'ok':<8}{name[:110]}  {fault}", flush=True)
    return {"commands": float(len(checks)), "failures": float(failed)}


def installed(name: str) -> Part:
    """The commands of an environment that is made for them."""

    def measure(options: Options) -> Figures:
        if options.programs:
            raise Skipped("--programs names an environment of yours")
        if options.quick and name != NEWEST:
            raise Skipped("a quick run has the newest dependencies")
        with tempfile.TemporaryDirectory(prefix="flowrt wheel ") as folder:
            _, wheel = build(Path(folder) / "dist")
            counts = failures(make(Path(folder) / name, wheel, name))
        return {f"wheel_{key}_{name}": value for key, value in counts.items()}

    return measure


def own(options: Options) -> Figures:
    """The commands of an environment of yours."""
    if not options.programs:
        raise Skipped("it needs --programs, bin/ of an environment that has flowrt")
    with tempfile.TemporaryDirectory(prefix="flowrt wheel ") as folder:
        counts = failures(Environment(options.programs.absolute(), Path(folder)))
    return {f"wheel_{key}_own": value for key, value in counts.items()}


def of_all(metrics: Figures) -> Figures:
    """Commands and failures in all environments."""
    keys = ("commands", "failures")
    return {f"wheel_{key}": sum(metrics.get(f"wheel_{key}_{name}", 0.0) for name in PARTS) for key in keys}


PARTS: dict[str, Part] = {NEWEST: installed(NEWEST), OLDEST: installed(OLDEST), "own": own}
BENCH = Bench(
    about=__doc__,
    parts=PARTS,
    most={"wheel_failures": 0.0},
    derived=of_all,
    add_options=lambda parser: parser.add_argument(
        "--programs", type=Path, metavar="DIR", help="bin/ of an environment that has flowrt"
    ),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
