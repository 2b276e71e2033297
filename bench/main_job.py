"""The default job over seeds and staleness bounds: reward, wall time, samples/s, busy share of each role.

    python bench/main_job.py [--quick] [--json PATH] [--seeds N] [--max-staleness 0 1 2 4]

Every run is a `flowrt run` command; wall times count from its start, so they include building the model and its warm
start.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common.report import write
from rich.console import Console
from rich.table import Table

WINDOW = 10
TARGETS = (0.8, 0.9)
TIMEOUT_S = 600.0


def run_job(run_dir: Path, seed: int, staleness: int, steps: int, *more: str) -> dict[str, Any]:
    """Run the default job with ``more`` flags; returns its summary with three more keys.

    ``total_s`` are the seconds of the command, ``first_step_total_s`` those until its first step was closed.
    ``reached`` has for each target the seconds until the mean reward of ten steps reached it, None if it never did.
    Raises CalledProcessError if the command fails, TimeoutExpired after TIMEOUT_S.
    """
    command = [sys.executable, "-m", "flowrt.cli", "run", "--run-dir", str(run_dir), "--seed", str(seed)]
    command += ["--max-staleness", str(staleness), "--steps", str(steps), *more]
    start_s = time.monotonic()
    subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    total_s = time.monotonic() - start_s
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # The controller's clock starts when the model is ready; the user's wait includes the time before.
    before_s = total_s - summary["wall_s"]
    reached = {}
    for target in TARGETS:
        hits = [
            before_s + lines[end - 1]["wall_s"]
            for end in range(WINDOW, len(lines) + 1)
            if statistics.fmean(line["reward"] for line in lines[end - WINDOW : end]) >= target
        ]
        reached[target] = hits[0] if hits else None
    return {**summary, "total_s": total_s, "first_step_total_s": before_s + lines[0]["wall_s"], "reached": reached}


def row_of(result: dict[str, Any]) -> list[str]:
    def seconds(value: float | None) -> str:
        return "never" if value is None else f"{value:.0f} s"

    busy = result["busy_fraction"]
    return [
        str(result["staleness_bound"]),
        str(result["seed"]),
        f"{result['reward_first']:.3f} → {result['reward_last']:.3f}",
        f"{result['eval_first']:.3f} → {result['eval_last']:.3f}",
        seconds(result["first_step_total_s"]),
        seconds(result["reached"][0.8]),
        seconds(result["reached"][0.9]),
        seconds(result["total_s"]),
        f"{result['samples_per_s']:.0f}",
        f"{result['staleness_mean']:.2f} ({result['staleness_max']})",
        f"{busy.get('rollout', 0):.0%} / {busy.get('trainer', 0):.0%} / {busy.get('reference', 0):.0%}",
    ]


def reached_target(result: dict[str, Any]) -> bool:
    """Whether the reward rose from at most 0.4 to at least 0.8, within 240 s of the start of the command."""
    reached_s = result["reached"][0.8]
    return result["reward_first"] <= 0.4 and result["reward_last"] >= 0.8 and reached_s is not None and reached_s <= 240


def metrics_of(results: list[dict[str, Any]], bound: int) -> dict[str, float]:
    """Medians over the seeds at one staleness bound, and the number of seeds that reached each target."""
    some = [result for result in results if result["staleness_bound"] == bound]
    key = f"staleness_{bound}"
    reached = [r["reached"][0.8] for r in some if r["reached"][0.8] is not None]
    metrics = {
        f"{key}_seeds": len(some),
        f"{key}_seeds_from_0.4_to_0.8_in_240_s": sum(reached_target(r) for r in some),
        f"{key}_seeds_to_0.9": sum(r["reward_last"] >= 0.9 for r in some),
        f"{key}_first_step_total_s": statistics.median(r["first_step_total_s"] for r in some),
        f"{key}_prompts_lost": sum(r["prompts_lost"] for r in some),
        f"{key}_prompts_trained_twice": sum(r["prompts_trained_twice"] for r in some),
        f"{key}_staleness_max": max(r["staleness_max"] for r in some),
    }
    for name in ("reward_first", "reward_last", "eval_first", "eval_last", "samples_per_s", "tokens_per_s", "total_s"):
        metrics[f"{key}_{name}"] = statistics.median(r[name] for r in some)
    for role in ("rollout", "trainer", "reference", "reward"):
        metrics[f"{key}_busy_{role}"] = statistics.median(r["busy_fraction"].get(role, 0.0) for r in some)
    if reached:
        metrics[f"{key}_seconds_to_0.8"] = statistics.median(reached)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--quick", action="store_true", help="one seed, 40 steps, staleness 0 and 1")
    parser.add_argument("--seeds", type=int, default=10, help="seeds at staleness 1")
    parser.add_argument("--other-seeds", type=int, default=3, help="seeds at the other bounds")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[1, 0, 2, 4])
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds = arguments.other_seeds = 1
        arguments.steps, arguments.max_staleness = 40, [1, 0]
    results = []
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        for bound in arguments.max_staleness:
            for seed in range(arguments.seeds if bound == 1 else arguments.other_seeds):
                result = run_job(Path(folder) / f"s{bound}-{seed}", seed, bound, arguments.steps)
                results.append(result)
                console.print("  ".join(row_of(result)), highlight=False)
    headings = ["bound", "seed", "reward", "held out (greedy)", "first step", "0.8 after", "0.9 after", "total"]
    table = Table(*headings, "samples/s", "staleness (max)", "busy rollout / trainer / reference", title="flowrt run")
    for result in results:
        table.add_row(*row_of(result))
    console.print(table)
    metrics = {name: value for bound in arguments.max_staleness for name, value in metrics_of(results, bound).items()}
    write(arguments.json, metrics, steps=arguments.steps)


if __name__ == "__main__":
    main()
