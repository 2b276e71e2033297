"""Attribution of time: what every second of every worker was spent on, and because of whom.

- `causes` has the words: the eight kinds of time, and waits with their cause and root.
- `waits` notes, from the core's state, why each parked request waits.
- `sweep` turns what workers report and what the core notes into one kind of time for each second.
- `account` adds the seconds up by optimiser step. All of it is pure: times are arguments.
"""

from flowrt.controller.attribution.causes import KINDS, Cause, Interval, Kind, WaitInterval
from flowrt.controller.attribution.sweep import kind_of_span, sweep

__all__ = ["KINDS", "Cause", "Interval", "Kind", "WaitInterval", "kind_of_span", "sweep"]
