"""Runs of the command `flowrt`, each to its end, and what they have written."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLOWRT = (sys.executable, "-m", "flowrt.cli")
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Job:
    """A finished `flowrt run`: its directory, and the seconds of the command."""

    run_dir: Path
    total_s: float

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json."""
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one a step."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def samples_per_s(self) -> float:
        return float(self.summary["samples_per_s"])


def flowrt(*words: object, timeout_s: float = TIMEOUT_S, **how: Any) -> float:
    """Run a command of flowrt; returns its seconds. Raises RuntimeError with the end of its output if it fails.

    Args:
        words: the command without `flowrt`.
        timeout_s: time limit in seconds.
        how: arguments of `subprocess.run`.
    """
    command = [*FLOWRT, *map(str, words)]
    begin_s = time.monotonic()
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False, **how
    )
    if ended.returncode:
        raise RuntimeError(f"`{' '.join(command)}` ended with {ended.returncode}: {ended.stdout[-2000:]}")
    return time.monotonic() - begin_s


def run_job(run_dir: Path, *words: object, timeout_s: float = TIMEOUT_S) -> Job:
    """`flowrt run` with these words, in this directory."""
    return Job(run_dir, flowrt("run", *words, "--run-dir", run_dir, timeout_s=timeout_s))
