"""Bounds of numbers, declared on the fields of a configuration as ``Annotated[float, Interval(ge=0, le=10)]``.

- `Interval` is that of annotated-types, always with a lower and an upper end.
- NaN and infinities lie in no interval.
"""

import argparse
import math
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Interval

MAX_TIMEOUT_S = 30 * 24 * 3600
"""Longest timeout: 30 days."""
MAX_INT64 = 2**63 - 1
TIMEOUT = Interval(gt=0, le=MAX_TIMEOUT_S)
Seconds = Annotated[float, TIMEOUT]
"""A timeout, in seconds."""
Limit = Annotated[float | None, Interval(ge=-1_000_000_000_000, le=1_000_000_000_000)]
Reward = Annotated[float, Interval(ge=-1_000_000_000, le=1_000_000_000)]
RewardLimit = Annotated[float | None, Interval(ge=-1_000_000_000, le=1_000_000_000)]


def interval_of(hint: Any) -> Interval | None:
    """The interval in a type hint of the form ``Annotated[TYPE, Interval(...)]``; None for any other hint."""
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Interval)), None)


def ends(interval: Interval) -> tuple[float, float]:
    """The lower and the upper end, whether or not they belong to the interval. Raises TypeError if one is missing."""
    low = interval.gt if interval.ge is None else interval.ge
    high = interval.lt if interval.le is None else interval.le
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        raise TypeError(f"{interval} does not have two ends that are numbers")
    return low, high


def contains(interval: Interval, value: float) -> bool:
    """Whether the value lies in the interval."""
    low, high = ends(interval)
    return (low < value if interval.ge is None else low <= value) and (
        value < high if interval.le is None else value <= high
    )


def advice(interval: Interval) -> str:
    """The values that lie in the interval, for the end of an error message: ``0 or more, and at most 10``."""
    low, high = ends(interval)
    least = f"a value above {low:,}" if interval.ge is None else f"{low:,} or more"
    return f"{least}, and less than {high:,}" if interval.le is None else f"{least}, and at most {high:,}"


def span(interval: Interval, kind: type) -> str:
    """The interval of an int or float, for help texts and tables: ``above 0 to 100``, ``1 to 64``."""
    low, high = ends(interval)
    last = "2^63 - 1" if high == MAX_INT64 else f"{high:,}"
    if kind is int and interval.ge is None:
        return f"{low + 1:,} to {last}"
    return f"{'above ' if interval.ge is None else ''}{low:,} to {'below ' if interval.le is None else ''}{last}"


def seconds(text: str) -> float:
    """Parse a timeout for argparse. Raises ArgumentTypeError if it is out of bounds, ValueError if it is no number."""
    value = float(text)
    if not contains(TIMEOUT, value):
        raise argparse.ArgumentTypeError(f"{text} seconds is not a valid timeout; use {advice(TIMEOUT)}")
    return value


def limits(low: float | None, high: float | None) -> tuple[float, float]:
    """Two limits, infinite where they are not given."""
    return -math.inf if low is None else low, math.inf if high is None else high
