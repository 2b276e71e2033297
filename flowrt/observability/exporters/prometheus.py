"""The numbers of a run in the text format of Prometheus, version 0.0.4.

Labels have few values: role, kind of time, state; never a worker or a prompt. A counter, whose name ends in ``_total``,
does not decrease when a run is resumed.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from flowrt.observability.exporters.exported_names import exported_numbers, exported_shares, prometheus_name
from flowrt.observability.run_reader import RunFigures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its values by labels."""

    name: str
    kind: Literal["gauge", "counter"]
    about: str
    """Its help, one line."""
    values: Sequence[tuple[Labels, float]]

    def text(self) -> str:
        """Its lines in the format; empty without values."""
        lines = [f"{self.name}{_labels(labels)} {_number(value)}\n" for labels, value in self.values]
        head = f"# HELP {self.name} {_escaped(self.about)}\n# TYPE {self.name} {self.kind}\n"
        return head + "".join(lines) if lines else ""


def prometheus_text(figures: RunFigures, status: Mapping[str, Any] | None = None) -> str:
    """The numbers of a run as text, each metric with its help and type.

    Args:
        figures: from the files of the run.
        status: the last status of the controller; None if there is none.
    """
    families = [*_of_files(figures), *(_of_status(status) if status else ())]
    taken = {name for family in families for name in (family.name, family.name.removesuffix("_total"))}
    numbers = exported_numbers(figures.metrics) | exported_shares(figures.shares or {"roles": {}})
    text = "".join(family.text() for family in [*families, *_of_metrics(numbers, taken)])
    return text.encode(errors="replace").decode()  # no lone surrogates


def _of_files(figures: RunFigures) -> Iterable[Family]:
    yield Family("flowrt_step", "gauge", "Number of the last step, from 0; -1 before the first", [({}, figures.step)])
    yield Family(
        "flowrt_worker_seconds_total",
        "counter",
        "Seconds of all workers of a role, by the kind of time they went to; absent until the run is read",
        [({"role": role, "cause": kind}, value) for (role, kind), value in sorted(figures.seconds.items())],
    )
    events = [({"kind": kind}, float(count)) for kind, count in sorted(figures.events.items())]
    yield Family("flowrt_events", "gauge", "Events in events.jsonl, which is thinned", events)


def _of_status(status: Mapping[str, Any]) -> Iterable[Family]:
    oldest_s = max((age_s for _, _, age_s in status["waits"]), default=0.0)
    states = [
        ({"role": role, "state": state.replace(" ", "_")}, float(count))
        for role, of in sorted(status["counts"]["states"].items())
        for state, count in sorted(of.items())
    ]
    yield Family("flowrt_live_groups", "gauge", "Prompts that are being worked on", [({}, status["live_groups"])])
    yield Family("flowrt_oldest_wait_seconds", "gauge", "Age of the oldest request that waits", [({}, oldest_s)])
    yield Family("flowrt_workers", "gauge", "Workers by role and state", states)
    yield Family("flowrt_workers_cut_off", "gauge", "Workers whose link is down", [({}, len(status["cut_off"]))])


def _of_metrics(numbers: Mapping[str, float], taken: Set[str]) -> Iterable[Family]:
    """A family for each metric.

    Metrics whose names are one in Prometheus, because they differ in characters that it lacks, have a label ``name``.
    A metric of the user's engine with the name of a family of flowrt is left out.
    """
    named: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(numbers):
        named[prometheus_name(name)].append(name)
    for family, names in named.items():
        values = [({"name": name} if len(names) > 1 else {}, numbers[name]) for name in names]
        if family not in taken:
            yield Family(family, "gauge", f"Last value of {' and '.join(names)}", values)


def _labels(labels: Labels) -> str:
    pairs = (f'{name}="{_escaped(value, quote=True)}"' for name, value in labels.items())
    return f"{{{','.join(pairs)}}}" if labels else ""


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(float(value))
