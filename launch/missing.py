"""Processes of ours that live although the run has given them up: stopped, or stuck where they cannot speak.

Who has died is replaced (`supervisor`); these would keep their place for ever, so they are killed, and then replaced.
"""

import signal
from collections.abc import Callable, Collection, Mapping
from time import monotonic

from flowrt.launch.processes import Children


class Missing:
    """Knows which of the processes the controller has heard of; ``say`` is told of each that is killed."""

    def __init__(self, children: Children, patience_s: float, join_s: float, say: Callable[[str], None]) -> None:
        """``patience_s`` seconds after the controller has last had a process among its workers, it is killed.

        One that it never had has ``join_s`` more: for so long it looks for the controller, if it is not stopped.
        """
        self._children = children
        self._patience_s = patience_s
        self._join_s = join_s
        self._say = say
        self._until_s: dict[tuple[str, int], float] = {}  # by name and pid: when it has to be in
        self._came: set[tuple[str, int]] = set()

    def excuse(self, for_s: float) -> None:
        """Another controller begins: whoever was in has so many seconds more to find it."""
        self._until_s = dict.fromkeys(self._until_s, monotonic() + for_s + self._patience_s)

    def look(self, workers: Collection[str], ours: Mapping[str, Collection[str]], vital: Collection[str] = ()) -> None:
        """``workers`` are those that the controller has now; kills who of ``ours`` is none for too long.

        A process of ours may be several workers: the ranks of a torchrun, each of which has to come. Who is vital is
        only missed until it has: that it leaves ends this life of the run anyway.
        """
        now = monotonic()
        living = {}
        for child in self._children.running():
            who = (child.name, child.process.pid)
            absent = [name for name in ours.get(child.name, ()) if name not in workers]
            if child.name in ours and not absent:
                living[who] = now + self._patience_s
                self._came.add(who)
            elif absent and not (child.name in vital and who in self._came):
                living[who] = self._until_s.get(who, now + self._join_s + self._patience_s)
                if now > living[who]:
                    how = "left the run and its process has not" if who in self._came else "never come, and it lives"
                    self._say(f"{', '.join(absent)} has {how}: it is killed")
                    self._children.signal_group(child, signal.SIGKILL)
        self._until_s = living
        self._came &= living.keys()
