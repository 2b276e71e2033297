"""Row `default_speed`: samples/s of the default job of this tree over those of another tree, by turns.

The other tree is a checkout with its own `.venv`. Both run the command that a user types, in an order that alternates,
so that neither always runs on the warmer machine; medians over rounds, the same seeds on both sides.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS, STEPS, TIMEOUT_S = 5, 120, 600.0
HERE = Path(__file__).parents[2]


def python_of(tree: Path) -> Path:
    """The interpreter of a checkout."""
    return tree / ".venv" / "bin" / "python"


def refusal(tree: Path) -> str:
    """Why a directory cannot be compared with, in a sentence; empty if it can."""
    if not (tree / "flowrt" / "cli.py").is_file():
        return f"{tree} is no checkout of flowrt"
    if not python_of(tree).is_file():
        return f"{tree} has no {python_of(tree).relative_to(tree)}; create a virtual environment with flowrt there"
    return ""


def samples_per_s(tree: Path, python: Path, run_dir: Path, seed: int, steps: int) -> float:
    """Samples/s of one default job, as its summary has it."""
    words = ["--run-dir", str(run_dir), "--seed", str(seed), "--steps", str(steps), "--data.eval-prompts", "0"]
    command = [str(python), "-m", "flowrt.cli", "run", *words]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL, cwd=tree)
    return float(json.loads((run_dir / "summary.json").read_text())["samples_per_s"])


def measure(quick: bool, against: Path) -> dict[str, float]:
    """Medians of both sides, and their ratio."""
    sides = {"here": (HERE, Path(sys.executable)), "against": (against.resolve(), python_of(against.resolve()))}
    found: dict[str, list[float]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        for turn in range(1 if quick else ROUNDS):
            for side in sorted(sides, reverse=bool(turn % 2)):
                run_dir = Path(folder) / f"{side}-{turn}"
                found[side].append(samples_per_s(*sides[side], run_dir, turn, 20 if quick else STEPS))
    here, there = (statistics.median(found[side]) for side in ("here", "against"))
    return {
        "default_speed_samples_per_s": here,
        "default_speed_samples_per_s_against": there,
        "default_speed_ratio": here / there,
    }
