"""Worklist: the parked requests that have to be tried again after an event.

The tables report their changes here; `transitions.pulls.serve_worklist` tries the requests and empties the worklist.
"""

from collections.abc import Iterable, Sequence

from flowrt.ids import GroupId, WorkerId


class Worklist:
    """Workers and stages with pulls to try, whether to try the offers, and groups for the group filter to decide on.

    Args:
        order: names of all stages in the order of the dataflow. Stages are served in it, so that the commands of an
            event do not depend on how a set is ordered.
        after_window: stages whose pulls depend on the training window.
    """

    def __init__(self, order: Sequence[str] = (), after_window: Iterable[str] = ()) -> None:
        self._order = tuple(order)
        self._after_window = tuple(after_window)
        self._workers: dict[WorkerId, None] = {}
        self._stages: dict[str, None] = {}
        self._ready: dict[GroupId, None] = {}
        self._offers = False
        self._window = False
        self._members = False
        self.is_due = False
        """Whether anything was added since the latest `take_ready`. An attribute: every event reads it."""

    def add_worker(self, worker: WorkerId) -> None:
        """The weights or the capacity of a worker have changed: its pulls of generating stages may be served."""
        self._workers[worker] = None
        self.is_due = True

    def add_stage(self, name: str) -> None:
        """Slots have become ready for this stage, or no more will."""
        self._stages[name] = None
        self.is_due = True

    def add_stages(self, names: Iterable[str]) -> None:
        """As `add_stage`, for each of these."""
        self._stages.update(dict.fromkeys(names))
        self.is_due = True

    def add_ready(self, groups: Iterable[GroupId]) -> None:
        """Groups have become ready to train: the group filter has to decide on them."""
        self._ready.update(dict.fromkeys(groups))
        self.is_due = True

    def add_all(self) -> None:
        """All parked requests may be served."""
        self._workers.clear()
        self.add_stages(self._order)
        self._offers = self._window = True
        self.is_due = True

    def add_offers(self) -> None:
        """Rows were freed, or an offer was withdrawn: later offers may fit into the budget."""
        self._offers = True
        self.is_due = True

    def add_window(self) -> None:
        """The training window has changed: admission may open or start more."""
        self._window = True
        self.is_due = True

    def add_members(self) -> None:
        """A worker has joined, left or completed its role."""
        self._members = True

    def take_ready(self) -> list[GroupId]:
        """Begin a round: reset `is_due`; returns the groups that the group filter has to decide on."""
        self.is_due = False
        if not self._ready:  # nearly always
            return []
        due = list(self._ready)
        self._ready.clear()
        return due

    def take_workers(self) -> list[WorkerId]:
        """The workers whose pulls have to be tried, in the order in which they were added."""
        if not self._workers:  # nearly always
            return []
        due = list(self._workers)
        self._workers.clear()
        return due

    def take_offers(self) -> bool:
        """Whether the offers have to be tried; adds the stages that depend on the window if that has changed."""
        if self._window:
            self.add_stages(self._after_window)
        due = self._window or self._offers
        self._window = self._offers = False
        return due

    def take_stages(self) -> list[str]:
        """The stages whose pulls have to be tried, in the order of the dataflow."""
        if not self._stages:
            return []
        due = [name for name in self._order if name in self._stages]
        self._stages.clear()
        return due

    def take_members(self) -> bool:
        """Whether the members have changed since the last call."""
        due = self._members
        self._members = False
        return due
