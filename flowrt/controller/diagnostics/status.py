"""Status of a run for observers: progress, workers, wait-for graph, and how the run ended; the brief one is limited."""

import json
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

from flowrt.controller.core import Core
from flowrt.controller.diagnostics.wait_graph import MAX_WORKERS
from flowrt.controller.state.guards import MAX_LOGGED
from flowrt.ids import OBSERVER, WorkerId

MOST_BRIEF = {"dropped": 32, "cut_off": 64, "with_results": 64, "drained": 64, "numbers": 64, "evaluated": 32}
"""Maximum number of entries of the tables in a brief status that grow with the workers, reasons or names."""
MAX_BRIEF_BYTES = 40_000


def status(
    core: Core,
    now: float,
    request_timeout_s: float,
    latest: Mapping[str, Any],
    numbers: Mapping[str, float],
    cut_off: Mapping[str, float],
    evaluated: Mapping[str, Mapping[str, Any]] | None = None,
    time: Mapping[str, Any] | None = None,
    *,
    brief: bool = False,
) -> dict[str, Any]:
    """The content of a Status message, as values that JSON can represent.

    Args:
        core: the controller core.
        now: seconds on the run's clock.
        request_timeout_s: how long a worker waits for an answer, in seconds.
        latest: the last line of metrics.jsonl.
        numbers: numbers that workers reported for the summary.
        cut_off: seconds for which the link of a worker has been down, by worker.
        evaluated: the newest evaluation results by data set.
        time: the last line of attribution.jsonl; None before there is one.
        brief: limit the tables that grow with the workers: list those with an alarm first, and count the others.
    """
    state, weights = core.state, core.state.models.policy
    receivers = weights.receivers
    graph = core.wait_graph(now, request_timeout_s, cut_off)
    if brief:
        listed = [WorkerId(worker.worker) for worker in graph.workers]
    else:
        listed = [member.id for member in state.membership.members() if member.role != OBSERVER]
    states: dict[str, dict[str, int]] = {}
    for (role, name), count in graph.counts.items():
        states.setdefault(role, {})[name] = count
    content = {
        "step": state.window.step,
        "steps": state.window.steps,
        "live_groups": state.window.live,
        "workers": {name: state.membership.role(name) for name in listed},
        "versions": {name: receivers[name].applied for name in listed if name in receivers},
        "latest_version": weights.latest,
        "dropped": dict(state.dropped),
        "cut_off": dict(cut_off),
        "vacancies": {role: [round(for_s, 1), why] for role, (for_s, why) in state.membership.vacancies(now).items()},
        "with_results": [] if brief else sorted(state.membership.with_results()),
        "drained": sorted(state.membership.drained),
        "waits": [(edge.who, edge.what, round(edge.age_s, 1)) for edge in graph.requests],
        "graph": graph.as_json(),
        "guards": {"firing": state.guards.firing[:MAX_LOGGED], "log": [list(entry) for entry in state.guards.log]},
        "latest": dict(latest),
        "numbers": dict(numbers),
        "evaluated": {name: dict(line) for name, line in (evaluated or {}).items()},
        "time": None if time is None else dict(time),
        "ended": None if state.ended is None else [state.ended.reason, state.ended.code],
        "counts": {"states": states, "versions": dict(weights.applying)},
        "others": sum(graph.counts.values()) - len(listed),
    }
    if brief:
        content |= {name: _first(content[name], count) for name, count in MOST_BRIEF.items()}
    return content


def brief_text(content: Mapping[str, Any]) -> str:
    """A brief status as JSON. Above 40 KB, fewer entries of its tables are listed until it fits or none is left."""
    text = json.dumps(content)
    most = MAX_WORKERS
    while len(text) > MAX_BRIEF_BYTES and most:
        most = most * 7 // 8 * MAX_BRIEF_BYTES // len(text)
        graph = {
            **content["graph"],
            "workers": content["graph"]["workers"][:most],
            "waits": content["graph"]["waits"][:most],
        }
        cut = {name: _first(content[name], most) for name in ("workers", "versions", "waits", *MOST_BRIEF)}
        others = content["others"] + len(content["workers"]) - len(cut["workers"])
        text = json.dumps({**content, **cut, "graph": graph, "others": others})
    return text


def followed(core: Core, names: Collection[str]) -> dict[str, list[str]]:
    """Those of these workers that are in the run, that have results since they joined, and that an operator drained."""
    members = core.state.membership
    present = [name for name in names if name in members]
    with_results = members.with_results() if present else set()
    return {
        "present": present,
        "with_results": [name for name in present if name in with_results],
        "drained": [name for name in names if name in members.drained],
    }


def _first(entries: Any, count: int) -> Any:
    """The first entries of a table or list."""
    return dict(islice(entries.items(), count)) if isinstance(entries, dict) else entries[:count]
