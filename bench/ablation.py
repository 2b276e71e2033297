"""Throughput gained by streaming, asynchrony and each further step: an ablation with simulated engines.

    python bench/ablation.py [--quick] [--json PATH] [--parts WORKLOAD ...] [--modes streaming ...]

Controller, source, rollout workers, reference, reward and trainer are real processes that exchange real messages; only
the engines are simulated (flowrt/engines/simulated/engine.py): they wait for the time of a cost model and compute
nothing. Each mode adds to the previous one:

    sync        staleness 0, a barrier after every task of a step: generation, scores, training, weights
    streaming   staleness 0, samples pass to the next stage one by one, the trainer takes complete micro-batches
    delayed     staleness bound 1, and new weights are sent during generation (delayed update)
    rolling     also: at most two workers at a time fetch new weights, and swap between two tokens
    tail        also: prompts whose earlier responses were long go to reserved workers (tail lanes)

Throughput is samples trained per simulated second, from the first opened prompt to the end of the last step, which
includes the time to fill the pipeline. The modes of a workload take turns, with a new seed each round; the figures are
medians over rounds.
"""

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

from common.harness import Bench, Figures, Options, Part, Skipped, by_turns, median_ratio
from end_to_end.simulated.accounts import ROLES, Accounts, account
from end_to_end.simulated.cluster import Cluster
from end_to_end.simulated.modes import MODES, RunSpec
from end_to_end.simulated.workloads import WORKLOADS

PROCESS = "end_to_end/simulated/process.py"
SYNC = "sync"
SUMMED = ("samples", "prompts_lost", "prompts_trained_twice", "dropped")
QUICK = {"rounds": 1, "steps": 3, "real_s": 0.009}


def one_run(cluster: Cluster, options: Options, workload: str, mode: str, number: int) -> Accounts:
    """Run a mode once; steps that do not overlap are few, because a few show the time of a step."""
    steps = options.steps or WORKLOADS[workload].steps
    steps = steps if MODES[mode].bound else max(steps // 3, 3)
    spec = RunSpec(workload, mode, number, steps, options.real_s)
    with tempfile.TemporaryDirectory(prefix="flowrt-simulated-") as run_dir:
        cluster.begin(spec, Path(run_dir))
        cluster.join()
        return account(Path(run_dir), spec, *cluster.finish())


def figures_of(runs: list[Accounts], base: list[Accounts], key: str) -> Figures:
    """The figures of a mode over its rounds; the speed-up is over ``base`` in the round with the same seed."""
    rates, base_rates = ([accounts.samples_per_s for accounts in side] for side in (runs, base))
    return {
        f"speedup_{key}": median_ratio(rates, base_rates),
        f"step_s_{key}": statistics.median(run.step_s for run in runs),
        f"cpu_{key}": statistics.median(run.cpu for run in runs),
        **{f"busy_{role}_{key}": statistics.median(run.busy[role] for run in runs) for role in ROLES},
        **{f"{name}_{key}": sum(run.counts[name] for run in runs) for name in SUMMED},
        f"staleness_max_{key}": max(run.counts["staleness_max"] for run in runs),
        f"staleness_mean_{key}": statistics.median(run.counts["staleness_mean"] for run in runs),
    }


def of_workload(workload: str) -> Part:
    """The measurement of all modes on a workload."""

    def measure(options: Options) -> Figures:
        if options.quick:
            if workload != "paper":
                raise Skipped("a quick run has the workload paper")
            vars(options).update(QUICK)
        workers = {f"rollout-{n}": [f"rollout-{n}"] for n in range(WORKLOADS[workload].rollout_workers)}
        workers |= {"reference": ["reference"], "source": ["source", "reward"], "trainer": ["trainer"]}
        modes = dict.fromkeys((SYNC, *options.modes))
        with Cluster(PROCESS, workers, {}) as cluster:
            sides = {mode: partial(one_run, cluster, options, workload, mode) for mode in modes}
            runs = by_turns(sides, options.rounds)
        return {
            name: value
            for mode in modes
            for name, value in figures_of(runs[mode], runs[SYNC], f"{mode}_{workload}").items()
        }

    return measure


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", nargs="+", choices=[*MODES], default=[*MODES], help="besides sync")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the workload says")
    parser.add_argument("--real-s", type=float, default=0.025, help="real seconds that a simulated one takes")


BENCH = Bench(
    about=__doc__,
    parts={workload: of_workload(workload) for workload in WORKLOADS},
    add_options=add_options,
    machine=lambda options: {name: getattr(options, name) for name in QUICK},
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
