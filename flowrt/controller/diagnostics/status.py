"""Status of a run for observers: progress, workers, wait-for graph, and how the run ended; bounded in size."""

import heapq
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from flowrt.controller.core import Core
from flowrt.controller.diagnostics.wait_graph import MAX_WAITS
from flowrt.controller.state.guards import MAX_LOGGED
from flowrt.ids import OBSERVER


def status(
    core: Core,
    now: float,
    request_timeout_s: float,
    latest: Mapping[str, Any],
    numbers: Mapping[str, float],
    cut_off: Mapping[str, float],
    evaluated: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The content of a Status message.

    Args:
        core: the controller core.
        now: seconds on the run's clock.
        request_timeout_s: how long a worker waits for an answer.
        latest: the last line of metrics.jsonl.
        numbers: numbers that workers reported for the summary.
        cut_off: workers whose link is down, and for how many seconds.
        evaluated: the newest results by data set.
    """
    state, weights = core.state, core.state.models.policy
    receivers = weights.receivers
    waits = heapq.nsmallest(MAX_WAITS, core.waiting(), key=itemgetter(2))
    members = [one for one in state.membership.members() if one.role != OBSERVER]
    return {
        "step": state.window.step,
        "steps": state.window.steps,
        "live_groups": state.window.live,
        "workers": {one.id: one.role for one in members},
        "versions": {one.id: receivers[one.id].applied for one in members if one.id in receivers},
        "latest_version": weights.latest,
        "dropped": dict(state.dropped),
        "cut_off": dict(cut_off),
        "vacancies": {role: [round(for_s, 1), why] for role, (for_s, why) in state.membership.vacancies(now).items()},
        "with_results": sorted(state.membership.with_results()),
        "drained": sorted(state.membership.drained),
        "waits": [(who, what, round(now - since_s, 1)) for who, what, since_s in waits],
        "graph": core.wait_graph(now, request_timeout_s).as_json(),
        "guards": {"firing": state.guards.firing[:MAX_LOGGED], "log": [list(one) for one in state.guards.log]},
        "latest": dict(latest),
        "numbers": dict(numbers),
        "evaluated": {name: dict(line) for name, line in (evaluated or {}).items()},
        "ended": None if state.ended is None else [state.ended.reason, state.ended.code],
    }
