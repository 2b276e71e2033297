"""What streaming, asynchrony and each further step are worth: an ablation with simulated engines in real processes.

    python bench/ablation.py [--quick] [--json PATH] [--workloads paper ...] [--modes sync streaming ...]

Controller, source, rollout workers, reference, reward and trainer are processes that speak over the real wire; only
the engines are simulated (flowrt/engines/simulated/engine.py): they take their time and compute nothing. Modes add up:

    sync        staleness 0, a barrier after every task of a step: generation, scores, training, weights
    streaming   staleness 0, samples go on one by one and the trainer takes micro-batches as they become complete
    delayed     staleness bound 1, and new weights are sent during generation (delayed parameter update)
    rolling     and at most two workers at a time take new weights, and put them into use between two tokens
    tail        and prompts that were long before go to reserved workers (tail lanes)

Throughput is samples trained per simulated second, from the first opened prompt to the end of the last step: filling
the pipeline counts against the mode that fills it. (workload, mode) pairs take turns, with a new seed each round; the
figures are medians over rounds. `theory` is bench/end_to_end/simulated/theory.py: the same costs without a runtime.
"""

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from common.report import write
from end_to_end.simulated.bubble_attribution import LOSSES, ROLES, Accounts
from end_to_end.simulated.cluster import cast
from end_to_end.simulated.modes import ASIDE, MODES, Play
from end_to_end.simulated.theory import predicted_s
from end_to_end.simulated.workloads import WORKLOADS
from rich.console import Console
from rich.table import Table

Results = dict[tuple[str, str], list[Accounts]]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def speedups(results: Results, workload: str, mode: str, base: str = "sync") -> list[float]:
    """Against another mode's run of the same round, which had the same seed."""
    return [
        one.samples_per_s / other.samples_per_s
        for one, other in zip(results[workload, mode], results[workload, base], strict=True)
    ]


def over_before(results: Results, workload: str, mode: str, modes: list[str]) -> float:
    """What a mode gains over the one before it, seed by seed."""
    return median(speedups(results, workload, mode, modes[max(modes.index(mode) - 1, 0)]))


def table_of(results: Results, workload: str, modes: list[str]) -> Table:
    """One workload: what each mode gains, who is busy, what the rest of the time went to."""
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
            f"{over_before(results, workload, mode, modes):.3f}",
            f"{median([one.step_s for one in runs]):.1f}",
            f"{median([predicted_s(one.play) for one in runs]):.1f}",
            f"{median([one.staleness_mean for one in runs]):.2f}",
            f"{median([one.occupied for one in runs]):.0%}",
            *(cell(runs, role) for role in ROLES),
            f"{median([one.cpu for one in runs]):.0%}",
        )
    return table


def cell(runs: list[Accounts], role: str) -> str:
    """Busy over the whole run (the trainer's after its first step, too), and the losses of at least half a percent."""
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
        metrics[f"over_before_{key}"] = over_before(results, workload, mode, modes)
        metrics[f"step_s_{key}"] = median([one.step_s for one in runs])
        metrics[f"theory_step_s_{key}"] = median([predicted_s(one.play) for one in runs])
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
    """All runs, (workload, mode) pairs in turn."""
    results: Results = {(workload, mode): [] for workload in arguments.workloads for mode in arguments.modes}
    async with cast(max(WORKLOADS[name].rollout_workers for name in arguments.workloads)) as processes:
        for round_ in range(arguments.rounds):
            for workload, mode in results:
                steps = arguments.steps or WORKLOADS[workload].steps
                if (MODES | ASIDE)[mode].bound == 0:
                    steps = max(steps // 3, 3)  # nothing overlaps from step to step: each is as long as the others
                play = Play(workload, mode, arguments.seed + round_, steps, arguments.real_s)
                one = await processes.play(play)
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
    parser.add_argument("--modes", nargs="+", choices=[*MODES, *ASIDE], default=list(MODES))
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
