"""Names of a run's numbers in the formats of other tools: one for each number, the same in all formats.

- A metric of metrics.jsonl that has no group is in the group ``train``: ``kl`` is ``train/kl``. One that has a group,
  as ``eval/held_out/avg@4``, keeps its name; of a guard on METRIC it is ``guard/METRIC``.
- The share of a kind of time in the time of a role, from 0 to 1, is ``time/ROLE/KIND``.
- Prometheus allows only ASCII letters, digits and underscores in a name: `prometheus_name`.
"""

import re
from collections.abc import Mapping
from typing import Any

from flowrt.controller.attribution.causes import KINDS
from flowrt.controller.storage.run_metrics import GUARD

STEP = "step"
"""The field of metrics.jsonl that is the x axis of all others, and no metric itself."""
_NOT_PROMETHEUS = re.compile(r"[^a-zA-Z0-9_]")


def exported_name(metric: str) -> str:
    """The name of a metric of metrics.jsonl in all formats but that of Prometheus."""
    metric = metric.encode(errors="replace").decode()  # W&B and TensorBoard accept no lone surrogates
    if metric.startswith(GUARD):
        return f"guard/{metric.removeprefix(GUARD)}"
    return metric if "/" in metric else f"train/{metric}"


def prometheus_name(name: str) -> str:
    """The name in Prometheus of what has this name in the other formats."""
    return f"flowrt_{_NOT_PROMETHEUS.sub('_', name)}"


def exported_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a line of metrics.jsonl, by their exported names."""
    return {
        exported_name(name): float(value)
        for name, value in line.items()
        if name != STEP and isinstance(value, int | float) and not isinstance(value, bool)
    }


def exported_shares(line: Mapping[str, Any]) -> dict[str, float]:
    """The shares of time in a line of attribution.jsonl, by their exported names; none of a role without time."""
    shares: dict[str, float] = {}
    for role, of in line["roles"].items():
        total_s = sum(of[kind] for kind in KINDS)
        if total_s > 0:
            shares |= {f"time/{role}/{kind}": of[kind] / total_s for kind in KINDS}
    return shares
