"""An exporter of your own: a CSV file with the main metrics of each step, and its worst stored sample.

    STEPS_CSV=steps.csv flowrt export RUN --exporter examples/own_exporter.py:StepsCsv
    STEPS_CSV=steps.csv flowrt run arithmetic --exporters examples/own_exporter.py:StepsCsv

The class is constructed without arguments, in a process of its own; its errors and output never reach the run.
"""

import csv
import os
from pathlib import Path
from time import monotonic
from typing import Any

METRICS = ("wall_s", "reward", "response_length", "staleness_max", "samples_per_s")
WORST = ("worst_reward", "worst_prompt", "worst_completion")
WRITE_S = 5.0
"""Least time in seconds between two writes of the file while the run is active."""


class StepsCsv:
    def __init__(self) -> None:
        self.path = Path(os.environ.get("STEPS_CSV", "steps.csv"))
        self.rows: dict[int, dict[str, Any]] = {}
        self.written_s = monotonic()

    def step(self, line: dict[str, Any]) -> None:
        """Take a line of metrics.jsonl; metrics that it lacks stay empty."""
        self.rows.setdefault(line["step"], {}).update({name: line.get(name) for name in METRICS})
        if monotonic() - self.written_s > WRITE_S:
            self.write()

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Take the stored samples of one step or evaluation, the worst first; called after `step` for that step."""
        worst = rows[0]
        if not worst["eval_name"] and worst["step"] in self.rows:
            values = (worst["reward"], worst["prompt_text"], worst["completion"])
            self.rows[worst["step"]].update(zip(WORST, values, strict=True))

    def rewound(self, step: int) -> None:
        """Drop the rows from ``step`` on: the run was rolled back, and these steps will be reported again."""
        self.rows = {number: row for number, row in self.rows.items() if number < step}

    def close(self) -> None:
        self.write()

    def write(self) -> None:
        """Replace the file atomically: a reader never sees part of a row."""
        draft = self.path.with_name(f"{self.path.name}.draft")
        with draft.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.DictWriter(file, ["step", *METRICS, *WORST])
            writer.writeheader()
            writer.writerows({"step": step, **self.rows[step]} for step in sorted(self.rows))
        draft.replace(self.path)
        self.written_s = monotonic()
