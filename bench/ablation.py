"""Throughput gained by streaming, asynchrony and each further step: an ablation with simulated engines.

    python bench/ablation.py [--quick] [--json PATH] [--workloads paper ...] [--modes sync streaming ...]

Controller, source, rollout workers, reference, reward and trainer are real processes that exchange real messages; only
the engines are simulated (flowrt/engines/simulated/engine.py): they wait for the time of a cost model and compute
nothing. Each mode adds to the previous one:

    sync        staleness 0, a barrier after every task of a step: generation, scores, training, weights
    streaming   staleness 0, samples pass to the next stage one by one, the trainer takes complete micro-batches
    delayed     staleness bound 1, and new weights are sent during generation (delayed update)
    rolling     also: at most two workers at a time fetch new weights, and swap between two tokens
    tail        also: prompts whose earlier responses were long go to reserved workers (tail lanes)

Throughput is samples trained per simulated second, from the first opened prompt to the end of the last step, which
includes the time to fill the pipeline. (workload, mode) pairs take turns, with a new seed each round; the figures are
medians over rounds. `theory` is the prediction of bench/end_to_end/simulated/theory.py from the same costs.
"""

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from common.report import write
from end_to_end.simulated.bubble_attribution import LOSSES, ROLES, Accounts
from end_to_end.simulated.cluster import running_cluster
from end_to_end.simulated.modes import EXTRA_MODES, MODES, RunSpec
from end_to_end.simulated.theory import predicted_s
from end_to_end.simulated.workloads import WORKLOADS
from rich.console import Console
from rich.table import Table

Results = dict[tuple[str, str], list[Accounts]]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def speedups(results: Results, workload: str, mode: str, base: str = "sync") -> list[float]:
    """Samples/s of each round over those of ``base`` in the same round, which has the same seed."""
    return [
        one.samples_per_s / other.samples_per_s
        for one, other in zip(results[workload, mode], results[workload, base], strict=True)
    ]


def gain_over_previous(results: Results, workload: str, mode: str, modes: list[str]) -> float:
    """Median over rounds of the speed-up of a mode over the previous one in ``modes``; 1 for the first."""
    return median(speedups(results, workload, mode, modes[max(modes.index(mode) - 1, 0)]))


def table_of(results: Results, workload: str, modes: list[str]) -> Table:
    """The table of a workload: speed-up, and busy time and losses by role, of each mode."""
    table = Table(title=f"{workload}: medians of {len(results[workload, modes[0]])} runs; times in simulated seconds")
    for name in ("mode", "speed-up (range)", "over before", "s a step", "theory", "staleness", "rows full"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for role in ROLES:
        table.add_column(f"{role}: busy, lost to", justify="left")
    table.add_column("CPU", justify="right")
    for mode in modes:
        runs = results[workload, mode]
        gains = speedups(results, workload, mode)
        table.add_row(
            mode,
            f"{median(gains):.2f} ({min(gains):.2f}-{max(gains):.2f})",
            f"{gain_over_previous(results, workload, mode, modes):.3f}",
            f"{median([one.step_s for one in runs]):.1f}",
            f"{median([predicted_s(one.spec) for one in runs]):.1f}",
            f"{median([one.staleness_mean for one in runs]):.2f}",
            f"{median([one.occupied for one in runs]):.0%}",
            *(cell(runs, role) for role in ROLES),
            f"{median([one.cpu for one in runs]):.0%}",
        )
    return table


def cell(runs: list[Accounts], role: str) -> str:
    """Busy share of a role over the run (of the trainer also after its first step), and losses of at least 0.5 %."""
    lost = {loss: median([one.lost[role][loss] for one in runs]) for loss in LOSSES}
    words = " ".join(f"{loss} {share:.0%}" for loss, share in lost.items() if share >= 0.005)
    steady = f" ({median([one.steady for one in runs]):.0%})" if role == "trainer" else ""
    return f"[bold]{median([one.busy[role] for one in runs]):.0%}[/]{steady} {words}"


def metrics_of(results: Results, modes: list[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for (workload, mode), runs in results.items():
        key = f"{mode}_{workload}"
        gains = speedups(results, workload, mode)
        metrics[f"speedup_{key}"] = median(gains)
        metrics[f"speedup_least_{key}"], metrics[f"speedup_most_{key}"] = min(gains), max(gains)
        metrics[f"over_before_{key}"] = gain_over_previous(results, workload, mode, modes)
        metrics[f"step_s_{key}"] = median([one.step_s for one in runs])
        metrics[f"theory_step_s_{key}"] = median([predicted_s(one.spec) for one in runs])
        metrics[f"rows_full_{key}"] = median([one.occupied for one in runs])
        metrics[f"staleness_mean_{key}"] = median([one.staleness_mean for one in runs])
        metrics[f"staleness_max_{key}"] = max(one.staleness_max for one in runs)
        metrics[f"prompts_lost_{key}"] = sum(one.prompts_lost for one in runs)
        metrics[f"prompts_trained_twice_{key}"] = sum(one.trained_twice for one in runs)
        metrics[f"samples_{key}"] = sum(one.samples for one in runs)
        metrics[f"dropped_{key}"] = sum(one.dropped for one in runs)
        metrics[f"cpu_{key}"] = median([one.cpu for one in runs])
        metrics[f"busy_steady_trainer_{key}"] = median([one.steady for one in runs])
        for role in ROLES:
            metrics[f"busy_{role}_{key}"] = median([one.busy[role] for one in runs])
            for loss in LOSSES:
                metrics[f"lost_{loss}_{role}_{key}"] = median([one.lost[role][loss] for one in runs])
    return {name: value if value == value else -1.0 for name, value in metrics.items()}


async def measure(arguments: argparse.Namespace, console: Console) -> Results:
    """Run every (workload, mode) pair once a round. Raises RuntimeError if a run fails."""
    results: Results = {(workload, mode): [] for workload in arguments.workloads for mode in arguments.modes}
    async with running_cluster(max(WORKLOADS[name].rollout_workers for name in arguments.workloads)) as processes:
        for round_ in range(arguments.rounds):
            for workload, mode in results:
                steps = arguments.steps or WORKLOADS[workload].steps
                if (MODES | EXTRA_MODES)[mode].bound == 0:
                    steps = max(steps // 3, 3)  # steps do not overlap, so a few show the time of a step
                spec = RunSpec(workload, mode, arguments.seed + round_, steps, arguments.real_s)
                one = await processes.run(spec)
                results[workload, mode].append(one)
                if not arguments.quiet:
                    console.print(f"round {round_}: {workload} {mode} {one.step_s:.1f} s a step", highlight=False)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--quick", action="store_true", help="paper only, one round of few steps, at a quicker pace")
    parser.add_argument("--quiet", action="store_true", help="only the tables")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--modes", nargs="+", choices=[*MODES, *EXTRA_MODES], default=list(MODES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the workload says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real-s", type=float, default=0.025, help="real seconds that a simulated one takes")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workloads, arguments.rounds, arguments.steps, arguments.real_s = ["paper"], 1, 3, 0.009
    if arguments.modes[0] != "sync":
        arguments.modes = ["sync", *(mode for mode in arguments.modes if mode != "sync")]
    console = Console(width=190)
    results = asyncio.run(measure(arguments, console))
    for workload in arguments.workloads:
        console.print(table_of(results, workload, arguments.modes))
    run = {"rounds": arguments.rounds, "steps": arguments.steps, "real_s": arguments.real_s}
    write(arguments.json, metrics_of(results, arguments.modes), load=os.getloadavg()[1], **run)


if __name__ == "__main__":
    main()
