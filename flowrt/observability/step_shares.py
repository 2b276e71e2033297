"""Shares of time of many steps: consecutive lines of attribution.jsonl added up, so that an answer stays small."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowrt.observability.attribution import add_up

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
    times = add_up(lines)
    return {
        "step": lines[-1]["step"],
        "from_s": times.from_s,
        "to_s": times.to_s,
        "steps": len(lines),
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
