"""The figures of one simulated run, from its files and its summary."""

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from end_to_end.simulated.modes import RunSpec

from flowrt.controller.storage.timeline_file import read_timeline
from flowrt.runtime.timeline import Span, busy_fraction

ROLES = ("rollout", "reference", "reward", "trainer")


@dataclass(frozen=True)
class Accounts:
    """Figures of one run.

    Attributes:
        samples_per_s: samples trained per simulated second.
        step_s: simulated seconds a step.
        busy: share of the time from the first opened prompt to the end of the last step in which a role worked. A
            rollout worker is busy while it generates, even with few occupied rows; any other role for the time that the
            cost model gives the work of its engine.
        counts: of the summary, by name.
        cpu: share of the machine's cores that the run used.
    """

    samples_per_s: float
    step_s: float
    busy: dict[str, float]
    counts: dict[str, float]
    cpu: float


def account(run_dir: Path, spec: RunSpec, summary: dict[str, Any], cpu: float) -> Accounts:
    """The figures of a run from its files; times of its timeline are real seconds."""
    spans: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for line in read_timeline(run_dir):
        if line.get("kind") in ("generate", "step"):
            spans[line["role"], line["worker"]].append(Span(line["kind"], line["start_s"], line["end_s"]))
    real_s = summary["training_s"]
    end_s = max(span.end_s for (role, _), of in spans.items() for span in of if role == "trainer")
    generating = [busy_fraction(of, end_s - real_s, end_s) for (role, _), of in spans.items() if role == "rollout"]
    worked = {role: summary["numbers"].get(f"worked_s of {role}", 0.0) / real_s for role in ROLES[1:]}
    steps = len((run_dir / "metrics.jsonl").read_text().splitlines())
    names = ("samples", "staleness_max", "staleness_mean", "prompts_lost", "prompts_trained_twice")
    return Accounts(
        samples_per_s=summary["samples"] / real_s * spec.real_s,
        step_s=real_s / spec.real_s / steps,
        busy={"rollout": statistics.fmean(generating), **worked},
        counts={name: summary[name] for name in names} | {"dropped": sum(summary["dropped"].values())},
        cpu=cpu,
    )
