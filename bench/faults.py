"""Real runs with random faults of processes, links, files and disks.

    python bench/faults.py [--trials 300] [--first-seed 0] [--only SEED ...] [--groups NAME ...] [--quick]
                           [--at-once 2] [--kinds KIND ...] [--filtered N] [--json PATH]

Every trial is a whole run of `flowrt run`, and of `flowrt resume` where the run had to end: launcher, controller,
source, rollout workers, reward, reference and trainer are processes with the real engines, a tiny model and real
connections. Only their start is faster: each is forked from a process that has imported everything, except the ranks
of a trainer and the replacement of a fork server, which python starts. The data has exactly as many prompts as the run
trains, so that each must be trained once. Every second run (odd seeds) has CURVE keys.

    one          one process is killed, stopped, or its connection is closed or goes silent
    signal       SIGTERM, SIGINT or SIGHUP to a worker or the controller
    launcher, fork server, rank (of two, or their torchrun)        SIGKILL, SIGSTOP, SIGTERM, SIGINT or SIGHUP
    two          two faults, at once or within two seconds
    everything   SIGKILL of all processes at once, then flowrt resume
    resume       the same, and a fault while the resumed run comes up
    files        the same, and damage to a file before it is resumed
    disk         a full disk (needs root: it is mounted)
    leave        SIGTERM to the only worker of a role, which drains

With ``--filtered N`` all runs sample dynamically: the group filter drops N groups in each step, the data has N prompts
a step more, and each prompt must be trained once, or be dropped for good with the filter's reason.

A run may end if its fault requires it (a launcher that is killed, a controller that is interrupted, a full disk); it is
then resumed, and must complete. The verdict comes from the files of the run, read without flowrt's code:

    lost      prompts that were not trained        doubled   prompts that were trained twice
    hung      no end within the deadline           wrong     another exit code, sentence, count, step, or something left
"""

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.harness import Bench, Figures, Options
from fault_injection.faults import GROUPS, Plan, draw
from fault_injection.runs import KEYS, WORKER_TIMEOUT_S, prepare, warm_up
from fault_injection.trial import STEPS, Outcome, Trial, side_by_side

QUICK = tuple(GROUPS)
"""One trial of each group."""
FAILURES: list[str] = []
"""What failed, a line for each trial."""


def trials(options: Options) -> Figures:
    """Runs with faults: counts of all and by kind, and times of detection, recovery and resumption."""
    folder = Path(tempfile.mkdtemp(prefix="flowrt-faults-", dir=options.keep))
    began_s, plans = time.monotonic(), _plans(options)
    count = len(options.only or QUICK) if options.only or options.quick else options.trials
    warm_up()
    base = prepare(folder, options.filtered)
    outcomes: list[Outcome] = []
    skipped = 0

    def next_trial(running: int) -> Trial | None:
        nonlocal skipped
        while len(outcomes) + skipped + running < count and (plan := next(plans, None)) is not None:
            if plan.group == "disk" and os.geteuid() != 0:
                skipped += 1
                continue
            place = folder / f"trial-{plan.seed}"
            return Trial(plan=plan, base=base, folder=place, deadline_s=options.deadline_s, keys=folder / KEYS)
        return None

    for outcome in side_by_side(next_trial, options.at_once):
        if not outcome.is_bad:
            shutil.rmtree(outcome.folder)
        if outcome.injected or outcome.is_bad or options.only:  # else the run ended before its fault
            outcomes.append(outcome)
            print(outcome.line(len(outcomes)), flush=True)
        elif options.quick:
            plans = itertools.chain(_of_group(outcome.plan.group, outcome.plan.seed + 1), plans)
    FAILURES.extend(outcome.line(0) for outcome in outcomes if outcome.is_bad)
    if not FAILURES:
        shutil.rmtree(folder)
    wall_s = round(time.monotonic() - began_s, 1)
    return metrics_of(outcomes) | {"skipped": skipped, "wall_s": wall_s, "worker_timeout_s": WORKER_TIMEOUT_S}


