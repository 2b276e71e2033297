"""Conditions on a replayed state, as ``wait > 60``: a measurement, a comparison and a number."""

import operator
import re
from collections.abc import Callable, Mapping

from flowrt.errors import ConfigError
from flowrt.observability.replay import Replay


def _oldest_wait_s(replay: Replay) -> float:
    return max((replay.now - since_s for _, _, since_s in replay.core.waiting()), default=0.0)


MEASUREMENTS: Mapping[str, Callable[[Replay], float]] = {
    "wait": _oldest_wait_s,
    "step": lambda replay: replay.core.state.window.step,
    "live_groups": lambda replay: replay.core.state.window.live,
    "leases": lambda replay: len(replay.core.state.table.leases),
    "workers": lambda replay: len(replay.core.state.membership.members()),
    "dropped": lambda replay: sum(dict(replay.core.state.dropped).values()),
    "ended": lambda replay: replay.core.ended is not None,
}
"""``wait``: age of the oldest open wait, in seconds; ``ended``: 1 once the run has ended, else 0."""
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|==|>|<)\s*([0-9]+(?:\.[0-9]*)?)\s*")


def condition(text: str) -> Callable[[Replay], bool]:
    """The condition that this text states. Raises ConfigError if it states none."""
    found = _CONDITION.fullmatch(text)
    if found is None or found[1] not in MEASUREMENTS:
        raise ConfigError(
            f"--until {text!r:.80} is no condition: it is NAME > NUMBER (or >=, <, <=, ==), with NAME one of "
            f"{', '.join(MEASUREMENTS)}"
        )
    measure, compare, bound = MEASUREMENTS[found[1]], _COMPARISONS[found[2]], float(found[3])
    return lambda replay: compare(measure(replay), bound)
