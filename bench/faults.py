"""Real runs in which a process drawn at random is killed, stopped or cut off at a random moment.

    python bench/faults.py [--trials 300] [--seed 0] [--seeds 22 48] [--quick] [--at-once 1] [--json PATH]

Every trial is a whole run of `flowrt run`'s own launcher with its supervision: controller, source, two rollout workers,
reward, reference and trainer are processes with the real engines and a tiny model, over the real wire. Only their start
is cheaper: each is forked from a process that has imported everything. The data has exactly as many prompts as the
run trains, so that each must be trained once. Every second run (odd seeds) has keys. A run whose victim is lost for
ever and cannot be replaced may end with an error that names it; it is then resumed, and must complete.

    lost      prompts that were not trained        doubled   prompts that were trained twice
    hung      no end within the deadline           wrong     another exit code, count, step or leftover process
"""

import argparse
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faulty.faults import draw
from faulty.runs import SILENCE_S, STEPS, Outcome, Pending, begin, prepare, warm_up
from report import write
from rich.console import Console
from rich.table import Table

QUICK = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the next ones count up")
    parser.add_argument("--seeds", type=int, nargs="+", help="these trials and no others")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} trials")
    parser.add_argument("--at-once", type=int, default=1, help="trials side by side")
    parser.add_argument("--deadline-s", type=float, default=90.0, help="a trial that takes longer hangs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trials = len(arguments.seeds) if arguments.seeds else QUICK if arguments.quick else arguments.trials
    folder = Path(tempfile.mkdtemp(prefix="flowrt-faults-"))
    console, began_s = Console(), time.monotonic()
    warm_up()
    base = prepare(folder)
    outcomes: list[Outcome] = []
    pending: list[Pending] = []
    seeds = iter(arguments.seeds or itertools.count(arguments.seed))
    while len(outcomes) < trials:
        while len(pending) < arguments.at_once and len(outcomes) + len(pending) < trials:
            seed = next(seeds)
            fault = draw(seed, STEPS, SILENCE_S)
            pending.append(begin(base, folder / f"trial-{seed}", seed, fault, arguments.deadline_s))
        time.sleep(0.01)
        for one in [one for one in pending if one.is_over()]:
            pending.remove(one)
            outcome = one.outcome()
            if not (outcome.struck or outcome.is_bad or arguments.seeds):
                shutil.rmtree(one.folder)  # the run was over first: another one is drawn
                continue
            outcomes.append(outcome)
            console.print(outcome.line(len(outcomes)), highlight=False, markup=False, soft_wrap=True)
            if not outcome.is_bad:
                shutil.rmtree(one.folder)
    results = summary(outcomes, time.monotonic() - began_s)
    console.print(table_of(outcomes, results))
    if not any(one.is_bad for one in outcomes):
        shutil.rmtree(folder)
    metrics = {name: value for name, value in results.items() if isinstance(value, int | float)}
    write(arguments.json, metrics, first_seed=arguments.seed, at_once=arguments.at_once, failures=results["failures"])
    return int(any(one.is_bad for one in outcomes))


def summary(outcomes: list[Outcome], wall_s: float) -> dict[str, Any]:
    noticed = [one.noticed_s for one in outcomes if one.noticed_s >= 0]
    recovered = [one.recovered_s for one in outcomes if one.recovered_s >= 0]
    return {
        "trials": len(outcomes),
        "lost": sum(one.lost for one in outcomes),
        "doubled": sum(one.doubled for one in outcomes),
        "hung": sum(one.hung for one in outcomes),
        "wrong": sum(bool(one.wrong) for one in outcomes),
        "resumed": sum(one.resumed for one in outcomes),
        "detect_s_p50": round(statistics.median(noticed), 3) if noticed else None,
        "recover_s_p50": round(statistics.median(recovered), 3) if recovered else None,
        "recover_s_max": round(max(recovered), 3) if recovered else None,
        "wall_s": round(wall_s, 1),
        "silence_s": SILENCE_S,
        "failures": [one.line(0) for one in outcomes if one.is_bad],
    }


def table_of(outcomes: list[Outcome], results: dict[str, Any]) -> Table:
    """By what was done to whom."""
    caption = "  ".join(f"{name} {value}" for name, value in results.items() if name != "failures")
    table = Table(title=f"{results['trials']} runs, each with one fault", caption=caption)
    for name in (
        "victim",
        "fault",
        "trials",
        "lost",
        "doubled",
        "hung",
        "wrong",
        "noticed s",
        "recovered s",
        "worst s",
    ):
        table.add_column(name, justify="left" if name in ("victim", "fault") else "right")
    for kind in sorted({(one.fault.victim, one.fault.kind) for one in outcomes}):
        group = [one for one in outcomes if (one.fault.victim, one.fault.kind) == kind]
        part = summary(group, 0.0)
        counts = [part[name] for name in ("trials", "lost", "doubled", "hung", "wrong")]
        times = [part[name] for name in ("detect_s_p50", "recover_s_p50", "recover_s_max")]
        table.add_row(*kind, *map(str, counts), *("-" if one is None else f"{one:.2f}" for one in times))
    return table


if __name__ == "__main__":
    sys.exit(main())
