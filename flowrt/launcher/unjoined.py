"""Processes whose workers have not joined the run: a sparse line for each, with the end of its log.

A worker joins before it loads a model, so what delays it is its start: a scheduler that holds its step back, a host
that does not answer, a container that is being fetched, a firewall.
"""

from collections.abc import Callable, Collection, Mapping
from time import monotonic

from flowrt.launcher.processes import Child, Children
from flowrt.launcher.views.waits import duration

REPEAT_FACTOR = 4
"""The next line about a process comes after this many times as long."""
MAX_LINES, MAX_SENTENCES = 4, 8
"""Processes that are described at a time, on the terminal and to the caller; the others are counted."""
_HELD_BACK = (
    "SLURM holds its step back, because other steps have the cores, memory or devices that it asks for; give each step "
    "its part with --exact, --mem=0 and --gpus-per-node or --gres in the launch prefix"
)
REASONS = {
    "step creation temporarily disabled": _HELD_BACK,
    "step creation still disabled": _HELD_BACK,
    "is looking for the controller": "its process runs, and has no answer from the controller: can its host connect to "
    "that address?",
}
"""What an end of a log means, by a part of it."""


class UnjoinedWorkers:
    """Decides when a process whose workers are not in the run is reported."""

    def __init__(
        self,
        children: Children,
        workers: Mapping[str, Collection[str]],
        after_s: float,
        report: Callable[[str], None],
    ) -> None:
        """Make it without a report.

        Args:
            children: the processes.
            workers: the names of the workers of each process, by the name of the process; others are not reported.
            after_s: seconds until the first line about a process.
            report: prints a line.
        """
        self._children = children
        self._workers = workers
        self._after_s = after_s
        self._report = report
        self._started_s: dict[tuple[str, int], float] = {}  # by name and pid
        self._next_s: dict[tuple[str, int], float] = {}
        self._joined: set[tuple[str, int]] = set()

    def check(self, present: Collection[str]) -> dict[str, str]:
        """Report the processes that are due; returns a sentence for each process that is overdue, by its name.

        ``present``: names of the workers in the run.
        """
        now = monotonic()
        running = {(child.name, child.process.pid): child for child in self._children.running()}
        absent = {}
        for key, child in running.items():
            missing = [name for name in self._workers.get(child.name, ()) if name not in present]
            if not missing:
                self._joined.add(key)
            elif key not in self._joined:
                absent[key] = (child, missing)
        self._joined &= running.keys()
        self._started_s = {key: self._started_s.get(key, now) for key in absent}
        self._next_s = {key: self._next_s.get(key, now + self._after_s) for key in absent}
        due = [key for key in absent if now >= self._next_s[key]]
        for key in due:
            self._next_s[key] = now + (now - self._started_s[key]) * (REPEAT_FACTOR - 1)
        for key in due[:MAX_LINES]:
            self._report(_sentence(*absent[key], now - self._started_s[key]))
        if len(due) > MAX_LINES:
            self._report(f"{len(due) - MAX_LINES} more processes have not joined; see {absent[due[0]][0].log.parent}")
        overdue = [key for key in absent if now - self._started_s[key] >= self._after_s]
        return {key[0]: _sentence(*absent[key], now - self._started_s[key]) for key in overdue[:MAX_SENTENCES]}


def _sentence(child: Child, missing: Collection[str], for_s: float) -> str:
    """Which workers have not joined, for how long, why if that is known, and the end of the log of their process."""
    names = list(missing)
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    tail = child.log_end()
    reason = next((f": {text}" for part, text in REASONS.items() if part in tail), "")
    shown = f"; its log {child.log} ends: {tail}" if tail else f"; its log {child.log} is empty"
    return f"{named} {'has' if len(names) == 1 else 'have'} not joined for {duration(for_s)}{reason}{shown}"
