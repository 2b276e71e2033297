"""Row `default_speed`: samples/s of the default job in this tree over samples/s in another tree.

The other tree is a checkout with its own `.venv`, or a commit of this repository, which is unpacked for the
measurement and run by this interpreter. Both run `flowrt run`, in alternating order, so that neither always runs on the
warmer machine; medians over rounds, with the same seeds on both sides.
"""

import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.harness import ROOT, by_turns

ROUNDS, STEPS, TIMEOUT_S = 5, 120, 600.0


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout, and the interpreter that runs it."""

    path: Path
    python: Path


def python_of(tree: Path) -> Path:
    """The interpreter of a checkout."""
    return tree / ".venv" / "bin" / "python"


def refusal(against: str) -> str:
    """The reason why a directory or commit cannot be compared with, as a sentence; empty if it can."""
    tree = Path(against)
    if not tree.is_dir():
        return "" if commit_of(against) else f"{against} is neither a directory nor a commit of {ROOT}"
    if not (tree / "flowrt" / "cli.py").is_file():
        return f"{tree} is no checkout of flowrt"
    if not python_of(tree).is_file():
        return f"{tree} has no {python_of(tree).relative_to(tree)}; create a virtual environment with flowrt there"
    return ""


def commit_of(name: str) -> str:
    """The hash of the commit of this repository with this name; empty if there is none."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout.strip()


@contextmanager
def other_tree(against: str, folder: Path) -> Iterator[Tree]:
    """The tree to compare with; the files of a commit are unpacked below ``folder``."""
    if Path(against).is_dir():
        tree = Path(against).resolve()
        yield Tree(tree, python_of(tree))
        return
    # No git worktree: a killed measurement would leave its entry in the repository.
    archive, path = folder / "against.tar", folder / "against"
    words = ["git", "-C", str(ROOT), "archive", "--output", str(archive), commit_of(against)]
    subprocess.run(words, check=True, timeout=TIMEOUT_S)
    with tarfile.open(archive) as files:
        files.extractall(path, filter="data")
    yield Tree(path, Path(sys.executable))


def samples_per_s(tree: Tree, run_dir: Path, seed: int, steps: int) -> float:
    """Samples/s of one default job, from summary.json in its run directory."""
    words = ["--run-dir", str(run_dir), "--seed", str(seed), "--steps", str(steps), "--data.eval-prompts", "0"]
    command = [str(tree.python), "-m", "flowrt.cli", "run", *words]
    # The tree takes precedence over installed packages, also in the processes that the run starts.
    environment = {**os.environ, "PYTHONPATH": str(tree.path)}
    subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL, cwd=tree.path, env=environment)
    return float(json.loads((run_dir / "summary.json").read_text())["samples_per_s"])


def measure(quick: bool, against: str) -> dict[str, float]:
    """Median samples/s of this and of the other tree, and their ratio."""
    rounds, steps = (1, 20) if quick else (ROUNDS, STEPS)
    with (
        tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder,
        other_tree(against, Path(folder)) as other,
    ):

        def run(tree: Tree, turn: int) -> float:
            return samples_per_s(tree, Path(folder) / f"{tree is other}-{turn}", turn, steps)

        speeds = by_turns(
            {"against": partial(run, other), "here": partial(run, Tree(ROOT, Path(sys.executable)))}, rounds
        )
    here, other_speed = (statistics.median(speeds[side]) for side in ("here", "against"))
    return {
        "default_speed_samples_per_s": here,
        "default_speed_samples_per_s_against": other_speed,
        "default_speed_ratio": here / other_speed,
    }
