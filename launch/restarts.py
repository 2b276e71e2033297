"""A local run that loses a trainer goes back to its last checkpoint: when, and how often."""

import json
from pathlib import Path
from typing import Any

from flowrt.recipes.paths import checkpoint_steps

FIRST_BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 60.0


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """What the controller wrote when it ended; None when it is running, or was killed."""
    path = run_dir / "summary.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return found


class Restarts:
    """Counts the lives of a run. The gradient and the optimiser of a lost trainer are gone: all go back together."""

    def __init__(self, run_dir: Path, most: int) -> None:
        self._run_dir = run_dir
        self._most = most
        self._made = 0
        self._began_at = 0

    def begin(self) -> None:
        """A life of the run begins, from its newest checkpoint. (A controller that comes back begins none.)"""
        self._began_at = max(checkpoint_steps(self._run_dir), default=0)

    def back_off_s(self, trainer_code: int | None) -> float | None:
        """How long to wait before the next life of a run that has ended; None when there shall be none.

        ``trainer_code`` is what the trainer left with, None if it has not left: it is stopped, or cut off. One that
        failed by itself before it finished a step would fail again, and is not tried twice.
        """
        summary = read_summary(self._run_dir)
        if summary is None or summary["exit_code"] == 0 or not summary["reason"].startswith("trainer"):
            return None
        killed = trainer_code is None or trainer_code < 0
        if self._made >= self._most or not (killed or summary["steps"] > self._began_at):
            return None
        self._made += 1
        return float(min(FIRST_BACK_OFF_S * 4 ** (self._made - 1), LONGEST_BACK_OFF_S))

    def is_untold(self, steps: int) -> bool:
        """Whether all steps are saved and no controller has lived to write the summary. Counts as a restart."""
        untold = read_summary(self._run_dir) is None and max(checkpoint_steps(self._run_dir), default=0) >= steps
        self._made += untold
        return untold and self._made <= max(self._most, 1)

    def reason(self) -> str:
        """Why the last life ended, in the controller's words."""
        summary = read_summary(self._run_dir)
        return str(summary["reason"]) if summary is not None else "the controller was killed"

    def tell(self, back_off_s: float) -> str:
        """What to say about the next life."""
        step = max(checkpoint_steps(self._run_dir), default=0)
        return f"restart {self._made} of {self._most} in {back_off_s:.0f} s, from step {step}"
