"""Attribution of a run's time: attribution.jsonl of a live, finished or killed run, read and added up.

Lines of many steps are merged into sums of consecutive steps, so that an answer stays small.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrt.controller.attribution.account import Sums
from flowrt.controller.attribution.causes import KINDS, Cause, Interval, Kind, WaitInterval
from flowrt.controller.attribution.resources import merged_use
from flowrt.controller.attribution.sweep import sweep
from flowrt.controller.storage.time_files import ATTRIBUTION, is_attribution
from flowrt.controller.storage.timeline_file import read_timeline
from flowrt.ids import WorkerId
from flowrt.runtime.run_lines import read_lines

MAX_WORST = 8


def merged(lines: Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """The lines, at most ``most``: if there are more, each is the sum of equally many consecutive steps.

    A sum has the number of its last step, and for each kind the workers with the most seconds, at most `MAX_WORST`.
    """
    if len(lines) <= most:
        return [dict(line) for line in lines]
    size = -(-len(lines) // most)
    return [_sum(lines[at : at + size]) for at in range(0, len(lines), size)]


def _sum(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    times = add_up(lines)
    total = {
        "step": lines[-1]["step"],
        "from_s": times.from_s,
        "to_s": times.to_s,
        "steps": sum(line.get("steps", 1) for line in lines),
        "roles": {
            role: {"workers": times.workers[role], **{kind: round(value, 4) for kind, value in of.items()}}
            for role, of in times.roles.items()
        },
        "roots": [[*key, round(value, 4)] for key, value in times.roots.items()],
        "worst": {
            kind: [[worker, round(value, 4)] for worker, value in list(of.items())[:MAX_WORST]]
            for kind, of in times.worst.items()
        },
    }
    if resources := _sum_resources(lines):
        total["resources"] = resources
    return total


def _sum_resources(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The resources of several lines as one; empty if none has any, or a line is damaged."""
    resources = [line["resources"] for line in lines if isinstance(line.get("resources"), dict)]
    try:
        return merged_use(resources) if resources else {}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return {}


WAITS = {
    Kind.SAMPLES.value: "waiting for samples",
    Kind.GATE.value: "behind the gate",
    Kind.WEIGHTS.value: "waiting for weights",
    Kind.UPDATE.value: "updating weights",
    Kind.SAVE.value: "saving",
    Kind.AWAY.value: "away",
    Kind.OTHER.value: "unexplained",
}
"""Kinds of time other than work, as they are named in sentences."""
MIN_SHARE = 0.05
"""Minimum share of a role's time at which a sentence mentions a kind."""
MIN_ROOT_SHARE = 0.5
"""Share of the time of a kind below which no root is named as its cause, as most of the time has other roots."""
CAUSES = {cause.value: cause for cause in Cause}


@dataclass(frozen=True)
class Times:
    """Seconds of one or more steps, added up."""

    steps: tuple[int, int]
    """The first and the last step; (0, 0) for the time of one worker."""
    from_s: float
    to_s: float
    workers: Mapping[str, int]
    """By role, the largest number of workers in one of the steps."""
    roles: Mapping[str, Mapping[str, float]]
    """Seconds by role and kind."""
    roots: Mapping[tuple[str, str, str], float]
    """Seconds by role, kind and root."""
    worst: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds by kind and worker, of the workers listed in each step."""

    def shares(self) -> dict[str, dict[str, float]]:
        """The share of each kind in the time of each role, from 0 to 1."""
        return {
            role: {kind: of.get(kind, 0.0) / max(sum(of.values()), 1e-9) for kind in KINDS}
            for role, of in self.roles.items()
        }

    def root(self, role: str, kind: str) -> tuple[str, float]:
        """The root with the most seconds of a kind in a role, and its share of them (0 to 1); ("", 0.0) without one."""
        roots = {root: seconds for (of, cause, root), seconds in self.roots.items() if (of, cause) == (role, kind)}
        if not roots:
            return "", 0.0
        first = max(roots, key=lambda root: roots[root])
        return first, min(roots[first] / max(self.roles[role].get(kind, 0.0), 1e-9), 1.0)

    def sentence(self, role: str) -> str:
        """The largest share of a role's time other than work, or its share of work if no other reaches `MIN_SHARE`.

        For example "rollout: 41 % behind the gate, because of the trainer (66 %)". If no root has half of that time,
        the largest one is given in "because of several (rollout-1 15 %)".
        """
        of = self.shares()[role]
        waits = {kind: of[kind] for kind in WAITS if of[kind] >= MIN_SHARE}
        kind = max(waits, key=lambda wait: waits[wait], default="")
        if not kind:
            return f"{role}: {of[Kind.BUSY.value]:.0%} busy".replace("%", " %")
        return f"{role}: {waits[kind]:.0%} {WAITS[kind]}{self._because(role, kind)}".replace("%", " %")

    def _because(self, role: str, kind: str) -> str:
        root, share = self.root(role, kind)
        if not root:
            return ""
        if share < MIN_ROOT_SHARE:
            return f", because of several ({root} {share:.0%})"
        return f", because of {f'the {root}' if root in self.roles else root} ({share:.0%})"

    def as_json(self) -> dict[str, Any]:
        """The seconds as plain data, with the shares and sentences."""
        return {
            "steps": list(self.steps),
            "from_s": self.from_s,
            "to_s": self.to_s,
            "roles": {role: {"workers": self.workers.get(role, 0), **of} for role, of in self.roles.items()},
            "shares": self.shares(),
            "roots": [[*key, seconds] for key, seconds in self.roots.items()],
            "worst": {kind: list(map(list, of.items())) for kind, of in self.worst.items()},
            "sentences": [self.sentence(role) for role in self.roles],
        }


def read(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a run by step, and the number of damaged ones; ([], 0) without the file.

    A step that was rolled back has the line of its last repetition. Raises OSError if the file is unreadable.
    """
    path = run_dir / ATTRIBUTION
    all_lines, damaged = read_lines(path, is_attribution) if path.is_file() else ([], 0)
    lines: list[dict[str, Any]] = []
    for line in all_lines:
        drop_repeated(lines, line["step"])
        lines.append(line)
    return lines, damaged


