"""Health of a run: warnings about conditions that no metric of a step shows.

- A request that waits for much longer than usual.
- A disk that is nearly full.
- An evaluation of which the last two results are clearly below the best one.

These checks depend on the clock or on results of evaluations, so they are outside the core, and only warn.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

INTERVAL_STEPS = 50
"""Each check warns at most once in this number of steps; evaluations, once for each data set."""
WAIT_FACTOR = 6.0
MIN_WAIT_S = 30.0
MIN_LOOKS = 20
"""Observations of the oldest wait that are needed before another one is compared with their median."""
MAX_LOOKS = 200
MIN_FREE = 0.05
ERRORS = 3.0
"""Standard errors of the difference by which a result has to be below the best one."""
MEAN, ERROR = "avg@", "_error"


class Health:
    """The checks, with the last ages of the oldest wait and the step of the last warning of each check."""

    def __init__(self) -> None:
        self._looks: deque[float] = deque(maxlen=MAX_LOOKS)
        self._warned: dict[str, int] = {}
        self.log: list[tuple[int, str]] = []
        """The last 8 warnings: (step, text)."""

    def oldest_wait(self, waits: Sequence[tuple[str, str, float]], now: float, step: int) -> str:
        """Compare the age of the oldest waiting request with its usual value.

        Args:
            waits: (worker, what it waits for, since when) of each, in seconds.
            now: seconds on the same clock.
            step: the step in training; waits in step 0 are not observed.

        Returns:
            A warning if the age is over 6 times the median of the last ages and over 30 s; empty if it is not, or if
            the last such warning is less than 50 steps ago.
        """
        if step < 1:
            return ""
        worker, what, since_s = min(waits, key=lambda wait: wait[2], default=("", "", now))
        oldest_s = now - since_s
        usual_s = median(self._looks) if len(self._looks) >= MIN_LOOKS else None
        self._looks.append(oldest_s)
        if usual_s is None or oldest_s <= max(WAIT_FACTOR * usual_s, MIN_WAIT_S):
            return ""
        return self._once(
            "wait", step, f"{worker} has waited {oldest_s:.0f} s for {what}; the oldest wait is usually {usual_s:.1f} s"
        )

    def disk(self, free: int, total: int, where: str, step: int) -> str:
        """A warning if less than 5 % of a disk is free; empty if not, or if the last one is less than 50 steps ago.

        Args:
            free: free bytes of the disk.
            total: bytes of the disk.
            where: what is stored on the disk, for the text.
            step: the step in training.
        """
        if total <= 0 or free >= MIN_FREE * total:
            return ""
        return self._once("disk", step, f"the disk of {where} has {free / 1e9:.1f} GB left, {100 * free / total:.1f} %")

    def evaluation(self, name: str, history: Mapping[tuple[str, int], Mapping[str, Any]], step: int) -> str:
        """A warning if the last two results on a data set are below the best one by three standard errors.

        The standard errors are those of the difference. Empty if there is no such drop, with fewer than three results,
        or if the last such warning for the data set is less than 50 steps ago.

        Args:
            name: the data set.
            history: results of all evaluations, by (data set, version).
            step: the step in training.
        """
        results = [line for (of, _), line in sorted(history.items(), key=lambda entry: entry[0][1]) if of == name]
        key = next((key for key in (results[-1] if results else ()) if key.startswith(MEAN) and ERROR not in key), "")
        means = [
            (line[key], line.get(f"{key}{ERROR}", 0.0), line.get("version", 0))
            for line in results
            if isinstance(line.get(key), int | float)
        ]
        if len(means) < 3:
            return ""
        best, best_error, best_version = max(means[:-2])
        if any(best - value <= ERRORS * (best_error**2 + error**2) ** 0.5 for value, error, _ in means[-2:]):
            return ""
        last, _, version = means[-1]
        return self._once(
            f"evaluation {name}",
            step,
            f"evaluation {name}: {key} is {last:.4g} in version {version}, and was {best:.4g} in version {best_version}"
            f"; the last two are below that by more than {ERRORS:.0f} standard errors",
        )

    def _once(self, rule: str, step: int, text: str) -> str:
        last = self._warned.get(rule)
        if last is not None and step - last < INTERVAL_STEPS:
            return ""
        self._warned[rule] = step
        self.log = [*self.log, (step, text)][-8:]
        return text
