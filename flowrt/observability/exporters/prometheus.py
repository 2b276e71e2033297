"""Metrics of a run in the text format of Prometheus, version 0.0.4.

Labels have few values: role, cause and state, never a worker or a prompt.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from flowrt.observability.run_reader import RunReader

CAUSES = ("busy", "samples", "gate", "weights", "update", "save", "away", "other")
Sample = tuple[Mapping[str, str], float]


def prometheus_text(reader: RunReader, status: Mapping[str, Any] | None = None) -> str:
    """The metrics of a run.

    Args:
        reader: of the run directory; `RunReader.read_new` is not called here.
        status: the last status of the controller; None if there is none.

    Returns:
        The text, in which each metric has its help and type.
    """
    latest = reader.last_step()
    lines: list[str] = []
    step = latest.get("step", -1.0)
    lines += _family("flowrt_step", "gauge", "Number of the last step, from 0; -1 before the first", [({}, step)])
    if "reward" in latest:
        lines += _family("flowrt_reward", "gauge", "Mean reward of the last step", [({}, latest["reward"])])
    metrics = [({"name": name}, value) for name, value in sorted(latest.items()) if name != "step"]
    lines += _family("flowrt_metric", "gauge", "Metrics of the last step by their name in metrics.jsonl", metrics)
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for line in reader.attribution()["lines"]:
        for role, shares in line["roles"].items():
            for cause in CAUSES:
                value = shares.get(cause, 0.0)
                seconds[role, cause] += value if isinstance(value, int | float) else 0.0
    lines += _family(
        "flowrt_worker_seconds_total",
        "counter",
        "Seconds of all workers of a role that went to a cause",
        [({"role": role, "cause": cause}, value) for (role, cause), value in sorted(seconds.items())],
    )
    kinds = Counter(str(line["kind"]) for line in reader.events()["events"])
    lines += _family(
        "flowrt_events", "gauge", "Events in events.jsonl", [({"kind": kind}, n) for kind, n in sorted(kinds.items())]
    )
    return "".join(f"{line}\n" for line in [*lines, *_of_status(status or {})])


def _of_status(status: Mapping[str, Any]) -> list[str]:
    if not status:
        return []
    lines = _family("flowrt_live_groups", "gauge", "Prompts that are being worked on", [({}, status["live_groups"])])
    waits = [wait[2] for wait in status.get("waits", ())]
    oldest_s = max(waits, default=0.0)
    lines += _family("flowrt_oldest_wait_seconds", "gauge", "Age of the oldest request that waits", [({}, oldest_s)])
    workers = status.get("workers", {})
    counts: Counter[tuple[str, str]] = Counter()
    if isinstance(workers, Mapping):
        waiting = {wait[0] for wait in status.get("waits", ())}
        cut_off = status.get("cut_off", {})
        for worker, role in workers.items():
            state = "cut_off" if worker in cut_off else "waiting" if worker in waiting else "working"
            counts[str(role), state] += 1
    found = [({"role": role, "state": state}, float(n)) for (role, state), n in sorted(counts.items())]
    return lines + _family("flowrt_workers", "gauge", "Workers by role and state", found)


def _family(name: str, kind: str, about: str, samples: Iterable[Sample]) -> list[str]:
    """The lines of one metric; empty without samples."""
    lines = [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *lines] if lines else []


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(float(value)) if value != int(value) else str(int(value))
