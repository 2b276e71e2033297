"""Shares of time of many steps: consecutive lines of attribution.jsonl added up, so that an answer stays small."""

import heapq
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

Key = TypeVar("Key")
MAX_WORST = 8


def merged(lines: Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """The lines, at most ``most``: of more, each is the sum of equally many consecutive steps.

    A sum has the number of its last step, and of each cause the workers with the most seconds.
    """
    if len(lines) <= most:
        return [dict(line) for line in lines]
    size = -(-len(lines) // most)
    return [_sum(lines[at : at + size]) for at in range(0, len(lines), size)]


def _sum(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    roles: dict[str, dict[str, float]] = {}
    roots: dict[tuple[str, str, str], float] = {}
    worst: dict[str, dict[str, float]] = {}
    for line in lines:
        for role, seconds in line["roles"].items():
            of_role = roles.setdefault(role, {})
            for name, value in seconds.items():
                before = of_role.get(name, 0)
                of_role[name] = max(before, value) if name == "workers" else before + value
        for role, cause, root, value in line.get("roots", ()):
            roots[role, cause, root] = roots.get((role, cause, root), 0.0) + value
        for cause, workers in line.get("worst", {}).items():
            of_cause = worst.setdefault(cause, {})
            for worker, value in workers:
                of_cause[worker] = of_cause.get(worker, 0.0) + value
    return {
        "step": lines[-1]["step"],
        "from_s": lines[0].get("from_s"),
        "to_s": lines[-1].get("to_s"),
        "steps": len(lines),
        "roles": {role: {name: round(value, 4) for name, value in of.items()} for role, of in roles.items()},
        "roots": [[*key, round(value, 4)] for key, value in _largest(roots, len(roots))],
        "worst": {
            cause: [[worker, round(value, 4)] for worker, value in _largest(of, MAX_WORST)]
            for cause, of in worst.items()
        },
    }


def _largest(of: Mapping[Key, float], count: int) -> list[tuple[Key, float]]:
    return heapq.nlargest(count, of.items(), key=itemgetter(1))
