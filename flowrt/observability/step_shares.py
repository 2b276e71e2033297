"""Shares of time of many steps: consecutive lines of attribution.jsonl added up, so that an answer stays small."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

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
    roles: dict[str, Counter[str]] = {}
    roots: Counter[tuple[str, str, str]] = Counter()
    worst: dict[str, Counter[str]] = {}
    for line in lines:
        for role, seconds in line["roles"].items():
            of_role = roles.setdefault(role, Counter())
            workers = max(of_role["workers"], seconds.get("workers", 0))
            of_role.update(seconds)
            of_role["workers"] = workers
        for role, cause, root, seconds in line.get("roots", ()):
            roots[role, cause, root] += seconds
        for cause, workers in line.get("worst", {}).items():
            worst.setdefault(cause, Counter()).update(dict(workers))
    return {
        "step": lines[-1]["step"],
        "from_s": lines[0].get("from_s"),
        "to_s": lines[-1].get("to_s"),
        "steps": len(lines),
        "roles": {role: {name: round(value, 4) for name, value in of.items()} for role, of in roles.items()},
        "roots": [[*key, round(seconds, 4)] for key, seconds in roots.most_common()],
        "worst": {
            cause: [[worker, round(seconds, 4)] for worker, seconds in of.most_common(MAX_WORST)]
            for cause, of in worst.items()
        },
    }