def drop_repeated(lines: list[dict[str, Any]], step: int) -> None:
    """Remove the lines of ``step`` and of later steps: the run was rolled back, and they are done again."""
    while lines and lines[-1]["step"] >= step:
        lines.pop()


def add_up(lines: Sequence[Mapping[str, Any]]) -> Times:
    """The sum of one or more lines of attribution.jsonl."""
    roles: dict[str, Sums[str]] = {}
    workers: dict[str, int] = {}
    roots: Sums[tuple[str, str, str]] = Sums()
    worst: dict[str, Sums[str]] = {}
    for line in lines:
        for role, of in line["roles"].items():
            roles.setdefault(role, Sums()).add({kind: of[kind] for kind in KINDS if kind in of})
            workers[role] = max(workers.get(role, 0), of.get("workers", 0))
        for role, cause, root, seconds in line["roots"]:
            roots[role, cause, root] += seconds
        for kind, pairs in line["worst"].items():
            worst.setdefault(kind, Sums()).add(dict(pairs))
    return Times(
        steps=(lines[0]["step"], lines[-1]["step"]),
        from_s=lines[0]["from_s"],
        to_s=lines[-1]["to_s"],
        workers=workers,
        roles=roles,
        roots=dict(roots.largest()),
        worst={kind: dict(of.largest()) for kind, of in worst.items()},
    )


def of_worker(run_dir: Path, worker: str, from_s: float, to_s: float) -> Times | None:
    """The time of one worker between two times of the run clock (seconds), from its first span or wait to its last.

    The name of the worker stands in the place of a role. None if the timeline has no span or wait of it. Raises OSError
    if the timeline is unreadable.
    """
    spans: list[Interval] = []
    waits: list[WaitInterval] = []
    role = ""
    for line in read_timeline(run_dir):
        if line.get("worker") != worker or not _is_interval(line) or line["end_s"] <= from_s or line["start_s"] >= to_s:
            continue
        role = str(line.get("role", role))
        length_s = line["end_s"] - line["start_s"]
        if "kind" in line:
            worked_s = float(line.get("worked_s", length_s))
            spans.append(
                Interval(str(line["kind"]), line["start_s"], line["end_s"], worked_s, root=str(line.get("root", "")))
            )
        elif (cause := CAUSES.get(str(line.get("wait")))) is not None:
            root = str(line.get("root", ""))
            waits.append(WaitInterval(WorkerId(worker), cause, root, line["start_s"], line["end_s"]))
    if not spans and not waits:
        return None
    bounds = [(span.start_s, span.end_s) for span in spans] + [(wait.start_s, wait.end_s) for wait in waits]
    first_s = max(min(start_s for start_s, _ in bounds), from_s)
    last_s = min(max(end_s for _, end_s in bounds), to_s)
    lengths_s = sweep(spans, waits, first_s, last_s)
    seconds: Sums[str] = Sums()
    roots: Sums[tuple[str, str, str]] = Sums()
    for (kind, root), length_s in lengths_s.items():
        seconds[kind] += length_s
        if root:
            roots[worker, kind, root] += length_s
    return Times(
        steps=(0, 0),
        from_s=first_s,
        to_s=last_s,
        workers={worker: 1},
        roles={worker: seconds},
        roots=dict(roots.largest()),
    )


def _is_interval(line: Mapping[str, Any]) -> bool:
    times = (line.get("start_s"), line.get("end_s"))
    return all(isinstance(value, int | float) for value in times)