def at_least_0(text: str) -> int:
    """A number of the command line. Raises ValueError below 0."""
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def _plans(options: Options) -> Iterator[Plan]:
    if options.quick:
        return (next(_of_group(group, options.first_seed)) for group in QUICK)
    seeds = options.only or itertools.count(options.first_seed)
    plans = (draw(seed, STEPS, WORKER_TIMEOUT_S, tuple(options.groups)) for seed in seeds)
    kinds = options.kinds
    return (
        plan for plan in plans if not kinds or all(fault.kind in kinds for fault in (*plan.faults, *plan.resume_faults))
    )


def _of_group(group: str, first_seed: int) -> Iterator[Plan]:
    """The first plan of ``group`` with a seed of at least ``first_seed``, as drawn from all groups."""
    plans = (draw(seed, STEPS, WORKER_TIMEOUT_S) for seed in itertools.count(first_seed))
    return itertools.islice((plan for plan in plans if plan.group == group), 1)


def metrics_of(outcomes: list[Outcome]) -> dict[str, float]:
    """Counts and times of all, and counts by kind of fault."""
    metrics = {**counts(outcomes), **times(outcomes)}
    for row in sorted({outcome.plan.row for outcome in outcomes}, key=lambda row: (row.isupper(), row)):
        group = [outcome for outcome in outcomes if outcome.plan.row == row]
        metrics |= {f"{row.replace(' ', '_')}_{name}": value for name, value in counts(group).items()}
    return metrics


def counts(outcomes: list[Outcome]) -> dict[str, int]:
    return {
        "trials": len(outcomes),
        "lost": sum(outcome.lost for outcome in outcomes),
        "doubled": sum(outcome.doubled for outcome in outcomes),
        "hung": sum(outcome.hung for outcome in outcomes),
        "wrong": sum(bool(outcome.wrong) for outcome in outcomes),
        "resumed": sum(outcome.resumed > 0 for outcome in outcomes),
        "refused": sum(bool(outcome.refused) for outcome in outcomes),
    }


def times(outcomes: list[Outcome]) -> dict[str, float]:
    """Medians and maxima, in seconds; without those of which nothing was measured."""
    measured = {
        "detect_s": [outcome.noticed_s for outcome in outcomes],
        "recover_s": [outcome.recovered_s for outcome in outcomes],
        "resume_s": [value for outcome in outcomes for value in outcome.resume_s],
        "replaced_s": [outcome.replaced_s for outcome in outcomes],
    }
    figures: dict[str, float] = {}
    for name, values in measured.items():
        if came := [value for value in values if value >= 0]:
            figures |= {f"{name}_p50": round(statistics.median(came), 3), f"{name}_max": round(max(came), 3)}
    return figures


def folder_of(text: str) -> Path:
    """A directory, which is created."""
    Path(text).mkdir(parents=True, exist_ok=True)
    return Path(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--first-seed", type=int, default=0, help="of the first trial; the next ones count up")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these trials and no others")
    parser.add_argument("--groups", nargs="+", choices=tuple(GROUPS), default=(), help="trials of these groups alone")
    parser.add_argument("--kinds", nargs="+", default=(), metavar="KIND", help="only faults of these kinds, as kill")
    parser.add_argument("--at-once", type=int, default=2, help="trials side by side")
    parser.add_argument("--filtered", type=at_least_0, default=0, metavar="N", help="groups filtered in each step")
    parser.add_argument("--deadline-s", type=float, default=90.0, help="what one life of a run may take")
    parser.add_argument("--keep", type=folder_of, help="directory for the files of failed trials")


def machine(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("first_seed", "at_once", "filtered")} | {"failures": FAILURES}


BENCH = Bench(
    about=__doc__,
    parts={"trials": trials},
    most=dict.fromkeys(("lost", "doubled", "hung", "wrong"), 0.0),
    add_options=add_options,
    machine=machine,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
