"""What observers are told: where the run is, who waits for whom, how it ended. The waits are bounded in number."""

import heapq
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from flowrt.controller.core import Core
from flowrt.controller.waitgraph import MOST_WAITS, OBSERVER


def status(
    core: Core,
    now: float,
    wait_s: float,
    latest: Mapping[str, Any],
    numbers: Mapping[str, float],
    cut_off: Mapping[str, float],
) -> dict[str, Any]:
    """As the JSON of a Status message; ``wait_s`` is how long a worker waits for an answer.

    ``cut_off`` are those from whom nothing comes any more, and for how many seconds.
    """
    samples, receivers = core.samples, core.weights.receivers
    waits = heapq.nsmallest(MOST_WAITS, samples.waiting(), key=itemgetter(2))
    members = [one for one in core.roster.members() if one.role != OBSERVER]
    return {
        "step": samples.window.step,
        "steps": samples.window.steps,
        "live_groups": samples.window.live,
        "workers": {one.id: one.role for one in members},
        "versions": {one.id: receivers[one.id].applied for one in members if one.id in receivers},
        "latest_version": core.weights.latest,
        "dropped": dict(samples.retreat.dropped),
        "cut_off": dict(cut_off),
        "waits": [(who, what, round(now - since_s, 1)) for who, what, since_s in waits],
        "graph": core.wait_graph(now, wait_s).as_json(),
        "latest": dict(latest),
        "numbers": dict(numbers),
        "ended": None if core.ended is None else [core.ended.reason, core.ended.code],
    }
