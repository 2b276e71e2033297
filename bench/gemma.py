"""A pretrained model learns a task: examples/larger_number.py on Gemma 3 270M, once for each seed.

    python bench/gemma.py [--model DIR] [--seeds 3] [--quick] [--json PATH]

``--model`` is the directory that scripts/install_gemma writes by default. ``held_out_first`` and ``held_out_last`` are
the rewards of the most likely answers to 64 held-out prompts, before training and after it; ``minutes`` count from the
start of the command to its end. Figures are medians over seeds, ``_least`` the worst seed. ``reward_to_5``,
``reward_to_10`` … are the mean rewards of five steps.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common.report import write
from rich.console import Console
from rich.table import Table

EXAMPLE = Path(__file__).parents[1] / "examples" / "larger_number.py"
MODEL = Path.home() / ".cache/flowrt/gemma-3-270m"
TIMEOUT_S = 7200.0
WINDOW = 5


def run(model: Path, seed: int, flags: list[str]) -> dict[str, float]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "flowrt.cli", "run", str(EXAMPLE), "--model", str(model), "--seed", str(seed)]
        began = time.monotonic()
        subprocess.run([*command, "--run-dir", str(run_dir), *flags], check=True, timeout=TIMEOUT_S)
        minutes = (time.monotonic() - began) / 60
        summary = json.loads((run_dir / "summary.json").read_text())
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines]
    curve = {
        f"reward_to_{end}": statistics.fmean(rewards[end - WINDOW : end])
        for end in range(WINDOW, len(rewards) + 1, WINDOW)
    }
    held_out = {"held_out_first": summary["eval_first"], "held_out_last": summary["eval_last"]}
    return {"minutes": minutes, "samples_per_s": summary["samples_per_s"], **held_out, **curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="directory of the checkpoint")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--quick", action="store_true", help="5 steps of one seed")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"no model in {arguments.model}; scripts/install_gemma writes it there")
    seeds, flags = (1, ["--steps", "5"]) if arguments.quick else (arguments.seeds, [])
    runs = [run(arguments.model, seed, flags) for seed in range(seeds)]
    metrics = {name: statistics.median(figures[name] for figures in runs) for name in runs[0]}
    metrics["held_out_last_least"] = min(figures["held_out_last"] for figures in runs)
    metrics["minutes_most"] = max(figures["minutes"] for figures in runs)
    table = Table("metric", "median", *(f"seed {seed}" for seed in range(seeds)), title=EXAMPLE.name)
    for name in runs[0]:
        table.add_row(name, f"{metrics[name]:.3f}", *(f"{figures[name]:.3f}" for figures in runs))
    Console().print(table)
    write(arguments.json, metrics, seeds=seeds)


if __name__ == "__main__":
    main()
