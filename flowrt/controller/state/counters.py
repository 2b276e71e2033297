"""Limits on what workers report: number and length of names, rates, and finite values.

Workers choose the names and reasons, and the controller sends all of them to observers twice a second.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """A rate limit that allows bursts: up to ``capacity`` tokens, refilled at ``rate_per_s``; full at first."""

    capacity: float
    rate_per_s: float
    spent: float = 0.0
    at_s: float = 0.0

    def take(self, tokens: float, now_s: float) -> bool:
        """Take the tokens and return True if there are enough; otherwise take none."""
        spent = max(self.spent - (now_s - self.at_s) * self.rate_per_s, 0.0)
        if spent + tokens > self.capacity:
            return False
        self.spent, self.at_s = spent + tokens, now_s
        return True


MAX_NAMES = 256
MAX_NAME_CHARS = 500
OTHER_REASONS = "other reasons"


class BoundedCounter(dict[str, int]):
    """Count by reason. Reasons beyond the first 256 are counted together, as `OTHER_REASONS`."""

    def count(self, reason: str, times: int = 1) -> None:
        """Add ``times`` to the count of a reason, whose text is cut to `MAX_NAME_CHARS`."""
        reason = reason[:MAX_NAME_CHARS]
        if reason not in self and len(self) >= MAX_NAMES:
            reason = OTHER_REASONS
        self[reason] = self.get(reason, 0) + times


def validate_names(numbers: Iterable[tuple[str, float]], known: Mapping[str, float]) -> str:
    """Describe why numbers with these names cannot be added to the known ones; empty if they can."""
    names = {name for name, _ in numbers}
    if len(names | known.keys()) > MAX_NAMES:
        return f"{len(names | known.keys())} numbers under different names are more than {MAX_NAMES}; name fewer"
    longest = max(map(len, names), default=0)
    return (
        f"a number's name has {longest} characters, over the limit of {MAX_NAME_CHARS}"
        if longest > MAX_NAME_CHARS
        else ""
    )


def describe_non_finite(numbers: Iterable[tuple[str, float]]) -> str:
    """Describe the numbers that are NaN or infinite; empty if there are none."""
    return ", ".join(f"{name[:MAX_NAME_CHARS]} is {value}" for name, value in numbers if not math.isfinite(value))


def non_finite_names(numbers: Iterable[tuple[str, float]]) -> list[str]:
    """The names of the numbers that are NaN or infinite, sorted."""
    return sorted({name[:MAX_NAME_CHARS] for name, value in numbers if not math.isfinite(value)})


def finite(numbers: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """The numbers that are neither NaN nor infinite."""
    return [(name, value) for name, value in numbers if math.isfinite(value)]
