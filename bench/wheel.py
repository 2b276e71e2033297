"""What a user of the installed wheel does works without the repository and without extras.

    python bench/wheel.py [ENVIRONMENT ...] [--json PATH] [--quick]
    python bench/wheel.py --programs DIR [--json PATH]    # of an environment of yours, of another Python or torch

The wheel is built from the sdist and installed by this Python into environments of its own (about 1.2 GB each, deleted
afterwards). Environments; without names, both (with --quick: newest):

- newest: what pip chooses;
- oldest: each dependency at its lower bound.

torch is that of constraints.txt in both. Commands run in another directory, without HOME and PYTHONPATH, in an
environment whose path has a space: every command of `flowrt`, the examples, a live page, a run whose processes are
started by hand, and what needs an extra. A command fails by another exit code, a traceback, or by not doing what it is
for. Exits with 1 if one fails.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from common.distributions import build
from common.report import write
from installed.commands import CASES, PROCESSES, prepare
from installed.environment import NEWEST, OLDEST, Environment, make

ENVIRONMENTS = (NEWEST, OLDEST)


def failures(environment: Environment) -> dict[str, str]:
    """The fault of each command, empty if there is none; printed as they end."""
    prepare(environment.work)
    checks: Mapping[str, Callable[[Environment], str]] = {
        **{" ".join(one.words): one.fault for one in CASES},
        **PROCESSES,
    }
    found = {}
    for name, check in checks.items():
        found[name] = check(environment)
        print(f"{'FAILED' if found[name] else 'ok':<8}{name[:110]}  {found[name]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="*", metavar="ENVIRONMENT", help="newest, oldest; default: both")
    parser.add_argument("--programs", type=Path, metavar="DIR", help="bin/ of an environment that has flowrt")
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--quick", action="store_true", help="newest alone")
    arguments = parser.parse_args()
    wrong = [name for name in arguments.environments if name not in ENVIRONMENTS]
    if wrong:
        parser.error(f"there is no environment {wrong[0]!r}; choose from {', '.join(ENVIRONMENTS)}")
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="flowrt wheel ") as folder:
        if arguments.programs:
            found = failures(Environment(arguments.programs.absolute(), Path(folder)))
        else:
            _, wheel = build(Path(folder) / "dist")
            for name in arguments.environments or (ENVIRONMENTS[:1] if arguments.quick else ENVIRONMENTS):
                print(f"---- {name}", flush=True)
                faults = failures(make(Path(folder) / name, wheel, name))
                found |= {f"{name}: {command}": fault for command, fault in faults.items()}
    metrics = {"wheel_commands": float(len(found)), "wheel_failures": float(sum(map(bool, found.values())))}
    for key, value in metrics.items():
        print(f"{key:<28}{value:12.6g}")
    write(arguments.json, metrics)
    return int(metrics["wheel_failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
