"""Groups of equal waits: ``source x16`` in place of 16 lines, ``rollout-0, rollout-1 and 62 more`` for many workers."""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TypeVar

MAX_NAMES = 3
Key = TypeVar("Key", bound=Hashable)


def grouped(waits: Iterable[tuple[Key, str, float]]) -> list[tuple[str, Key, float]]:
    """Group waits by key, in the order of the first wait of each key.

    Args:
        waits: (key, worker that waits, age in seconds) of each wait.

    Returns:
        For each key: the workers as text, the key, and the largest age in seconds.
    """
    workers: dict[Key, Counter[str]] = {}
    oldest_s: dict[Key, float] = {}
    for key, who, age_s in waits:
        workers.setdefault(key, Counter())[who] += 1
        oldest_s[key] = max(oldest_s.get(key, age_s), age_s)
    return [(names(of), key, oldest_s[key]) for key, of in workers.items()]


def names(workers: Counter[str]) -> str:
    """The first workers as text, each with its count if that is above 1, and the number of further workers."""
    shown = [who if count == 1 else f"{who} x{count}" for who, count in list(workers.items())[:MAX_NAMES]]
    rest = len(workers) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def duration(seconds: float) -> str:
    """A time in seconds as text: ``42 s``, ``12 min``, ``3 h 05 min``."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
